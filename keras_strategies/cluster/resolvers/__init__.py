"""Cluster resolvers, which read a cluster's tasks from its variables."""
