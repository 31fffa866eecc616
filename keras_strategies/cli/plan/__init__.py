"""`keras-strategies plan`: a script's model on slices that are not there."""
