"""Ports scripts for `tf.distribute` to keras_strategies; needs LibCST."""
