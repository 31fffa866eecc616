"""Who makes a variable, and on which devices it lies."""
