"""Names that users write: public ones, tf's, devices, versions."""
