"""Tables and pictures of a strategy and of its input."""
