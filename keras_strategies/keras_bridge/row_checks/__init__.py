"""Checks whether a step's loss is a mean over the batch's rows."""
