"""Clusters: their tasks, resolvers, and communication between processes."""
