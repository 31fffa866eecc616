"""TPU topologies and device assignments, named as in tf.tpu.experimental."""

from keras_strategies.tpu.cluster_resolver import (
    TPUSystemMetadata as TPUSystemMetadata,
)
from keras_strategies.tpu.device_assignment import (
    SINGLE_CORE_ASSIGNMENT as SINGLE_CORE_ASSIGNMENT,
)
from keras_strategies.tpu.device_assignment import (
    DeviceAssignment as DeviceAssignment,
)
from keras_strategies.tpu.device_assignment import (
    DeviceOrderMode as DeviceOrderMode,
)
from keras_strategies.tpu.replica_meshes import (
    initialize_tpu_system as initialize_tpu_system,
)
from keras_strategies.tpu.replica_meshes import (
    shutdown_tpu_system as shutdown_tpu_system,
)
from keras_strategies.tpu.topology import Topology as Topology
