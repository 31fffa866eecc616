"""Additions to Estimator and train_and_evaluate, as in tf.estimator."""
