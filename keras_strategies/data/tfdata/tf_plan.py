"""Plans for dividing a `tf.data.Dataset` among processes."""

import warnings

from keras_strategies._types import Dataset
from keras_strategies.data.options import AutoShardPolicy
from keras_strategies.data.source import Summary
from keras_strategies.data.tfdata.tf_files import (
    FileSplit,
    reads_files,
    split_by_files,
)
from keras_strategies.data.tfdata.tf_graph import Graph
from keras_strategies.data.tfdata.tf_nodes import (
    find_hints,
    find_shards,
    is_plain,
)

_Policy = AutoShardPolicy
_NO_FILES = FileSplit(obstacle="it reads no files")


def plan_shards(
    dataset: Dataset,
    graph: Graph | None,
    policy: AutoShardPolicy | None,
    num_processes: int,
    process_index: int,
) -> tuple[Summary, FileSplit | None]:
    """Decides how a dataset is divided among the processes.

    Args:
      dataset: The dataset.
      graph: The graph of `dataset`; None if the dataset is plain (see
        `is_plain`) or cannot be converted to a graph.
      policy: The requested policy; None for the policy in the dataset's
        options.
      num_processes: Number of processes.
      process_index: Index of this process among them.

    Returns:
      The plan; and the dataset of this process if it is split by files, else
      None.

    Raises:
      ValueError: if the policy cannot be applied to the dataset.
    """
    if policy is None:
        options = dataset.options().experimental_distribute
        policy = _Policy(int(options.auto_shard_policy))
    if num_processes > 1 and policy is not _Policy.OFF:
        _check_inspectable(dataset, graph)
    _check_shards(graph, policy, num_processes)
    applied, reason, split = policy, "the policy was chosen", None
    if num_processes == 1:
        applied = _Policy.DATA if policy is _Policy.AUTO else policy
        reason = "one process reads the entire dataset"
    elif policy in (_Policy.AUTO, _Policy.FILE):
        split = _NO_FILES
        if graph is not None and reads_files(graph):
            split = split_by_files(dataset, graph, num_processes, process_index)
        if policy is _Policy.FILE:
            _check_split(split, num_processes)
        elif (why_not := split.obstacle or split.doubt) is None:
            applied, reason = _Policy.FILE, "it reads enough files"
        else:
            _warn_of_rows(split, why_not, num_processes)
            applied, reason, split = _Policy.DATA, why_not, None
    return Summary(applied=applied, reason=reason), split


def _warn_of_rows(split: FileSplit, why_not: str, num_processes: int) -> None:
    """Warns that a dataset is divided by rows although it reads files."""
    if split is _NO_FILES:
        return
    warnings.warn(
        "A dataset that reads files is divided by rows instead of by files "
        f"(`AutoShardPolicy.DATA`), because {why_not}. Each of the "
        f"{num_processes} processes reads all files and runs the entire input "
        "pipeline. Set `AutoShardPolicy.DATA` if this is intended.",
        stacklevel=5,
    )


def _check_split(split: FileSplit, num_processes: int) -> None:
    """Raises ValueError if a dataset cannot be split by its files.

    Warns if all processes together may read different rows than a single
    process would.
    """
    if split.obstacle is not None:
        raise ValueError(
            "`AutoShardPolicy.FILE` cannot split this dataset among "
            f"{num_processes} processes, because {split.obstacle}. Use "
            "`AutoShardPolicy.DATA`, or write more files."
        )
    if split.doubt is not None:
        warnings.warn(
            "A dataset is split by its files (`AutoShardPolicy.FILE`), but "
            f"{split.doubt}. So all processes together may use different rows "
            "than a single process would. Set `AutoShardPolicy.DATA` to use "
            "the same rows.",
            stacklevel=5,
        )


def _check_shards(
    graph: Graph | None, policy: AutoShardPolicy, num_processes: int
) -> None:
    has_hint = graph is not None and bool(find_hints(graph))
    if has_hint and policy is not _Policy.HINT:
        raise ValueError(
            "`dataset.shard(SHARD_HINT, ...)` needs `AutoShardPolicy.HINT`. "
            f"Received: `AutoShardPolicy.{policy.name}`. Set `options."
            "experimental_distribute.auto_shard_policy` to HINT."
        )
    if num_processes == 1:
        return
    if policy is _Policy.HINT and not has_hint:
        raise ValueError(
            "`AutoShardPolicy.HINT` needs a `dataset.shard(SHARD_HINT, ...)`. "
            "Add one where the rows should be split, or use "
            "`AutoShardPolicy.OFF` if every process should read all rows."
        )
    is_split = graph is not None and any(
        count == num_processes for _, _, count in find_shards(graph)
    )
    if is_split and policy not in (_Policy.HINT, _Policy.OFF):
        raise ValueError(
            f"A dataset with `.shard({num_processes}, ...)` must not be split "
            f"again among {num_processes} processes. Received: "
            f"`AutoShardPolicy.{policy.name}`. Set `options."
            "experimental_distribute.auto_shard_policy` to OFF, or remove the "
            "`shard`."
        )


def _check_inspectable(dataset: Dataset, graph: Graph | None) -> None:
    if graph is None and not is_plain(dataset):
        raise ValueError(
            "Several processes cannot share this tf.data.Dataset, because it "
            "contains arrays of 2 GiB or more, or operations from another "
            "library. Pass the arrays themselves, read them from files, or use "
            "`AutoShardPolicy.OFF`."
        )
