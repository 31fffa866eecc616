"""Host batches, and the executions that carry them to the devices.

A batch is a nest of arrays whose first dimension is its rows. A batch that
the replicas can share evenly is split over them as it is. Any other one is
padded to the next multiple of their number (by repeating its last row) and
carries its true number of rows; what reads it cuts the padding off first.
Each of several processes holds its own rows and moves them to its devices.
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
    """A global batch, as one process holds it.

    Attributes:
      data: The nest of host arrays with this process's rows.
      parts: Number of rows of each process; of processes that read the same
        rows (`ReplicaMesh.readers`) once.
      batch_size: Rows of a whole batch of this step.
      counts: Number of rows of each replica, if that is given and not left to
        a rule.
    """

    data: Tree
    parts: tuple[int, ...]
    batch_size: int
    counts: tuple[int, ...] | None = None

    @property
    def rows(self) -> int:
        """Number of rows of all processes."""
        return sum(self.parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowShape:
    """What the rows of consecutive batches of equal shape look like.

    Attributes:
      rows: Number of rows of each batch, without the padding.
      steps: Number of batches.
      parts: Number of rows of each process, where each has padding of its
        own; None where all padding is at the end.
    """

    rows: int
    steps: int
    parts: tuple[int, ...] | None = None

    def without_padding(self, leaf: Array, axis: int) -> Array:
        """An array's true rows, in their order.

        Args:
          leaf: An array, of numpy or traced.
          axis: The dimension of the rows.

        Returns:
          The array of shape (..., rows, ...), `rows` along `axis`.
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
      data: The nest of arrays: (padded rows, ...) for one step, (steps,
        padded rows, ...) for several; rows split over the replicas.
    """

    data: Tree

    @property
    def padded(self) -> int:
        """Number of rows of each batch, with the padding."""
        return jax.tree.leaves(self.data)[0].shape[self.steps > 1]

    @property
    def is_padded(self) -> bool:
        """Whether there is padding."""
        return self.padded != self.rows

    @property
    def shape(self) -> RowShape:
        """What the batch's rows look like; static in programs."""
        return RowShape(rows=self.rows, steps=self.steps, parts=self.parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """What one call of a step function computes: one or more segments.

    Attributes:
      segments: The batches. None stand for steps that a resumed loop
        has done already.
      place: Of a feed, which epoch of the data this is, and the number of its
        steps up to this execution's end.
      logs: Of an execution without segments: what its last step returned.
    """

    segments: tuple[Segment, ...]
    place: tuple[int, int] | None = None
    logs: Any = None

    @property
    def num_bytes(self) -> int:
        """Memory that the arrays hold, on all devices."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.segments))


jax.tree_util.register_dataclass(
    Segment, data_fields=["data"], meta_fields=["rows", "steps", "parts"]
)
# Without leaves: Keras moves what it is given to one device, and must not meet
# the arrays, which lie where they belong.
jax.tree_util.register_dataclass(
    Execution, data_fields=[], meta_fields=["segments", "place", "logs"]
)


def num_rows(batch: Tree) -> int:
    """The number of rows of a batch.

    Raises:
      ValueError: a leaf of rank 0, arrays of different length, no array, or
        no row.
      TypeError: a leaf that holds no numbers.
    """
    arrays = jax.tree.leaves(batch)
    first_dims = {np.shape(array)[:1] for array in arrays}
    if len(first_dims) == 1 and all(map(host_arrays.holds_numbers, arrays)):
        (first_dim,) = first_dims
        if first_dim and first_dim[0]:
            return first_dim[0]
    return _refused(batch)


def _refused(batch: Tree) -> NoReturn:
    """Raises what is wrong with a batch."""
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
                "Every array of a batch needs a first dimension, its rows. "
                f"Received: {name} of rank 0, value {leaf!r}. Repeat the "
                "value for each row, or make it an attribute of the model."
            )
        host_arrays.check_numbers(leaf, name)
        lengths[name] = shape[0]
    if len(set(lengths.values())) > 1:
        raise ValueError(
            "All arrays of a batch must have the same number of rows. "
            f"Received: {lengths}. Check x, y and sample_weight, and that a "
            "dataset yields batches (`.batch(global_batch_size)`)."
        )
    raise ValueError(
        "A batch must have at least one row. Received: shapes "
        f"{[np.shape(leaf) for _, leaf in leaves]}. Check that the data "
        "is not empty."
    )


def global_batch(batch: Tree, mesh: ReplicaMesh) -> HostBatch:
    """A batch that this process holds with the rows of all processes.

    Of several processes each takes its own.

    Raises:
      ValueError, TypeError: see `num_rows`.
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
      batches: What this process holds of them.
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
    is_in_order = parts == rows_lib.in_order([block] * len(parts), rows)
    return Segment(
        data=jax.tree.unflatten(structure, leaves),
        rows=rows,
        steps=len(run),
        parts=None if is_in_order else parts,
    )


def _block_of(parts: tuple[int, ...], mesh: ReplicaMesh) -> int:
    """How many rows each process has with its padding."""
    block = rows_lib.padded_rows(max(parts), mesh.replicas_per_process)
    rows = sum(parts)
    even = rows_lib.padded_rows(rows, mesh.num_replicas) // len(parts)
    # As short as can be, if the processes hold just that.
    return (
        even if parts == rows_lib.in_order([even] * len(parts), rows) else block
    )


# `make_array_from_callback` and not `device_put`, which takes three times as
# long on the host for an array that is split (jax 0.10.2).


def _put(column: Sequence[Any], block: int, mesh: ReplicaMesh) -> jax.Array:
    (leaf,) = column
    if _is_placed(leaf, mesh):
        return leaf
    leaf = _padded(leaf, block)
    first = mesh.reader_index * block

    def rows_of(index: Any) -> Array:
        start, stop, _ = index[0].indices(shape[0])
        rows = leaf[start - first : stop - first]
        return host_arrays.aligned(rows) if mesh.platform == "cpu" else rows

    shape = (block * mesh.num_readers, *leaf.shape[1:])
    return jax.make_array_from_callback(shape, mesh.split, rows_of)


def _is_placed(leaf: object, mesh: ReplicaMesh) -> bool:
    return (
        isinstance(leaf, jax.Array)
        and leaf.shape[0] % mesh.num_replicas == 0
        and has_sharding(leaf, mesh.split)
    )


def true_rows(data: Batch, shape: RowShape) -> Batch:
    """Cuts the padding off; to be compiled.

    Returns:
      The batch of `shape.rows` rows; of several steps their dimension is
      the second.
    """
    axis = int(shape.steps > 1)

    def cut(leaf: jax.Array) -> jax.Array:
        is_whole = leaf.shape[axis] == shape.rows
        return leaf if is_whole else shape.without_padding(leaf, axis)

    return jax.tree.map(cut, data)


def sharded_rows(
    data: Batch, shape: RowShape, mesh: ReplicaMesh, *, is_sharded: bool
) -> Batch:
    """Says where the true rows of a padded batch lie; to be compiled.

    Args:
      data: What `true_rows` returned.
      shape: Its rows.
      mesh: The replicas.
      is_sharded: Whether XLA may divide them unevenly over the replicas;
        otherwise each replica has them all. So it has with several cores a
        replica: XLA would add padding to what is scattered, and to some
        gradients of convolutions (tests/contract/test_jax_contract.py).

    Returns:
      The same batch, with a sharding.
    """
    sharding = mesh.stacked if shape.steps > 1 else mesh.split
    is_even = shape.rows % mesh.num_replicas == 0
    if not is_even and (mesh.cores_per_replica > 1 or not is_sharded):
        sharding = mesh.whole
    return jax.lax.with_sharding_constraint(data, sharding)


def unstacked(data: Tree, steps: int) -> list[Tree]:
    """The batches of a segment of several steps; to be compiled."""
    return [jax.tree.map(lambda a, k=k: a[k], data) for k in range(steps)]


def _put_stacked(
    column: Sequence[Any], block: int, mesh: ReplicaMesh
) -> jax.Array:
    """Stacks what each replica reads: its rows are copied once."""
    column = [_padded(np.asarray(leaf), block) for leaf in column]
    rows = block * mesh.num_readers
    shape = (len(column), rows, *np.shape(column[0])[1:])
    first = mesh.reader_index * block

    def rows_of(index: Any) -> Array:
        start, stop, _ = index[1].indices(rows)
        part = slice(start - first, stop - first)
        return host_arrays.stacked([leaf[part] for leaf in column])

    return jax.make_array_from_callback(shape, mesh.stacked, rows_of)


def _padded(leaf: Array, rows: int) -> Array:
    """The array with `rows` rows: its last one again and again, or zeros."""
    missing = rows - leaf.shape[0]
    if not missing:
        return leaf
    leaf = np.asarray(leaf)
    if not len(leaf):
        return np.zeros((rows, *leaf.shape[1:]), leaf.dtype)
    return np.concatenate([leaf, np.repeat(leaf[-1:], missing, axis=0)])
