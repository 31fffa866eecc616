"""Distribution strategies for Keras 3 on JAX, modeled on tf.distribute.

    import keras_strategies as ks  # before keras: chooses its JAX backend
    import keras

    strategy = ks.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(x, y, batch_size=256)

Importing this package does not initialize devices, import keras or jax, or
patch anything. Each public name is imported only when it is first used.
"""

from typing import Any

from keras_strategies.names import lazy_names as _lazy
from keras_strategies.names import versions as _versions
from keras_strategies.names.lazy_names import DISTRIBUTE as _INSTEAD
from keras_strategies.names.lazy_names import lazy_names as _lazy_names

__version__ = "0.2.0.dev0"

_MODULES = {
    "callbacks": "",
    "checkpoint": "",
    "cluster_resolver": "",
    "data": "",
    "estimator": "",
    "experimental": "",
    "tpu": "",
    "CompiledProgram": "spmd.compiled",
    "GradientTape": "tape.gradient_tape",
    "Plan": "planning.report.table",
    "PlannedStep": "planning.report.planned_step",
    "DistributedDataset": "data.distributed",
    "DistributedIterator": "data.distributed",
    "DistributedValues": "spmd.values",
    "InputContext": "data.sources.from_function",
    "InputOptions": "data.options",
    "InputReplicationMode": "data.options",
    "Mirrored": "spmd.values",
    "MirroredStrategy": "strategy.mirrored",
    "MultiWorkerMirroredStrategy": "strategy.multi_worker",
    "OneDeviceStrategy": "strategy.mirrored",
    "PerReplica": "spmd.values",
    "ReduceOp": "spmd.values",
    "ReplicaContext": "strategy.replica_context",
    "ReplicaMesh": "spmd.mesh",
    "RunOptions": "strategy.tf_compat.options",
    "Strategy": "strategy.strategy",
    "StrategyExtended": "strategy.extended",
    "TPUStrategy": "strategy.tpu",
    "ValueContext": "strategy.replica_context",
    "abstract": "variables.abstract_models",
    "by_rows": "kernels.by_rows",
    "compute_average_loss": "strategy.losses",
    "enable_determinism": "gpu.xla_flags",
    "experimental_set_strategy": "strategy.default",
    "function": "strategy.tf_compat.function",
    "get_replica_context": "strategy.default",
    "get_strategy": "strategy.default",
    "global_batch_loss": "hooks.global_batch_loss",
    "grad": "hooks.gradients",
    "has_strategy": "strategy.default",
    "in_cross_replica_context": "strategy.default",
    "merge": "hooks.merge",
    "scale_regularization_loss": "strategy.losses",
    "value_and_grad": "hooks.gradients",
    "variable_creator_scope": "variables.variable_creator",
}
"""The module that defines each public name; "" if the name is a module."""

_versions.check_at_import()

_lazy.enter("plan", "keras_strategies.planning.plan_api", "make_plan")

_get, __dir__ = _lazy_names(__name__, __name__, _MODULES, _INSTEAD)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        _versions.choose_backend()
        import keras

        _versions.check_backend(keras)
    return _get(name)
