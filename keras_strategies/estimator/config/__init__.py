"""RunConfig, its checks, and the cluster that it reads from TF_CONFIG."""
