"""The command `keras-strategies doctor`."""
