"""Changes to Keras's objects while a step is traced."""
