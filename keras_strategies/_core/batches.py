"""Host batches, and the executions that carry them to the devices.

A batch is a nest of arrays whose first dimension is its rows. A batch that
the replicas can share evenly is split over them as it is. Any other one is
padded to the next multiple of their number (by repeating its last row) and
carries its true number of rows; what reads it cuts the padding off first.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from keras_strategies._core.mesh import ReplicaMesh

Tree = Any
_Key = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive batches of equal shape, on the devices.

    Attributes:
      data: The nest of arrays: (padded rows, ...) for one step, (steps,
        padded rows, ...) for several; rows split over the replicas.
      rows: Number of rows of each batch, without the padding.
      steps: Number of batches.
    """

    data: Tree
    rows: int
    steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """What one call of a step function computes: one or more segments."""

    segments: tuple[Segment, ...]


jax.tree_util.register_dataclass(
    Segment, data_fields=["data"], meta_fields=["rows", "steps"]
)
jax.tree_util.register_dataclass(
    Execution, data_fields=["segments"], meta_fields=[]
)


def padded_rows(rows: int, num_replicas: int) -> int:
    """The next multiple of `num_replicas`: rows with their padding."""
    return -(-rows // num_replicas) * num_replicas


def num_rows(batch: Tree) -> int:
    """The number of rows of a batch.

    Raises:
      ValueError: a leaf of rank 0, arrays of different length, no array, or
        no row.
      TypeError: a leaf that holds no numbers.
    """
    arrays = jax.tree.leaves(batch)
    first_dims = {np.shape(array)[:1] for array in arrays}
    if len(first_dims) == 1 and all(map(_holds_numbers, arrays)):
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
        check_numbers(leaf, name)
        lengths[name] = shape[0]
    if len(set(lengths.values())) > 1:
        raise ValueError(
            "All arrays of a batch must have the same number of rows. "
            f"Received: {lengths}. Check x, y and sample_weight."
        )
    raise ValueError(
        "A batch must have at least one row. Received: shapes "
        f"{[np.shape(leaf) for _, leaf in leaves]}. Check that the data "
        "is not empty."
    )


def check_numbers(leaf: Any, name: str = "an array") -> None:
    """Raises TypeError unless a leaf holds numbers or booleans."""
    if not _holds_numbers(leaf):
        raise TypeError(
            "The arrays of a batch must hold numbers or booleans. "
            f"Received: {name} of dtype {getattr(leaf, 'dtype', None)} "
            f"({type(leaf).__name__}). Encode it before training."
        )


def _holds_numbers(leaf: Any) -> bool:
    return getattr(leaf, "dtype", np.dtype("O")).kind not in "OSUmM"


def place(batches: Sequence[Tree], mesh: ReplicaMesh) -> Execution:
    """Moves batches to the devices, one transfer for each run of equal ones.

    Args:
      batches: Nests of host arrays.
      mesh: The replicas to split the rows over.
    """
    runs: list[tuple[_Key, list[list[Any]]]] = []
    for batch in batches:
        leaves, structure = jax.tree.flatten(batch)
        key = (structure, num_rows(batch), *map(_signature, leaves))
        if not runs or runs[-1][0] != key:
            runs.append((key, []))
        runs[-1][1].append(leaves)
    return Execution(
        segments=tuple(
            _place_run(key[0], key[1], run, mesh) for key, run in runs
        )
    )


def _place_run(
    structure: Any, rows: int, run: list[list[Any]], mesh: ReplicaMesh
) -> Segment:
    missing = padded_rows(rows, mesh.num_replicas) - rows
    put = _put if len(run) == 1 else _put_stacked
    leaves = [
        put([_pad(leaf, missing) for leaf in column], mesh)
        for column in zip(*run, strict=True)
    ]
    return Segment(
        data=jax.tree.unflatten(structure, leaves), rows=rows, steps=len(run)
    )


# `make_array_from_callback` and not `device_put`, which takes three times as
# long on the host for an array that is split (jax 0.10.2).


def _put(column: list[Any], mesh: ReplicaMesh) -> jax.Array:
    (leaf,) = column
    return jax.make_array_from_callback(
        leaf.shape, mesh.split, leaf.__getitem__
    )


def unstacked(data: Tree, steps: int) -> list[Tree]:
    """The batches of a segment of several steps; to be compiled."""
    return [jax.tree.map(lambda a, k=k: a[k], data) for k in range(steps)]


def _put_stacked(column: list[Any], mesh: ReplicaMesh) -> jax.Array:
    """Stacks what each replica reads: its rows are copied once."""
    shape = (len(column), *np.shape(column[0]))

    def rows_of(index: Any) -> Any:
        return np.stack([leaf[index[1:]] for leaf in column])

    return jax.make_array_from_callback(shape, mesh.stacked, rows_of)


def _pad(leaf: Any, missing: int) -> Any:
    if not missing:
        return leaf
    leaf = np.asarray(leaf)
    return np.concatenate([leaf, np.repeat(leaf[-1:], missing, axis=0)])


def _signature(leaf: Any) -> tuple[tuple[int, ...], Any]:
    return np.shape(leaf), leaf.dtype
