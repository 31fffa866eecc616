"""Handles names: of this package, TensorFlow, devices and versions."""
