"""grain's datasets and loaders as sources."""
