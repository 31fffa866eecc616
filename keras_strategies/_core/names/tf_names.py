"""Replacements suggested for unsupported `tf.distribute` names."""

_WORKERS = (
    "`ks.MultiWorkerMirroredStrategy` on chief and worker tasks: every process "
    "trains, no process serves variables, and variables can be sharded over "
    "the replicas (`variable_partitioner=ks.experimental.FullySharded()`)"
)
_PARTITIONERS = (
    "`ks.experimental.FullySharded(shards, min_size=...)`, whose `min_size` is "
    "a number of entries, or a function of a variable's path, shape and dtype"
)
_ONE_HOST = (
    "`ks.MirroredStrategy`: the variables are replicated on every device, so "
    "that reading them needs no transfer"
)
_REDUCING = "nothing instead: XLA chooses how the replicas' devices communicate"
_OPTIONS = "`ks.experimental.CommunicationOptions`"
_PREEMPTED = (
    "`ks.callbacks.Checkpoint`, which saves on SIGTERM at the same step in all "
    "processes. Custom training loops end with `SystemExit(75)` before the "
    "same step: keep a `ks.checkpoint.CheckpointManager`"
)
_RESOLVER = (
    "`ks.cluster_resolver.SimpleClusterResolver` with the machines' addresses, "
    "TF_CONFIG, or `ks.MultiWorkerMirroredStrategy(coordinator_address=...)`"
)

DISTRIBUTE = {
    "CentralStorageStrategy": _ONE_HOST,
    "CrossDeviceOps": _REDUCING,
    "HierarchicalCopyAllReduce": _REDUCING,
    "NcclAllReduce": _REDUCING,
    "ParameterServerStrategy": _WORKERS,
    "ReductionToOneDevice": _REDUCING,
    "StrategyExtendedV1": "`ks.StrategyExtended`",
    "InputWorkers": "`ks.InputContext`",
    "Server": (
        "`keras-strategies launch`, or start the script in every process: "
        "no process waits for work"
    ),
    "coordinator": _WORKERS,
}
"""Names of `tf.distribute`."""

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
    "rpc": "another library: here, processes only train together",
}
"""Names of `tf.distribute.experimental`."""

CLUSTER_RESOLVER = {"GCEClusterResolver": _RESOLVER}
"""Names of `tf.distribute.cluster_resolver`."""

ESTIMATOR = {
    "tpu": (
        "`ks.estimator.Estimator` with `RunConfig(train_distribute="
        "ks.TPUStrategy())`"
    ),
    "SessionRunHook": "`ks.estimator.CheckpointSaverListener` or a callback",
}
"""Names of `tf.estimator`."""
