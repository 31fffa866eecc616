"""One step of a model as a compiled program."""
