"""Meshes, batches and collectives of programs mapped over replicas."""
