"""The command `keras-strategies checkpoints`."""
