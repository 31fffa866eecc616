"""Clusters: their tasks, and the agreement of their processes."""
