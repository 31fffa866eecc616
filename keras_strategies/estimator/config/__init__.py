"""RunConfig, its checks, and the cluster that it finds."""
