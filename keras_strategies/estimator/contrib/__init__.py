"""Parts of tf.estimator beside Estimator and train_and_evaluate."""
