"""A directory of checkpoints on disk, without jax and keras."""
