"""The forms in which steps store the arrays of their state."""
