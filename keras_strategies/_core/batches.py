"""Host batches, and the executions that carry them to the devices.

A batch is a nest of arrays whose first dimension is the rows. A batch that
the replicas can share evenly is split over them unchanged. Any other batch is
padded to the next multiple of the number of replicas (by repeating its last
row) and carries its true number of rows; programs cut the padding off first.
With several processes, each one holds process-local rows and moves them to its
devices.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from keras_strategies._core import host_arrays
from keras_strategies._core import rows as rows_lib
from keras_strategies._core.mesh import ReplicaMesh, has_sharding
from keras_strategies._types import Array, Batch, Tree

_Key = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostBatch:
    """A global batch, of which one process holds some rows.

    Attributes:
      data: The nest of host arrays with this process's rows.
      parts: Number of rows of each process; processes that read the same rows
        (`ReplicaMesh.readers`) have one entry.
      batch_size: Number of rows of a full batch of this step.
      counts: Number of rows of each replica, if it is not left to a rule.
    """

    data: Tree
    parts: tuple[int, ...]
    batch_size: int
    counts: tuple[int, ...] | None = None

    @property
    def rows(self) -> int:
        """The number of rows of all processes."""
        return sum(self.parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowShape:
    """The arrangement of the rows of consecutive batches of equal shape.

    Attributes:
      rows: Number of rows of each batch, without the padding.
      steps: Number of batches.
      parts: Number of rows of each process, if each process has padding; None
        if all padding is at the end.
    """

    rows: int
    steps: int
    parts: tuple[int, ...] | None = None

    def without_padding(self, leaf: Array, axis: int) -> Array:
        """Returns the true rows of an array, in their order.

        Args:
          leaf: A NumPy or traced array.
          axis: The dimension of the rows.

        Returns:
          An array of shape (..., rows, ...), with `rows` entries along `axis`.
        """
        before = (slice(None),) * axis
        if self.parts is None:
            return leaf[(*before, slice(self.rows))]
        block = leaf.shape[axis] // len(self.parts)
        pieces = [
            leaf[(*before, slice(p * block, p * block + count))]
            for p, count in enumerate(self.parts)
            if count
        ]
        library = np if isinstance(leaf, np.ndarray) else jax.numpy
        return library.concatenate(pieces, axis=axis)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment(RowShape):
    """Consecutive batches of equal shape, on the devices.

    Attributes:
      data: The nest of arrays, of shape (padded rows, ...) for one step and
        (steps, padded rows, ...) for several, with the rows split over the
        replicas.
    """

    data: Tree

    @property
    def padded(self) -> int:
        """The number of rows of each batch, with the padding."""
        return jax.tree.leaves(self.data)[0].shape[self.steps > 1]

    @property
    def is_padded(self) -> bool:
        """Whether there is padding."""
        return self.padded != self.rows

    @property
    def shape(self) -> RowShape:
        """The arrangement of the batch's rows; static in programs."""
        return RowShape(rows=self.rows, steps=self.steps, parts=self.parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """The batches of one call of a step function, as one or more segments.

    Attributes:
      segments: The batches. An execution without any stands for steps that a
        resumed loop has already done.
      place: The epoch of the data, and the number of its steps up to the end
        of this execution, if a feed made it.
      logs: The result of the last step, for an execution without segments.
    """

    segments: tuple[Segment, ...]
    place: tuple[int, int] | None = None
    logs: Any = None

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the arrays, on all devices."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.segments))


jax.tree_util.register_dataclass(
    Segment, data_fields=["data"], meta_fields=["rows", "steps", "parts"]
)
# Without leaves: Keras moves the arrays of its data to one device, and must not
# find these, which are already on the right devices.
jax.tree_util.register_dataclass(
    Execution, data_fields=[], meta_fields=["segments", "place", "logs"]
)


def num_rows(batch: Tree) -> int:
    """Returns the number of rows of a batch.

    Raises:
      ValueError: if a leaf has rank 0, if the arrays differ in length, or if
        there are no arrays or no rows.
      TypeError: if a leaf does not hold numbers.
    """
    arrays = jax.tree.leaves(batch)
    first_dims = {np.shape(array)[:1] for array in arrays}
    if len(first_dims) == 1 and all(map(host_arrays.holds_numbers, arrays)):
        (first_dim,) = first_dims
        if first_dim and first_dim[0]:
            return first_dim[0]
    return _raise_invalid(batch)


def _raise_invalid(batch: Tree) -> NoReturn:
    """Raises the error that describes what is wrong with a batch."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise ValueError(
            "A batch must contain at least one array. Received: "
            f"{batch!r}. Check what the dataset yields."
        )
    lengths = {}
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path) or "the batch"
        shape = np.shape(leaf)
        if not shape:
            raise ValueError(
                "Every array of a batch must have a first dimension, its rows."
                f" Received: {name} of rank 0, value {leaf!r}. Repeat the "
                "value for each row, or make it an attribute of the model."
            )
        host_arrays.check_numbers(leaf, name)
        lengths[name] = shape[0]
    if len(set(lengths.values())) > 1:
        raise ValueError(
            "All arrays of a batch must have the same number of rows. "
            f"Received: {lengths}. Check x, y and sample_weight, and that the "
            "dataset yields batches (`.batch(global_batch_size)`)."
        )
    raise ValueError(
        "A batch must have at least one row. Received: shapes "
        f"{[np.shape(leaf) for _, leaf in leaves]}. Check that the data "
        "is not empty."
    )


def global_batch(batch: Tree, mesh: ReplicaMesh) -> HostBatch:
    """Makes a host batch of a batch that has the rows of all processes.

    With several processes, each one takes its rows.

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
    """Moves batches to the devices, one transfer for each run of equal ones.

    Args:
      batches: This process's batches.
      mesh: The replicas to split the rows over.
    """
    runs: list[tuple[_Key, list[list[Any]]]] = []
    for batch in batches:
        leaves, structure = jax.tree.flatten(batch.data)
        kinds = [(np.shape(leaf), leaf.dtype) for leaf in leaves]
        key = (structure, batch.parts, kinds)
        if not runs or runs[-1][0] != key:
            runs.append((key, []))
        runs[-1][1].append(leaves)
    return Execution(
        segments=tuple(
            _place_run(structure, parts, run, mesh)
            for (structure, parts, *_), run in runs
        )
    )


def _place_run(
    structure: PyTreeDef,
    parts: tuple[int, ...],
    run: list[list[Any]],
    mesh: ReplicaMesh,
) -> Segment:
    rows = sum(parts)
    block = _block_of(parts, mesh)
    put = _put if len(run) == 1 else _put_stacked
    leaves = [put(column, block, mesh) for column in zip(*run, strict=True)]
    is_in_order = parts == rows_lib.fill_in_order([block] * len(parts), rows)
    return Segment(
        data=jax.tree.unflatten(structure, leaves),
        rows=rows,
        steps=len(run),
        parts=None if is_in_order else parts,
    )


def _block_of(parts: tuple[int, ...], mesh: ReplicaMesh) -> int:
    """Returns the number of rows of each process, with its padding."""
    block = rows_lib.padded_rows(max(parts), mesh.replicas_per_process)
    rows = sum(parts)
    even = rows_lib.padded_rows(rows, mesh.num_replicas) // len(parts)
    # The shortest block, which only fits processes that are filled in order.
    return (
        even
        if parts == rows_lib.fill_in_order([even] * len(parts), rows)
        else block
    )


# `device_put` takes three times as long as `make_array_from_callback` on the
# host for a sharded array (jax 0.10.2).


def _put(column: Sequence[Any], block: int, mesh: ReplicaMesh) -> jax.Array:
    (leaf,) = column
    if _is_placed(leaf, mesh):
        return leaf
    leaf = _pad(leaf, block)
    first = mesh.reader_index * block

    def rows_of(index: Any) -> Array:
        start, stop, _ = index[0].indices(shape[0])
        rows = leaf[start - first : stop - first]
        return host_arrays.align(rows) if mesh.platform == "cpu" else rows

    shape = (block * mesh.num_readers, *leaf.shape[1:])
    return jax.make_array_from_callback(shape, mesh.split, rows_of)


def _is_placed(leaf: object, mesh: ReplicaMesh) -> bool:
    return (
        isinstance(leaf, jax.Array)
        and leaf.shape[0] % mesh.num_replicas == 0
        and has_sharding(leaf, mesh.split)
    )


def cut_padding(data: Batch, shape: RowShape) -> Batch:
    """Cuts off the padding. Jit-compatible.

    Returns:
      The batch of `shape.rows` rows, in the second dimension if there are
      several steps.
    """
    axis = int(shape.steps > 1)

    def cut(leaf: jax.Array) -> jax.Array:
        is_unpadded = leaf.shape[axis] == shape.rows
        return leaf if is_unpadded else shape.without_padding(leaf, axis)

    return jax.tree.map(cut, data)


def constrain_rows(
    data: Batch, shape: RowShape, mesh: ReplicaMesh, *, is_sharded: bool
) -> Batch:
    """Constrains the sharding of a batch without padding. Jit-compatible.

    Args:
      data: The batch that `cut_padding` returned.
      shape: The arrangement of its rows.
      mesh: The replicas.
      is_sharded: Whether XLA may shard the rows unevenly over the replicas.
        If not, or if a replica has several cores, rows that cannot be shared
        evenly are replicated. With several cores XLA would add padding to
        scattered values and to some gradients of convolutions
        (tests/contract/test_jax_contract.py).

    Returns:
      The same batch, with a sharding.
    """
    sharding = mesh.stacked if shape.steps > 1 else mesh.split
    is_even = shape.rows % mesh.num_replicas == 0
    if not is_even and (mesh.cores_per_replica > 1 or not is_sharded):
        sharding = mesh.whole
    return jax.lax.with_sharding_constraint(data, sharding)


def unstack_steps(data: Tree, steps: int) -> list[Tree]:
    """Splits a segment of several steps into its batches. Jit-compatible."""
    return [jax.tree.map(lambda a, k=k: a[k], data) for k in range(steps)]


def _put_stacked(
    column: Sequence[Any], block: int, mesh: ReplicaMesh
) -> jax.Array:
    """Stacks only the rows that each replica reads, so they are copied once."""
    column = [_pad(np.asarray(leaf), block) for leaf in column]
    rows = block * mesh.num_readers
    shape = (len(column), rows, *np.shape(column[0])[1:])
    first = mesh.reader_index * block

    def rows_of(index: Any) -> Array:
        start, stop, _ = index[1].indices(rows)
        part = slice(start - first, stop - first)
        return host_arrays.stack_arrays([leaf[part] for leaf in column])

    return jax.make_array_from_callback(shape, mesh.stacked, rows_of)


def _pad(leaf: Array, rows: int) -> Array:
    """Pads an array to `rows` rows, by repeating its last one or with zeros."""
    missing = rows - leaf.shape[0]
    if not missing:
        return leaf
    leaf = np.asarray(leaf)
    if not len(leaf):
        return np.zeros((rows, *leaf.shape[1:]), leaf.dtype)
    return np.concatenate([leaf, np.repeat(leaf[-1:], missing, axis=0)])
