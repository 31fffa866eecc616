"""Sources that read arrays, files, iterables and torch's datasets."""
