"""The command `keras-strategies launch`."""
