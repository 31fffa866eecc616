"""Buffers that pack small arrays into one all-reduce on CPU.

An all-reduce of several arrays has a cost per array, because the devices wait
for each other at every array: 3 to 50 us between the devices of a process, 0.5
to 1.5 ms over gloo between processes. Up to a certain size, copying an array
into a buffer and out again is cheaper. Buffers add compile time, because XLA
compiles the copies of each shape of arrays separately.

The places of the arrays in a buffer are numbers that XLA does not know. It
compiles equal loops once, but with known places the loops that copy an array,
or that read it in an optimizer's update, would all be different: 20 to 50 ms
for each array.

The arrays are written into the buffer one by one, by `dynamic_update_slice`,
and the buffer starts as an `iota`. XLA's CPU compiler then evaluates each array
for its own entries only. Two shorter forms are slow:

- `concatenate`: the loop that copies an array has the number of iterations of
  the largest array's, with a mask. If a sum over rows (the gradient of a bias)
  is fused into it, the sum is evaluated in every iteration, and a step takes up
  to 150 times as long.
- A buffer of zeros: XLA replaces the first `dynamic_update_slice` by a `pad`,
  whose loop runs over the entire buffer, with a mask.

Even without a sum, the masked loads behind the end of an array are slow if no
memory has been written there: 130 ns for 8 entries (AMD EPYC). A `pad` from
2048 to 11082 entries took 1 to 100 us, depending on where the array was
allocated.

References:
  - Li et al., PyTorch Distributed (2020), on buckets of gradients:
    https://arxiv.org/abs/2006.15704
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from keras_strategies.passes.combined_sums import PACK, UNPACK
from keras_strategies.passes.specs import Axis
from keras_strategies.passes.stages import EQUAL
from keras_strategies.spmd.mesh import ReplicaMesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffering:
    """The rule that decides which arrays of an all-reduce share a buffer.

    Attributes:
      max_entries: The maximum size of an array that is copied into a buffer, in
        entries.
      max_shapes: If the small arrays have more different shapes than this
        number, no buffer is used at all. None for no limit.
    """

    max_entries: int
    max_shapes: int | None

    def groups(self, arrays: Sequence[Any]) -> list[list[int]]:
        """Returns, for each buffer, the indices of the arrays that share it.

        The arrays in a buffer have the same dtype.
        """
        if not self.fits(arrays):
            return []
        by_dtype: dict[object, list[int]] = {}
        for i in self._small(arrays):
            by_dtype.setdefault(arrays[i].dtype, []).append(i)
        return [members for members in by_dtype.values() if len(members) > 1]

    def fits(self, arrays: Sequence[Any]) -> bool:
        """Returns whether the small arrays have few enough different shapes."""
        shapes = {arrays[i].shape for i in self._small(arrays)}
        return self.max_shapes is None or len(shapes) <= self.max_shapes

    def _small(self, arrays: Sequence[Any]) -> list[int]:
        """Returns the indices of the arrays that may share a buffer.

        Booleans share no buffer, because the sum over the replicas converts
        them to int32.
        """
        return [
            i
            for i, a in enumerate(arrays)
            if a.size <= self.max_entries and a.dtype != bool
        ]


# Step times with buffers, relative to one all-reduce per array (2 cores, jax
# 0.10.2, 2 devices, 20 steps per execution): 0.1x for 30 or 60 dense layers of
# width 16, 0.2x to 0.3x for width 64, 0.6x for a CNN, 0.7x for a transformer.
# Relative to buffers of arrays of up to 4096 entries: 0.6x to 0.7x for width
# 128, 0.8x to 0.9x for width 256, where 2**18 entries gain no more. Each shape
# of arrays in a buffer adds 20 to 50 ms to the compilation, which is why their
# number is limited.
IN_PROCESS = Buffering(max_entries=2**16, max_shapes=64)
# Between processes (over gloo) the same steps take 0.2x, or 0.15x with 34
# arrays. Dense layers of width 512 take 0.6x if arrays of 2**18 entries are
# buffered, and 0.9x if only the small arrays are.
BETWEEN_PROCESSES = Buffering(max_entries=2**18, max_shapes=None)


def choose_buffering(mesh: ReplicaMesh) -> Buffering | None:
    """Chooses the buffers of a mesh's all-reduces; None for no buffers.

    On TPUs and GPUs no buffers are needed, because the compiler combines
    all-reduces itself. If a replica has several cores, an array may be sharded
    over them, and copying it into a buffer would gather it.
    """
    if mesh.platform != "cpu" or mesh.cores_per_replica > 1:
        return None
    return IN_PROCESS if mesh.num_processes == 1 else BETWEEN_PROCESSES


def sum_arrays(
    arrays: Sequence[jax.Array], *, axis: Axis, buffering: Buffering | None
) -> list[jax.Array]:
    """Sums each array over the replicas, those that share a buffer in one sum.

    Args:
      arrays: This replica's arrays.
      axis: The replica axis.
      buffering: The rule that decides which arrays share a buffer. None for no
        buffers.
    """
    sums: list[Any] = [None] * len(arrays)
    for members in buffering.groups(arrays) if buffering else ():
        group = [arrays[i] for i in members]
        total = _sum_over(pack(group, axis), axis)
        for i, piece in zip(members, unpack(total, group, axis), strict=True):
            sums[i] = piece
    return [
        _sum_over(array, axis) if total is None else total
        for array, total in zip(arrays, sums, strict=True)
    ]


def _sum_over(array: jax.Array, axis: Axis) -> jax.Array:
    # XLA's partitioner (jax 0.10) rejects a sum over the replicas if there is
    # only one replica, with several cores.
    is_alone = jax.lax.axis_size(axis) == 1
    return array if is_alone else jax.lax.psum(array, axis)


def pack(arrays: Sequence[jax.Array], axis: Axis) -> jax.Array:
    """Packs arrays of one dtype into a one-dimensional buffer."""
    return _pack(*arrays, axis=axis)


def unpack(
    buffer: jax.Array, like: Sequence[jax.Array], axis: Axis
) -> list[jax.Array]:
    """Splits a buffer into arrays with the shapes of those in `like`."""
    shapes = tuple(array.shape for array in like)
    return _unpack(buffer, shapes=shapes, axis=axis)


def _write(*arrays: jax.Array, axis: Axis) -> jax.Array:
    total = sum(array.size for array in arrays)
    buffer = jax.lax.iota(arrays[0].dtype, total)
    starts = _starts(tuple(array.size for array in arrays), axis)
    for array, start in zip(arrays, starts, strict=True):
        buffer = jax.lax.dynamic_update_slice(
            buffer, array.ravel(), (start,), allow_negative_indices=False
        )
    return buffer


def _read(
    buffer: jax.Array, *, shapes: tuple[tuple[int, ...], ...], axis: Axis
) -> list[jax.Array]:
    sizes = tuple(math.prod(shape) for shape in shapes)
    return [
        jax.lax.dynamic_slice(
            buffer, (start,), (size,), allow_negative_indices=False
        ).reshape(shape)
        for shape, size, start in zip(
            shapes, sizes, _starts(sizes, axis), strict=True
        )
    ]


def _find_starts(sizes: tuple[int, ...], axis: Axis) -> Sequence[jax.Array]:
    """Returns where arrays start in a buffer, as numbers that XLA cannot know.

    The condition is always true.
    """
    starts = np.cumsum([0, *sizes[:-1]], dtype="int32")
    return jax.lax.cond(
        jax.lax.axis_index(axis) >= 0,
        lambda: [jax.lax.full((), start, "int32") for start in starts],
        lambda: [jax.lax.full((), 0, "int32") for _ in starts],
    )


_find_starts.__name__ = EQUAL
_starts = jax.jit(_find_starts, static_argnums=(0, 1))
# By these names `with_combined_sums` recognizes buffers in traces.
_write.__name__ = PACK
_read.__name__ = UNPACK
_pack = jax.jit(_write, static_argnames="axis")
_unpack = jax.jit(_read, static_argnames=("shapes", "axis"))
