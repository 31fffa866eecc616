"""Compiles and runs a user's function for `Strategy.run`."""
