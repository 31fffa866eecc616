"""Computes equal operations on the slices of stacked arrays as one."""
