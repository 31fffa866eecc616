"""Optional parts of the API of `tf.estimator`, such as early stopping."""
