"""Structures of transformers, and the axes that shard them over cores."""
