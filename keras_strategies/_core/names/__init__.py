"""Names that users write: public names, TensorFlow's, devices, versions."""
