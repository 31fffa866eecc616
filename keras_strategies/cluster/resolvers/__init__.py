"""Cluster resolvers: the tasks of a cluster, read from its variables."""
