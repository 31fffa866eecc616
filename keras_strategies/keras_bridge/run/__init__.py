"""A user's function as a compiled program."""
