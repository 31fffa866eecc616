"""Batches on the host, and the `Execution` objects that move them to devices.

A batch is a nest of arrays whose first dimension is the rows. If the number of
rows is divisible by the number of replicas, the batch is split over the
replicas unchanged. Otherwise it is padded to the next multiple of the number of
replicas by repeating its last row, and its true number of rows is stored with
it. Programs cut the padding off before they compute anything. With several
processes, each process has only its own part of the rows and moves it to its
own devices.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from keras_strategies._types import Array, Batch, Tree
from keras_strategies.spmd import host_arrays
from keras_strategies.spmd import rows as rows_lib
from keras_strategies.spmd.mesh import ReplicaMesh, has_sharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostBatch:
    """A global batch, of which this process stores only the rows that it reads.

    Attributes:
      data: The nest of host arrays with this process's rows.
      parts: The number of rows of each process. Processes that read the same
        rows (a group in `ReplicaMesh.readers`) share one entry.
      batch_size: The number of rows that a full global batch has in this step.
      counts: The number of rows of each replica. None if the rows are divided
        as described at the top of this module.
    """

    data: Tree
    parts: tuple[int, ...]
    batch_size: int
    counts: tuple[int, ...] | None = None

    @property
    def rows(self) -> int:
        """The total number of rows, summed over all processes."""
        return sum(self.parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowShape:
    """The arrangement of the rows in batches of equal shape.

    Attributes:
      rows: Number of rows of each batch, without the padding.
      steps: Number of batches.
      parts: The number of rows of each process, if each process pads its own
        rows. None if all padding is at the end of the global batch.
    """

    rows: int
    steps: int
    parts: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment(RowShape):
    """Consecutive batches of equal shape, placed on the devices.

    Attributes:
      data: The nest of arrays, of shape (padded rows, ...) for one step and
        (steps, padded rows, ...) for several, with the rows split over the
        replicas.
    """

    data: Tree

    @property
    def padded(self) -> int:
        """The number of rows of each batch, including the padding."""
        return jax.tree.leaves(self.data)[0].shape[self.steps > 1]

    @property
    def is_padded(self) -> bool:
        """Whether the batches contain padding rows."""
        return self.padded != self.rows

    @property
    def shape(self) -> RowShape:
        """The arrangement of the rows; a compile-time constant in programs."""
        return RowShape(rows=self.rows, steps=self.steps, parts=self.parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """The batches of one call of a step function, as one or more segments.

    Attributes:
      segments: The batches. An execution without segments stands for steps that
        were already completed before a training loop was resumed.
      place: The epoch of the data, and the number of steps of that epoch that
        are finished after this execution. Only a `Feed` (fit/inputs)
        sets it.
      logs: For an execution without segments: the result to report, which is
        that of the last completed step.
    """

    segments: tuple[Segment, ...]
    place: tuple[int, int] | None = None
    logs: Any = None


jax.tree_util.register_dataclass(
    Segment, data_fields=["data"], meta_fields=["rows", "steps", "parts"]
)
# This pytree node has no leaves, so that Keras cannot find its arrays. Keras
# would move them to one device, although they are already on the right devices.
jax.tree_util.register_dataclass(
    Execution, data_fields=[], meta_fields=["segments", "place", "logs"]
)


def num_rows(batch: Tree) -> int:
    """Returns the number of rows of a batch.

    Raises:
      ValueError: if a leaf has rank 0, if the arrays differ in length, or if
        there are no arrays or no rows.
      TypeError: if a leaf does not contain numbers.
    """
    arrays = jax.tree.leaves(batch)
    first_dims = {np.shape(array)[:1] for array in arrays}
    if len(first_dims) == 1 and all(map(host_arrays.holds_numbers, arrays)):
        (first_dim,) = first_dims
        if first_dim and first_dim[0]:
            return first_dim[0]
    lengths = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        name = jax.tree_util.keystr(path) or "the batch"
        shape = np.shape(leaf)
        if not shape:
            raise ValueError(
                "Every array of a batch must have a first dimension that "
                f"indexes the rows. Received: {name} of rank 0, with the value "
                f"{leaf!r}. Repeat the value for each row, or store it as an "
                "attribute of the model."
            )
        host_arrays.check_numbers(leaf, name)
        lengths[name] = shape[0]
    raise ValueError(
        "All arrays of a batch must have the same number of rows, and at least "
        f"one row. Received: {lengths or batch!r}. Check x, y and "
        "sample_weight, and that the dataset yields batches "
        "(`.batch(global_batch_size)`) and is not empty."
    )


def global_batch(batch: Tree, mesh: ReplicaMesh) -> HostBatch:
    """Converts a batch with the rows of all processes to a `HostBatch`.

    With several processes, each process keeps only its own rows.

    Raises:
      ValueError, TypeError: if the batch is not valid; see `num_rows`.
    """
    rows = num_rows(batch)
    if mesh.num_readers == 1:
        return HostBatch(data=batch, parts=(rows,), batch_size=rows)
    counts = rows_lib.balanced_rows(rows, mesh.num_replicas)
    parts = rows_lib.rows_of_processes(counts, mesh.num_readers)
    start = sum(parts[: mesh.reader_index])
    stop = start + parts[mesh.reader_index]
    data = jax.tree.map(lambda leaf: leaf[start:stop], batch)
    return HostBatch(data=data, parts=parts, batch_size=rows)


def place(batches: Sequence[HostBatch], mesh: ReplicaMesh) -> Execution:
    """Moves batches to the devices.

    Consecutive batches of equal structure, shapes and dtypes are moved together
    in one transfer.

    Args:
      batches: The batches, with this process's rows.
      mesh: The replicas to split the rows over.
    """
    flat = [(*jax.tree.flatten(b.data), b.parts) for b in batches]

    def describe(batch: tuple[Any, ...]) -> tuple[Any, ...]:
        leaves, structure, parts = batch
        return structure, parts, [(np.shape(x), x.dtype) for x in leaves]

    return Execution(
        segments=tuple(
            _place_run(structure, parts, [leaves for leaves, *_ in run], mesh)
            for (structure, parts, _), run in itertools.groupby(flat, describe)
        )
    )


def _place_run(
    structure: PyTreeDef,
    parts: tuple[int, ...],
    run: list[list[Any]],
    mesh: ReplicaMesh,
) -> Segment:
    rows = sum(parts)
    block = _block_index(parts, mesh)
    leaves = [put_rows(each, block, mesh) for each in zip(*run, strict=True)]
    is_in_order = parts == rows_lib.fill_in_order([block] * len(parts), rows)
    return Segment(
        data=jax.tree.unflatten(structure, leaves),
        rows=rows,
        steps=len(run),
        parts=None if is_in_order else parts,
    )


def _block_index(parts: tuple[int, ...], mesh: ReplicaMesh) -> int:
    """Returns the padded number of rows, which is equal for all processes."""
    block = rows_lib.padded_rows(max(parts), mesh.replicas_per_process)
    rows = sum(parts)
    even = rows_lib.padded_rows(rows, mesh.num_replicas) // len(parts)
    # `even` is the smallest possible number of rows per process. It can be used
    # only if the processes are filled one after another, because then only the
    # last ones need padding.
    is_filled = parts == rows_lib.fill_in_order([even] * len(parts), rows)
    return even if is_filled else block


# For a sharded array, `device_put` takes three times as long on the host as
# `make_array_from_callback` (jax 0.10.2).


def put_rows(column: Sequence[Any], block: int, mesh: ReplicaMesh) -> jax.Array:
    """Moves the array of one batch, or of several, stacked, to the devices.

    Of several batches, only the rows that a replica reads are stacked for it,
    so each row is copied once.

    Args:
      column: An array of each batch, with this process's rows.
      block: The number of rows that each process has in a batch, with padding.
      mesh: The replicas to split the rows over.
    """
    if len(column) == 1 and _is_placed(column[0], mesh):
        return column[0]
    is_stacked = len(column) > 1
    arrays = [
        _pad(np.asarray(leaf) if is_stacked else leaf, block) for leaf in column
    ]
    rows, first = block * mesh.num_readers, mesh.reader_index * block

    def take_rows(index: Any) -> Array:
        start, stop, _ = index[is_stacked].indices(rows)
        parts = [array[start - first : stop - first] for array in arrays]
        if is_stacked:
            return host_arrays.stack_arrays(parts)
        (part,) = parts
        return host_arrays.align(part) if mesh.platform == "cpu" else part

    row_shape = arrays[0].shape[1:]
    shape = (rows, *row_shape)
    if is_stacked:
        shape = (len(arrays), *shape)
    sharding = mesh.stacked if is_stacked else mesh.split
    return jax.make_array_from_callback(shape, sharding, take_rows)


def _is_placed(leaf: object, mesh: ReplicaMesh) -> bool:
    return (
        isinstance(leaf, jax.Array)
        and leaf.shape[0] % mesh.num_replicas == 0
        and has_sharding(leaf, mesh.split)
    )


def cut_padding(data: Batch, shape: RowShape) -> Batch:
    """Cuts off the padding rows of a batch. Jit-compatible.

    Args:
      data: A nest of NumPy or traced arrays. The rows are in the second
        dimension if there are several steps, else in the first.
      shape: The arrangement of the rows.

    Returns:
      The batch with `shape.rows` rows, in the same order.
    """
    axis = int(shape.steps > 1)
    before = (slice(None),) * axis

    def cut(leaf: Array) -> Array:
        padded, parts = leaf.shape[axis], shape.parts
        if padded == shape.rows:
            return leaf
        if parts is None:
            return leaf[(*before, slice(shape.rows))]
        block = padded // len(parts)
        pieces = [
            leaf[(*before, slice(p * block, p * block + count))]
            for p, count in enumerate(parts)
            if count
        ]
        library = np if isinstance(leaf, np.ndarray) else jax.numpy
        return library.concatenate(pieces, axis=axis)

    return jax.tree.map(cut, data)


def constrain_rows(
    data: Batch, shape: RowShape, mesh: ReplicaMesh, *, is_sharded: bool
) -> Batch:
    """Adds a sharding constraint to a batch without padding. Jit-compatible.

    Args:
      data: The batch that `cut_padding` returned.
      shape: The arrangement of its rows.
      mesh: The replicas.
      is_sharded: Whether XLA may shard the rows unevenly over the replicas. If
        False, or if a replica has several cores, rows that cannot be divided
        evenly are replicated instead. With several cores, XLA would wrongly
        include the padding in scattered sums and in some gradients of
        convolutions (tests/contract/test_jax_contract.py).

    Returns:
      The same batch with the sharding constraint.
    """
    sharding = mesh.stacked if shape.steps > 1 else mesh.split
    is_even = shape.rows % mesh.num_replicas == 0
    if not is_even and (mesh.cores_per_replica > 1 or not is_sharded):
        sharding = mesh.whole
    return jax.lax.with_sharding_constraint(data, sharding)


def unstack_steps(data: Tree, steps: int) -> list[Tree]:
    """Splits a segment of several steps into its batches. Jit-compatible."""
    return [jax.tree.map(lambda a, k=k: a[k], data) for k in range(steps)]


def _pad(leaf: Array, rows: int) -> Array:
    """Pads an array to `rows` rows by repeating its last row.

    An array without rows is padded with zeros.
    """
    missing = rows - leaf.shape[0]
    if not missing:
        return leaf
    leaf = np.asarray(leaf)
    if not len(leaf):
        return np.zeros((rows, *leaf.shape[1:]), leaf.dtype)
    return np.concatenate([leaf, np.repeat(leaf[-1:], missing, axis=0)])
