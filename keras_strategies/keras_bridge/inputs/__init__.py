"""Inputs: from the data given to `fit` to executions on the devices."""
