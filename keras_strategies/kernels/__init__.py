"""Layers that steps compute in other ways than Keras: attention, blocks."""
