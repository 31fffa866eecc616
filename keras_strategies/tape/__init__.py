"""Gradients by tapes, as in TensorFlow, in code that JAX traces."""
