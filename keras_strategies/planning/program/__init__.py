"""Reads the work and the time of a compiled TPU program from its text."""
