"""The data passed to `fit`, turned into executions on the devices."""
