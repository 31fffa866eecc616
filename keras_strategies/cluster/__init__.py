"""Who is in a cluster, and what its processes agree on."""
