"""Meshes, batches and collectives of a replica-mapped program (no Keras)."""
