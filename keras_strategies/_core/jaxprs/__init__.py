"""Traced functions: looked at, cut at their collectives, and compared."""
