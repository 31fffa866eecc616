"""Kinds of traced values, by their dependence on the rows of a batch."""
