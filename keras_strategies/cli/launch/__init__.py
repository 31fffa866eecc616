"""`keras-strategies launch`."""
