"""Runs scripts up to their first training step, in child processes."""
