"""Options for distributed input, with the names that TensorFlow uses."""

import dataclasses
import enum

from keras_strategies.cluster.checks import check_type


class AutoShardPolicy(enum.IntEnum):
    """The way in which a dataset is divided among processes, as in tf.data.

    Attributes:
      AUTO: FILE if the dataset can be split by files and reads at least one
        file for each process, else DATA.
      FILE: Each process reads different files.
      DATA: Each process runs the entire pipeline and uses only its own share of
        the rows.
      HINT: Each `shard(SHARD_HINT, ...)` in the dataset is replaced by
        `shard(num_processes, process_index)`.
      OFF: The dataset is not divided: each process uses all the rows that its
        own dataset yields.

    Example:
      ```python
      options = ks.InputOptions(
          distribute=ks.data.DistributeOptions(
              auto_shard_policy=ks.data.AutoShardPolicy.FILE
          )
      )
      files = ks.data.files("train/*.npz", "npz", batch_size=64)
      data = strategy.experimental_distribute_dataset(files, options)
      ```
    """

    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3
    OFF = -1


SHARD_HINT = -1
"""Stands for the number of processes in `dataset.shard(SHARD_HINT, ...)`."""


@dataclasses.dataclass(kw_only=True)
class DistributeOptions:
    """Options for dividing a dataset among processes.

    They correspond to the `experimental_distribute` options of tf.data.

    Attributes:
      auto_shard_policy: The policy by which the dataset is divided among
        processes.
      num_devices: Ignored; accepted for compatibility with TensorFlow.
      auto_shard: The old boolean option; False means `AutoShardPolicy.OFF`.

    Example:
      ```python
      options = ks.data.DistributeOptions(
          auto_shard_policy=ks.data.AutoShardPolicy.OFF
      )
      data = strategy.experimental_distribute_dataset(
          ks.data.files("train/*.npz", "npz", batch_size=64),
          ks.InputOptions(distribute=options),
      )
      ```
    """

    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO
    num_devices: int | None = None
    auto_shard: bool = True

    @property
    def policy(self) -> AutoShardPolicy:
        """The policy; OFF if `auto_shard` is False."""
        if not self.auto_shard:
            return AutoShardPolicy.OFF
        return AutoShardPolicy(self.auto_shard_policy)


class InputReplicationMode(enum.Enum):
    """The number of times that a dataset function is called.

    Attributes:
      PER_WORKER: The function is called once in each process.
      PER_REPLICA: The function is called once for each replica.

    Example:
      ```python
      options = ks.InputOptions(
          experimental_replication_mode=ks.InputReplicationMode.PER_REPLICA
      )
      data = strategy.distribute_datasets_from_function(
          lambda context: dataset, options
      )
      ```
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputOptions:
    """Options for `experimental_distribute_dataset` and similar methods.

    Attributes:
      experimental_fetch_to_device: Whether batches are moved to the devices
        before they are requested.
      experimental_replication_mode: Whether the dataset function is called
        once per process or once per replica. PER_REPLICA is only supported by
        `distribute_datasets_from_function`, in a job with a single process.
      experimental_place_dataset_on_device: Ignored: datasets are read on the
        host, and their batches are moved to the devices ahead of time.
      experimental_per_replica_buffer_size: Number of batches to prefetch.
      distribute: How the dataset is divided among processes. For a
        `tf.data.Dataset`, call its `with_options` instead.

    Example:
      ```python
      options = ks.InputOptions(experimental_per_replica_buffer_size=2)
      data = strategy.experimental_distribute_dataset(dataset, options)
      ```
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = (
        InputReplicationMode.PER_WORKER
    )
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
    distribute: DistributeOptions | None = None


def check_input_options(options: object) -> None:
    """Raises TypeError unless options are an `InputOptions` or None."""
    kind, what = InputOptions | None, "a `ks.InputOptions`"
    fix = "Pass options of tf.data to `dataset.with_options`."
    check_type("`options`", options, kind, what, fix)
