"""Options of distributed input, with tf's names."""

import dataclasses
import enum


class AutoShardPolicy(enum.IntEnum):
    """How several processes share a dataset; as tf.data's.

    Attributes:
      AUTO: By files where the dataset reads enough of them, else as DATA.
      FILE: Each process reads its own files.
      DATA: Each process runs the whole pipeline and keeps its rows.
      HINT: Each `shard(SHARD_HINT, ...)` of the dataset is made the process's.
      OFF: Each process uses all that its dataset yields.

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
    """How a dataset is distributed; tf.data's `experimental_distribute`.

    Attributes:
      auto_shard_policy: How several processes share the dataset.
      num_devices: Not used; for tf's signature.
      auto_shard: The old, boolean form: False is `AutoShardPolicy.OFF`.

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
        """The policy, the old form regarded."""
        if not self.auto_shard:
            return AutoShardPolicy.OFF
        return AutoShardPolicy(self.auto_shard_policy)


class InputReplicationMode(enum.Enum):
    """How often a function that makes a dataset is called.

    Attributes:
      PER_WORKER: Once in each process.
      PER_REPLICA: Once for each replica.

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
    """Options of `experimental_distribute_dataset` and its like.

    Attributes:
      experimental_fetch_to_device: Whether batches are moved to the devices
        before they are asked for.
      experimental_replication_mode: PER_REPLICA is for
        `distribute_datasets_from_function` on one process.
      experimental_place_dataset_on_device: Must be False: reading is done by
        the host.
      experimental_per_replica_buffer_size: How many batches are read ahead.
      distribute: How several processes share a dataset that is no
        `tf.data.Dataset` (one has options of its own).

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
    """Raises for options of input that cannot be followed.

    Raises:
      TypeError: not an `InputOptions`.
      ValueError: the dataset is to be placed on the device.
    """
    if options is None:
        return
    if not isinstance(options, InputOptions):
        raise TypeError(
            "`options` are `ks.InputOptions`. Received: an object of type "
            f"{type(options).__name__}. Options of tf.data belong to the "
            "dataset: `dataset.with_options(options)`."
        )
    if options.experimental_place_dataset_on_device:
        raise ValueError(
            "Datasets are read by the host. Received: "
            "experimental_place_dataset_on_device=True. Leave it out: batches "
            "are moved to the devices ahead of time anyway."
        )
