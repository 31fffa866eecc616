"""Clusters: tasks, resolvers, and communication between processes."""
