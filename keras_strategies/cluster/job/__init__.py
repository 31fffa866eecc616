"""From a process's place in a cluster to a job of JAX."""
