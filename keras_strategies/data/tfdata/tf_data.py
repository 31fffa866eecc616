"""A `tf.data.Dataset` as a source, shared by several processes.

TensorFlow is not imported here: whoever has a dataset has done so.
"""

import dataclasses
import functools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from keras_strategies._core.batches import num_rows
from keras_strategies._types import Dataset, Tree
from keras_strategies.cluster.exchange.message_forms import Either, fault_of
from keras_strategies.cluster.untrusted import load_json
from keras_strategies.data.options import AutoShardPolicy
from keras_strategies.data.source import Cut, Part, Source, take
from keras_strategies.data.source_summary import Summary
from keras_strategies.data.tfdata.tf_files import (
    damage,
    files_of,
    files_of_part,
    missing_file,
    texts_of,
)
from keras_strategies.data.tfdata.tf_graph import Graph, graph_of, tensorflow
from keras_strategies.data.tfdata.tf_nodes import (
    changes_rows,
    has_variables,
    hints_of,
    is_drawn,
    is_plain,
    known_rows,
    likely_batch_size,
)
from keras_strategies.data.tfdata.tf_order import EpochDatasets
from keras_strategies.data.tfdata.tf_plan import plan_shards

_Policy = AutoShardPolicy

_MAX_SEED = 1 << 20


def _is_number(value: object) -> bool:
    is_int = type(value) is int
    return value is None or (is_int and -(2**63) <= value < 2**63)


# What `seed` gives, which may come from a file.
_SEED = Either((_is_number, (_is_number, [(_is_number, _is_number)])))


class TfDataSource(Source):
    """The batches of a `tf.data.Dataset`.

    What the processes do with the dataset:

    * DATA: each runs the whole pipeline, in one order, and keeps its rows: a
      contiguous piece of each batch.
    * FILE: TensorFlow puts a shard in front of what reads the files. The
      batches are the process's own.
    * AUTO: as FILE if there are enough files and if it is sure that all
      processes together read what one would, every row once; otherwise as
      DATA, with a warning if files are read. It is not sure where operations
      count or pair rows of all files: `take`, `skip`, `zip` (rows stay paired
      only if all files are equally long), `drop_remainder=True` unless the
      rows repeat for ever (each process would drop a remainder of its own),
      `batch` on batches, `filter` on batches, `padded_batch` to the longest.
      FILE itself is then followed as tf does, with a warning.
    * HINT: each `shard(SHARD_HINT, ...)` becomes the process's.
    * OFF: each reads all that its dataset yields.

    Shuffles without a seed are seeded, so the order of an epoch is a function
    of (`seed`, epoch), the same in all processes and when reading begins
    anew. With seeds of the user's, epoch `e` has the order that tf.data gives
    the `e`-th iterator. For that the dataset is made anew from its graph in
    each epoch. On one process it is iterated as it is where that cannot be: if
    it has no graph (arrays of 2 GiB and more), or if its functions use a
    `tf.Variable` or `tf.random.Generator`. On several processes each epoch
    sees a copy of their present values.

    On several processes a `cache("file")` gets a file for each. Under DATA
    parallel operations keep their order even if they need not
    (`deterministic=False`); under the other policies they do as they are told,
    and an order can then not be found again.

    Differs from tf: too few files are an error or DATA on every process; HINT
    without a `shard(SHARD_HINT, ...)`, and a `shard` of the user's under
    another policy than OFF and HINT, are errors; DATA gives contiguous rows.

    Args:
      dataset: The dataset; its elements are global batches.
      num_processes: Number of processes that share it.
      process_index: This process's place among them.
      seed: Any number, the same in all processes.
      policy: How they share it; None for what the dataset's options say.
      copy: Which of the processes that read the same rows this one is; None
        if there are no others.

    Attributes:
      plan: What was decided; `summary` adds the numbers of rows.
      is_infinite: Whether it surely never ends.

    Raises:
      TypeError: the elements are no dense arrays of numbers.
      ValueError: the dataset is not batched, or cannot be shared like this.
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
        graph = None if is_plain(dataset) else graph_of(dataset)
        self.plan, split = plan_shards(
            dataset, graph, policy, num_processes, process_index
        )
        is_shared = num_processes > 1 and self.plan.applied is _Policy.DATA
        self.is_process_local = num_processes > 1 and not is_shared
        self._note_sizes(dataset)
        # Whether all processes must see the same, and can.
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
        if split is not None and self._epochs is not None:
            self._name_files(self._epochs)

    def _note_sizes(self, dataset: Dataset) -> None:
        self.batch_size = _batch_size(dataset)
        self.likely_size = self.batch_size or likely_batch_size(dataset)
        count = int(dataset.cardinality())
        self.is_infinite = count == tensorflow().data.INFINITE_CARDINALITY
        if count >= 0 and not self.is_process_local:
            self.num_batches = count

    def _name_files(self, epochs: EpochDatasets) -> None:
        """Adds this process's files to the plan, where they are found."""
        first, _ = epochs.graph(0)
        if (files := files_of_part(first)) is not None:
            named = {self._process_index: files}
            self.plan = dataclasses.replace(self.plan, files=named)

    def summary(self) -> Summary:
        """See `Source.summary`."""
        if self.is_process_local:
            return self.plan
        first, rows = known_rows(self._dataset)
        return dataclasses.replace(self.plan, num_rows=rows, first_rows=first)

    @property
    def seed(self) -> str | int | None:
        """See `Source.seed`. With the shuffles' own, if they have any."""
        own = [] if self._epochs is None else self._epochs.seeds
        if not any(map(any, own)):
            return self._seed
        return json.dumps([self._seed, own])

    def restart(self, seed: str | int | None) -> None:
        """See `Source.restart`."""
        if self._epochs is None or seed in (None, self.seed):
            return
        document = load_json(str(seed), max_characters=_MAX_SEED)
        if fault_of(document, _SEED) is not None:
            raise ValueError("A seed is what `seed` of such data was.")
        self._seed, own = (
            document if isinstance(document, list) else (document, None)
        )
        # Anew: its caches may hold rows in the other order.
        graph = graph_of(self._dataset)
        self._epochs = self._make_epochs(
            graph, seed=int(self._seed or 0), seeds=own
        )

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        """See `Source.read`.

        Raises:
          OSError: a file is missing, damaged or cut off.
        """
        dataset, kept = self._dataset, None
        if self._epochs is not None:
            dataset, kept = self._epochs.of(epoch)
        if self._is_shared:
            options = tensorflow().data.Options()
            options.deterministic = True
            dataset = dataset.with_options(options)
        if start:
            dataset = dataset.skip(start)
        held = [dataset.as_numpy_iterator(), dataset, kept]
        del dataset, kept
        let_go = _let_go  # Python empties modules before it ends generators.
        try:
            for batch in self._batches(held[0]):
                if self.is_process_local:
                    yield Part(data=batch, rows=num_rows(batch))
                else:
                    yield take(batch, cut, has_checksums=self._has_checksums)
        finally:
            let_go(held)

    def _batches(self, iterator: Iterator[Tree]) -> Iterator[Tree]:
        errors = tensorflow().errors
        # Not around the `yield`: Python empties modules before it ends this.
        while True:
            try:
                batch = next(iterator, None)
            except (
                errors.DataLossError,
                errors.NotFoundError,
                errors.PermissionDeniedError,
            ) as error:
                self._explain(error)
                raise
            if batch is None:
                return
            yield batch

    def _explain(self, error: Exception) -> None:
        """Raises which file it was, if that can be found."""
        files = self.plan.files.get(self._process_index)
        files = files or files_of(self._dataset)
        if isinstance(error, tensorflow().errors.DataLossError):
            graph = graph_of(self._dataset)
            others = () if graph is None else texts_of(graph)
            received = damage((*files, *others))
        else:
            received = missing_file(files)
        if received is not None:
            raise OSError(
                "The files of a dataset must be there and whole. Received: "
                f"{received}. Write the file again, or leave it out of the "
                "dataset."
            ) from error


