"""Replacements suggested for unsupported `tf.distribute` names."""

_WORKERS = (
    "`ks.MultiWorkerMirroredStrategy` on the chief and worker tasks. Every "
    "process trains, and no process is a parameter server. To shard variables "
    "over the replicas, pass "
    "`variable_partitioner=ks.experimental.FullySharded()`"
)
_PARTITIONERS = (
    "`ks.experimental.FullySharded(shards, min_size=...)`, where `min_size` is "
    "a number of entries, or pass a function of a variable's path, shape and "
    "dtype as `variable_partitioner`"
)
_ONE_HOST = (
    "`ks.MirroredStrategy`. It replicates the variables on every device, so "
    "reading them needs no transfer"
)
_REDUCING = (
    "the strategy without `cross_device_ops`, because XLA chooses how the "
    "devices communicate"
)
_OPTIONS = "`ks.experimental.CommunicationOptions`"
_PREEMPTED = (
    "`ks.callbacks.Checkpoint`, which saves on SIGTERM at the same step in all "
    "processes. In custom training loops, all processes raise "
    "`SystemExit(75)` before the same step, so save checkpoints regularly with "
    "a `ks.checkpoint.CheckpointManager`"
)
_RESOLVER = (
    "`ks.cluster_resolver.SimpleClusterResolver` with the machines' addresses, "
    "the environment variable TF_CONFIG, or "
    "`ks.MultiWorkerMirroredStrategy(coordinator_address=...)`"
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
    "Server": (
        "`keras-strategies launch`, or start the script in every process. "
        "Each process runs the script itself; no process is a server that "
        "waits for work"
    ),
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
    "rpc": (
        "another library, because keras_strategies has no remote procedure "
        "calls"
    ),
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
