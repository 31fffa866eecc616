"""Startup of a distributed JAX job, from this process's role in a cluster."""
