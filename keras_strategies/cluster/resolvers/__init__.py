"""Cluster resolvers, which find a cluster's tasks in environment variables."""
