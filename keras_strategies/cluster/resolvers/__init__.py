"""Cluster resolvers: who is in a cluster, read from its variables."""
