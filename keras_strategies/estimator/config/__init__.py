"""RunConfig, its checks, and the cluster that TF_CONFIG describes."""
