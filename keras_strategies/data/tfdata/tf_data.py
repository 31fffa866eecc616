"""The source that reads a `tf.data.Dataset`, in one or several processes.

This module does not import TensorFlow: the code that created the dataset has
already imported it.
"""

import dataclasses
import functools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from keras_strategies._types import Dataset, Tree
from keras_strategies.cluster.exchange.message_forms import Either, has_form
from keras_strategies.cluster.untrusted import load_json
from keras_strategies.data.options import AutoShardPolicy
from keras_strategies.data.source import (
    Cut,
    Part,
    Reading,
    Source,
    Summary,
    take,
)
from keras_strategies.data.tfdata.tf_graph import Graph, tensorflow, write_graph
from keras_strategies.data.tfdata.tf_nodes import (
    changes_rows,
    draws_order,
    find_hints,
    guess_batch_size,
    has_variables,
    is_plain,
    read_seeds,
)
from keras_strategies.data.tfdata.tf_order import EpochDatasets
from keras_strategies.data.tfdata.tf_plan import plan_shards
from keras_strategies.spmd.batches import num_rows

_Policy = AutoShardPolicy

_MAX_SEED = 1 << 20


def _is_number(value: object) -> bool:
    is_int = type(value) is int
    return value is None or (is_int and -(2**63) <= value < 2**63)


# The valid types of `TfDataSource.seed`. It may come from a file, so it is
# checked.
_SEED = Either((_is_number, (_is_number, [(_is_number, _is_number)])))


class TfDataSource(Source):
    """A source that reads the batches of a `tf.data.Dataset`.

    The policy determines how the dataset is divided among the processes:

    * DATA: each process runs the entire pipeline, in the same order, and uses
      only its own rows: a contiguous range of rows in each batch.
    * FILE: TensorFlow inserts a `shard` before the operations that read the
      files. The batches are process-local.
    * AUTO: FILE if there are enough files, and if it is certain that all
      processes together read every row that a single process would read,
      exactly once. Otherwise DATA, with a warning if the dataset reads files.
      So DATA is used if an operation counts or pairs rows across files:
      `take`, `skip`, `zip` (its rows match only if all files have the same
      length), `drop_remainder=True` unless the rows repeat forever (each
      process would drop its own remainder), `batch` on batches, `filter` on
      batches, and `padded_batch` to the longest row. If FILE is requested for
      such a dataset, it is divided as in TensorFlow, with a warning.
    * HINT: each `shard(SHARD_HINT, ...)` is replaced by a shard with the number
      of processes and this process's index.
    * OFF: each process uses everything that its own dataset yields.

    Shuffles without a seed are given one, so that the order of an epoch depends
    only on `seed` and the epoch: it is the same in all processes, and the same
    again when reading restarts. With user-defined seeds, epoch `e` has the
    order of tf.data's `e`-th iterator. To achieve this, the dataset is rebuilt
    from its graph in each epoch. In two cases a single process instead iterates
    over the original dataset: if the dataset has no graph (arrays of 2 GiB and
    more), or if its functions use a `tf.Variable` or `tf.random.Generator`.
    With several processes, each epoch uses a copy of the current values of such
    variables and generators.

    With several processes, each process writes a separate file for a
    `cache("file")`. Under DATA, parallel operations are deterministic even with
    `deterministic=False`. Under the other policies this setting is unchanged,
    so that the order may not be reproducible.

    Differs from tf: if there are too few files, all processes raise an error
    (FILE) or use DATA (AUTO). HINT without a `shard(SHARD_HINT, ...)` is an
    error, and so is a user's `shard` under a policy other than OFF and HINT.
    DATA yields contiguous rows.

    Args:
      dataset: The dataset; its elements are global batches.
      num_processes: Number of processes among which the dataset is divided.
      process_index: Index of this process among them.
      seed: Any number, the same in all processes.
      policy: The policy by which the dataset is divided; None for the policy in
        the dataset's options.
      copy: Index of this process among the processes that read the same rows;
        None if no other process does.

    Attributes:
      plan: A `Summary` of how the dataset is divided, and why.
      is_infinite: Whether the dataset certainly never ends.

    Raises:
      TypeError: if the elements are not dense arrays of numbers.
      ValueError: if the dataset is not batched, or cannot be divided by the
        policy.
    """

    kind = "a tf.data.Dataset"

    def __init__(
        self,
        dataset: Dataset,
        *,
        num_processes: int,
        process_index: int,
        seed: int,
        policy: AutoShardPolicy | None = None,
        copy: int | None = None,
    ) -> None:
        _check_elements(dataset.element_spec)
        self._process_index = process_index
        graph = None if is_plain(dataset) else write_graph(dataset)
        self.plan, split = plan_shards(
            dataset, graph, policy, num_processes, process_index
        )
        is_shared = num_processes > 1 and self.plan.applied is _Policy.DATA
        self.is_process_local = num_processes > 1 and not is_shared
        self._note_sizes(dataset)
        # Whether all processes must see the same rows in the same order.
        self._is_shared = is_shared or copy is not None
        self._has_checksums = is_shared and _repeats_rows(dataset, graph)
        self._dataset, self._epochs = dataset, None
        if split is not None:
            self._dataset, graph = split.dataset, split.graph
        self._make_epochs = functools.partial(
            EpochDatasets,
            self._dataset,
            num_processes=num_processes,
            process_index=process_index,
            is_whole=not self.is_process_local,
            copy=copy,
        )
        is_alone = num_processes == 1 and copy is None
        self._seed: int | None = None
        if graph is not None and (not is_alone or _is_seeded(graph)):
            self._seed = seed
            self._epochs = self._make_epochs(graph, seed=seed)

    def _note_sizes(self, dataset: Dataset) -> None:
        self.batch_size = _find_batch_size(dataset)
        self.likely_size = self.batch_size or guess_batch_size(dataset)
        count = int(dataset.cardinality())
        self.is_infinite = count == tensorflow().data.INFINITE_CARDINALITY
        if count >= 0 and not self.is_process_local:
            self.num_batches = count

    def summary(self) -> Summary:
        """See `Source.summary`."""
        if self.is_process_local:
            return dataclasses.replace(self.plan, reading=Reading.LOCAL)
        return self.plan

    @property
    def has_own_seeds(self) -> bool:
        """See `Source`."""
        seeds = [] if self._epochs is None else self._epochs.seeds
        return any(map(any, seeds))

    @property
    def seed(self) -> str | int | None:
        """The seed, together with the dataset's own shuffle seeds, if any."""
        seeds = [] if self._epochs is None else self._epochs.seeds
        if not self.has_own_seeds:
            return self._seed
        return json.dumps([self._seed, seeds])

    def restart(self, seed: str | int | None) -> None:
        """See `Source.restart`."""
        if self._epochs is None or seed in (None, self.seed):
            return
        document = load_json(str(seed), max_characters=_MAX_SEED)
        if not has_form(document, _SEED):
            raise ValueError("`seed` must be a value of `Source.seed`.")
        # Starts from a new graph, because caches of the present one may contain
        # rows in the previous order.
        graph = write_graph(self._dataset)
        # A number is the seed of a dataset whose shuffles had no seeds, even
        # if `tf.random.set_seed` has given them seeds since.
        none = [[v and 0 for v in pair] for pair in read_seeds(graph)]
        self._seed, seeds = (
            document if isinstance(document, list) else (document, none)
        )
        self._epochs = self._make_epochs(
            graph, seed=int(self._seed or 0), seeds=seeds
        )

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        """See `Source.read`."""
        dataset, kept = self._dataset, None
        if self._epochs is not None:
            dataset, kept = self._epochs.make_dataset(epoch)
        if self._is_shared:
            options = tensorflow().data.Options()
            options.deterministic = True
            dataset = dataset.with_options(options)
        if start:
            dataset = dataset.skip(start)
        held = [dataset.as_numpy_iterator(), dataset, kept]
        del dataset, kept
        # A local name is needed, since at exit Python clears modules before it
        # closes generators.
        let_go = _let_go
        try:
            for batch in held[0]:
                if self.is_process_local:
                    yield Part(data=batch, rows=num_rows(batch))
                else:
                    yield take(batch, cut, has_checksums=self._has_checksums)
        finally:
            let_go(held)


