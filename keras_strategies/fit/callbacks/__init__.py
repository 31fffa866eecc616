"""Callbacks of a running fit, and the state that a checkpoint saves for it."""
