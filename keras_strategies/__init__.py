"""Distribution strategies for Keras 3 on JAX, in the manner of tf.distribute.

    import keras_strategies as ks  # before keras: chooses its JAX backend
    import keras

    strategy = ks.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(x, y, batch_size=256)

Importing this touches no device, imports neither keras nor jax, and patches
nothing: a name is imported when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

from keras_strategies._core.names import tf_names as _tf_names
from keras_strategies._core.names import versions as _versions
from keras_strategies._core.names.lazy_names import lazy_names as _lazy_names
from keras_strategies.keras_bridge import backend as _backend

if TYPE_CHECKING:
    from keras_strategies import callbacks as callbacks
    from keras_strategies import checkpoint as checkpoint
    from keras_strategies import cluster_resolver as cluster_resolver
    from keras_strategies import data as data
    from keras_strategies import estimator as estimator
    from keras_strategies import experimental as experimental
    from keras_strategies import tpu as tpu
    from keras_strategies._core.compiled import (
        CompiledProgram as CompiledProgram,
    )
    from keras_strategies._core.mesh import ReplicaMesh as ReplicaMesh
    from keras_strategies._core.reduce_op import ReduceOp as ReduceOp
    from keras_strategies._core.values import (
        DistributedValues as DistributedValues,
    )
    from keras_strategies._core.values import Mirrored as Mirrored
    from keras_strategies._core.values import PerReplica as PerReplica
    from keras_strategies.data.distributed import (
        DistributedDataset as DistributedDataset,
    )
    from keras_strategies.data.distributed import (
        DistributedIterator as DistributedIterator,
    )
    from keras_strategies.data.options import InputOptions as InputOptions
    from keras_strategies.data.options import (
        InputReplicationMode as InputReplicationMode,
    )
    from keras_strategies.data.sources.from_function import (
        InputContext as InputContext,
    )
    from keras_strategies.keras_bridge.hooks.global_batch_loss import (
        global_batch_loss as global_batch_loss,
    )
    from keras_strategies.keras_bridge.hooks.gradients import grad as grad
    from keras_strategies.keras_bridge.hooks.gradients import (
        value_and_grad as value_and_grad,
    )
    from keras_strategies.keras_bridge.hooks.merge import merge as merge
    from keras_strategies.keras_bridge.variables.variable_creator import (
        variable_creator_scope as variable_creator_scope,
    )
    from keras_strategies.strategy.current import has_strategy as has_strategy
    from keras_strategies.strategy.default import (
        experimental_set_strategy as experimental_set_strategy,
    )
    from keras_strategies.strategy.default import (
        get_replica_context as get_replica_context,
    )
    from keras_strategies.strategy.default import get_strategy as get_strategy
    from keras_strategies.strategy.default import (
        in_cross_replica_context as in_cross_replica_context,
    )
    from keras_strategies.strategy.extended import (
        StrategyExtended as StrategyExtended,
    )
    from keras_strategies.strategy.losses import (
        compute_average_loss as compute_average_loss,
    )
    from keras_strategies.strategy.losses import (
        scale_regularization_loss as scale_regularization_loss,
    )
    from keras_strategies.strategy.mirrored import (
        MirroredStrategy as MirroredStrategy,
    )
    from keras_strategies.strategy.multi_worker import (
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )
    from keras_strategies.strategy.one_device import (
        OneDeviceStrategy as OneDeviceStrategy,
    )
    from keras_strategies.strategy.replica_context import (
        ReplicaContext as ReplicaContext,
    )
    from keras_strategies.strategy.replica_context import (
        ValueContext as ValueContext,
    )
    from keras_strategies.strategy.strategy import Strategy as Strategy
    from keras_strategies.strategy.tf_compat.function import (
        function as function,
    )
    from keras_strategies.strategy.tf_compat.options import (
        RunOptions as RunOptions,
    )
    from keras_strategies.strategy.tpu import TPUStrategy as TPUStrategy

__version__ = "0.1.0.dev0"

_MODULES = {
    "callbacks": "",
    "checkpoint": "",
    "cluster_resolver": "",
    "data": "",
    "estimator": "",
    "experimental": "",
    "tpu": "",
    "CompiledProgram": "_core.compiled",
    "DistributedDataset": "data.distributed",
    "DistributedIterator": "data.distributed",
    "DistributedValues": "_core.values",
    "InputContext": "data.sources.from_function",
    "InputOptions": "data.options",
    "InputReplicationMode": "data.options",
    "Mirrored": "_core.values",
    "MirroredStrategy": "strategy.mirrored",
    "MultiWorkerMirroredStrategy": "strategy.multi_worker",
    "OneDeviceStrategy": "strategy.one_device",
    "PerReplica": "_core.values",
    "ReduceOp": "_core.reduce_op",
    "ReplicaContext": "strategy.replica_context",
    "ReplicaMesh": "_core.mesh",
    "RunOptions": "strategy.tf_compat.options",
    "Strategy": "strategy.strategy",
    "StrategyExtended": "strategy.extended",
    "TPUStrategy": "strategy.tpu",
    "ValueContext": "strategy.replica_context",
    "compute_average_loss": "strategy.losses",
    "experimental_set_strategy": "strategy.default",
    "function": "strategy.tf_compat.function",
    "get_replica_context": "strategy.default",
    "get_strategy": "strategy.default",
    "global_batch_loss": "keras_bridge.hooks.global_batch_loss",
    "grad": "keras_bridge.hooks.gradients",
    "has_strategy": "strategy.current",
    "in_cross_replica_context": "strategy.default",
    "merge": "keras_bridge.hooks.merge",
    "scale_regularization_loss": "strategy.losses",
    "value_and_grad": "keras_bridge.hooks.gradients",
    "variable_creator_scope": "keras_bridge.variables.variable_creator",
}
"""Where each public name is defined; "" for a module of that name."""

if not _backend.is_command():
    _versions.check_versions()
    _backend.choose_backend()

_get, __dir__ = _lazy_names(__name__, __name__, _MODULES, _tf_names.DISTRIBUTE)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        _backend.require_jax_backend()
    return _get(name)
