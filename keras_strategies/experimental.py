"""Strategies under the names of `tf.distribute.experimental`."""

from keras_strategies.strategy.tpu import TPUStrategy as TPUStrategy