def _let_go(
    held: list[Any], is_finalizing: Callable[[], bool] = sys.is_finalizing
) -> None:
    """Deletes a TensorFlow iterator, and the objects it needs, in a thread.

    The deletion waits for TensorFlow's threads to end, which may take a second
    if training keeps the cores busy.
    """
    if is_finalizing():
        # While Python exits, a new thread would never begin to run, and `start`
        # would wait for it forever.
        held.clear()
        return
    try:
        threading.Thread(target=held.clear).start()
    except RuntimeError:  # Raised while Python (3.12 and later) exits.
        held.clear()


def _repeats_rows(dataset: Dataset, graph: Graph | None) -> bool:
    """Returns whether each iteration certainly reads the same rows.

    Returns False if the dataset's functions use random numbers, since these
    may change the values of rows in each iteration.
    """
    if graph is None:
        return is_plain(dataset, with_functions=False)
    return not changes_rows(graph)


def _is_seeded(graph: Graph) -> bool:
    """Returns whether a single process rebuilds the dataset in each epoch."""
    if find_hints(graph):
        return True
    return draws_order(graph) and not has_variables(graph)


def _check_elements(element_spec: Tree) -> None:
    tf = tensorflow()
    for spec in tf.nest.flatten(element_spec):
        if type(spec).__name__ == "NoneTensorSpec":
            continue  # It describes None.
        if not isinstance(spec, tf.TensorSpec):
            raise TypeError(
                "The elements of a dataset must be dense tensors. Received: "
                f"{spec}. Use `dataset.map(tf.sparse.to_dense)` for sparse "
                "tensors, and `.to_tensor()` or `padded_batch` for ragged ones."
            )
        if spec.dtype in (tf.string, tf.resource, tf.variant):
            raise TypeError(
                "The arrays of a batch must contain numbers or booleans. "
                f"Received: {spec}. Convert the values to numbers in the "
                "dataset."
            )
        if spec.shape.rank == 0:
            raise ValueError(
                "The elements of a dataset must be batches of rows. "
                f"Received: {spec}, a scalar. Call "
                "`.batch(global_batch_size)` first."
            )


def _find_batch_size(dataset: Dataset) -> int | None:
    """Finds the batch size in the shapes or in the last `batch`.

    Returns None if it cannot be found.
    """
    tf = tensorflow()
    specs = tf.nest.flatten(dataset.element_spec)
    shapes = [s.shape for s in specs if isinstance(s, tf.TensorSpec)]
    sizes = {None if shape.rank is None else shape[0] for shape in shapes}
    if None not in sizes:
        return sizes.pop() if len(sizes) == 1 else None
    size = int(
        tf.raw_ops.ComputeBatchSize(
            input_dataset=tf.data.experimental.to_variant(dataset)
        )
    )
    return size if size > 0 else None
