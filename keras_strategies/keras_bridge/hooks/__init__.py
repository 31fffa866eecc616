"""What Keras's objects do differently while a step is traced."""
