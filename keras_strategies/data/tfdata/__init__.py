"""`tf.data.Dataset`s as sources."""
