"""Compiles training steps for TPU slices, to find their memory and time."""
