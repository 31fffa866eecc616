"""GPUs that are not present, for which programs can be compiled."""
