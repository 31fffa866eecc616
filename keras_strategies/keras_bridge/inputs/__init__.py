"""Inputs: turns the data passed to `fit` into executions on the devices."""
