"""Scripts that run up to their first training step, in child processes."""
