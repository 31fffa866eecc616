"""Startup of a distributed JAX job, given this process's role in a cluster."""
