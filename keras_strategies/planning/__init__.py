"""Computes the memory, collectives and time of a training step on TPU slices.

A plan compares candidates. A candidate is a slice together with a layout, which
defines how a model's variables are sharded over the slice's devices.
"""
