"""Handles public names, TensorFlow names, device names and versions."""
