"""Checkpoints on disk."""
