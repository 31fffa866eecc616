"""TPU topologies and device assignments; see `ks.tpu.experimental`."""

from keras_strategies.tpu import experimental as experimental
