"""`keras-strategies checkpoints`."""