def _let_go(
    held: list[Any], is_finalizing: Callable[[], bool] = sys.is_finalizing
) -> None:
    """Drops an iterator of TensorFlow's, and what it needs, in a thread.

    TensorFlow waits there for its own threads: up to a second where training
    keeps the cores busy.
    """
    if is_finalizing():
        # A thread would not begin, and `start` wait for it for ever.
        held.clear()
        return
    try:
        threading.Thread(target=held.clear).start()
    except RuntimeError:  # Python 3.12 and later say so a moment before.
        held.clear()


def _repeats_rows(dataset: Dataset, graph: Graph | None) -> bool:
    """Whether rows are surely the same each time that they are read.

    Functions may draw, which changes rows but loses none.
    """
    if graph is None:
        return is_plain(dataset, with_functions=False)
    return not changes_rows(graph)


def _is_seeded(graph: Graph) -> bool:
    """Whether a process that reads alone makes each epoch's dataset anew."""
    if hints_of(graph):
        return True
    return is_drawn(graph) and not has_variables(graph)


def _check_elements(element_spec: Tree) -> None:
    tf = tensorflow()
    for spec in tf.nest.flatten(element_spec):
        if _is_none(spec):
            continue
        if not isinstance(spec, tf.TensorSpec):
            raise TypeError(
                "The elements of a dataset must be dense tensors. Received: "
                f"{spec}. Use `dataset.map(tf.sparse.to_dense)` for sparse "
                "ones, `.to_tensor()` or `padded_batch` for ragged ones."
            )
        if spec.dtype in (tf.string, tf.resource, tf.variant):
            raise TypeError(
                "The arrays of a batch must hold numbers or booleans. "
                f"Received: {spec}. Encode it before training."
            )
        if spec.shape.rank == 0:
            raise ValueError(
                "The elements of a dataset must be batches of rows. "
                f"Received: {spec}, a scalar. Call "
                "`.batch(global_batch_size)` first."
            )


def _is_none(spec: object) -> bool:
    """Whether it stands for a None, in which there is no tensor."""
    return type(spec).__name__ == "NoneTensorSpec"


def _batch_size(dataset: Dataset) -> int | None:
    """Rows of a whole batch, where shapes or the last `batch` give them."""
    tf = tensorflow()
    specs = tf.nest.flatten(dataset.element_spec)
    sizes = {
        None if spec.shape.rank is None else spec.shape[0]
        for spec in specs
        if not _is_none(spec)
    }
    if None not in sizes:
        return sizes.pop() if len(sizes) == 1 else None
    size = int(
        tf.raw_ops.ComputeBatchSize(
            input_dataset=tf.data.experimental.to_variant(dataset)
        )
    )
    return size if size > 0 else None
