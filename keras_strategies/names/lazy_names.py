"""Names that are imported on first use, and what to use for names of tf."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

_WORKERS = (
    "`ks.MultiWorkerMirroredStrategy`, in which every process trains. To shard "
    "variables, pass `variable_partitioner=ks.experimental.FullySharded()`"
)
_PARTITIONERS = (
    "`ks.experimental.FullySharded(shards, min_size=...)`, or a function of "
    "path, shape and dtype, as `variable_partitioner`"
)
_ONE_HOST = "`ks.MirroredStrategy`"
_REDUCING = "no `cross_device_ops`: XLA chooses how devices communicate"
_OPTIONS = "`ks.experimental.CommunicationOptions`"
_PREEMPTED = (
    "`ks.callbacks.Checkpoint`, which saves on SIGTERM at the same step in all "
    "processes, or in custom loops a `ks.checkpoint.CheckpointManager`"
)
_RESOLVER = (
    "`ks.cluster_resolver.SimpleClusterResolver` with the machines' addresses, "
    "or the environment variable TF_CONFIG"
)

DISTRIBUTE = {
    "CentralStorageStrategy": _ONE_HOST,
    "CollectiveAllReduceStrategy": "`ks.MultiWorkerMirroredStrategy`",
    "CrossDeviceOps": _REDUCING,
    "HierarchicalCopyAllReduce": _REDUCING,
    "NcclAllReduce": _REDUCING,
    "ParameterServerStrategy": _WORKERS,
    "ReductionToOneDevice": _REDUCING,
    "MirroredStrategyV1": "`ks.MirroredStrategy`",
    "StrategyExtendedV1": "`ks.StrategyExtended`",
    "InputWorkers": "`ks.InputContext`",
    "Server": "`keras-strategies launch`, or start the script in every process",
    "coordinator": _WORKERS,
}
"""The replacement for each unsupported name of `tf.distribute`."""

EXPERIMENTAL = {
    "CentralStorageStrategy": _ONE_HOST,
    "CollectiveCommunication": (
        "`ks.experimental.CommunicationImplementation`"
    ),
    "CollectiveHints": _OPTIONS,
    "ParameterServerStrategy": _WORKERS,
    "PreemptionCheckpointHandler": _PREEMPTED,
    "PreemptionWatcher": _PREEMPTED,
    "TerminationConfig": _PREEMPTED,
    "coordinator": _WORKERS,
    "FixedShardsPartitioner": _PARTITIONERS,
    "MaxSizePartitioner": _PARTITIONERS,
    "MinSizePartitioner": _PARTITIONERS,
    "Partitioner": _PARTITIONERS,
    "partitioners": _PARTITIONERS,
    "rpc": "another library",
}
"""The same for `tf.distribute.experimental`."""

CLUSTER_RESOLVER = {"GCEClusterResolver": _RESOLVER}
"""The same for `tf.distribute.cluster_resolver`."""

ESTIMATOR = {
    "tpu": (
        "`ks.estimator.Estimator` with `RunConfig(train_distribute="
        "ks.TPUStrategy())`"
    ),
    "SessionRunHook": "`ks.estimator.CheckpointSaverListener` or a callback",
}
"""The same for `tf.estimator`."""


def lazy_names(
    public: str,
    package: str,
    modules: Mapping[str, str],
    instead: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Creates a module's `__getattr__` and `__dir__`, which import lazily.

    See PEP 562. A module of public names imports each name when it is first
    used.

    Args:
      public: The `__name__` of the module that contains the public names.
      package: The package to which the module names in `modules` are relative.
      modules: The module that defines each name; "" for a name that is itself
        a module of `package`.
      instead: For each unsupported TensorFlow name, the replacement that the
        error message suggests.

    Example:
      ```python
      _MODULES = {"Keep": "keeping", "Checkpoint": "manager"}
      __getattr__, __dir__ = lazy_names(__name__, __name__, _MODULES)
      ```
    """

    def get(name: str) -> Any:
        if instead is not None and name in instead:
            raise AttributeError(
                f"module {public!r} has no attribute {name!r}. This TensorFlow "
                f"name is not supported. Use {instead[name]}. "
                "docs/migration.md lists all names."
            )
        if name not in modules:
            raise AttributeError(f"module {public!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{modules[name] or name}")
        value = getattr(module, name) if modules[name] else module
        # Stored in the module, so that the next access does not call this
        # function.
        setattr(sys.modules[public], name, value)
        return value

    def names() -> list[str]:
        dunder = (n for n in vars(sys.modules[public]) if n[:2] == "__")
        return sorted({*dunder, *modules})

    return get, names


_places: dict[str, tuple[str, str]] = {}


def enter(name: str, module: str, function: str) -> None:
    """Enters a function, whose module is imported when it is first called."""
    _places[name] = module, function


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the function that was entered under a name."""
    module, function = _places[name]
    return getattr(importlib.import_module(module), function)(*args, **kwargs)
