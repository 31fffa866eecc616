"""Options of distributed input, with tf's names."""

import dataclasses
import enum


class AutoShardPolicy(enum.IntEnum):
    """The policy by which several processes share a dataset, as in tf.data.

    Attributes:
      AUTO: FILE if the dataset reads enough files, else DATA.
      FILE: Each process reads different files.
      DATA: Each process runs the entire pipeline and keeps its rows.
      HINT: Each `shard(SHARD_HINT, ...)` of the dataset becomes the process's.
      OFF: Each process uses everything that its dataset yields.

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
    """Options of sharing a dataset; tf.data's `experimental_distribute`.

    Attributes:
      auto_shard_policy: The policy by which several processes share the
        dataset.
      num_devices: Not used; exists for tf's signature.
      auto_shard: The old boolean form; False means `AutoShardPolicy.OFF`.

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
    """The number of calls of a function that makes a dataset.

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
    """Options of `experimental_distribute_dataset` and similar methods.

    Attributes:
      experimental_fetch_to_device: Whether batches are moved to the devices
        before they are requested.
      experimental_replication_mode: The calls of the dataset function.
        PER_REPLICA is for `distribute_datasets_from_function` on one process.
      experimental_place_dataset_on_device: Must be False: the host reads.
      experimental_per_replica_buffer_size: Number of batches to prefetch.
      distribute: How several processes share a dataset other than a
        `tf.data.Dataset`, whose options are set by its `with_options`.

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
    """Raises for unsupported input options.

    Raises:
      TypeError: if `options` is not an `InputOptions`.
      ValueError: if the dataset is to be placed on the device.
    """
    if options is None:
        return
    if not isinstance(options, InputOptions):
        raise TypeError(
            "`options` must be `ks.InputOptions`. Received: an object of type "
            f"{type(options).__name__}. Options of tf.data belong to the "
            "dataset: `dataset.with_options(options)`."
        )
    if options.experimental_place_dataset_on_device:
        raise ValueError(
            "Datasets must be read by the host. Received: "
            "experimental_place_dataset_on_device=True. Leave it out: batches "
            "are moved to the devices ahead of time anyway."
        )
