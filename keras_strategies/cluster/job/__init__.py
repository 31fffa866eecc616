"""Startup of JAX's job, from a process's place in a cluster."""
