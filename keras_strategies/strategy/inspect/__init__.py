"""Tables and pictures of strategies and of their input."""
