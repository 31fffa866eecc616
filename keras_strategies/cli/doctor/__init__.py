"""`keras-strategies doctor`."""
