"""Buffers in which small arrays travel together between CPU devices.

An all-reduce of several arrays costs something for each of them: 3 to 15 us
between the devices of a process, 0.5 to 1.5 ms over gloo between processes.
Copying an array into a buffer and out again costs less, up to some size; and
it costs compile time, since every piece of a buffer is code of its own.

The pieces are written into the buffer one by one. To concatenate them would
be shorter and a trap: where XLA's CPU compiler fuses a sum over rows (the
gradient of a bias) into a `concatenate`, it evaluates that sum for every entry
of the buffer, and a step takes up to 150 times as long. What is written in
place is evaluated for its own entries only, however many rows it sums.

References:
  - Li et al., PyTorch Distributed (2020), on buckets of gradients:
    https://arxiv.org/abs/2006.15704
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from keras_strategies._core.mesh import ReplicaMesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffering:
    """Which of the arrays of one all-reduce share a buffer.

    Attributes:
      max_entries: Entries of the largest array that is copied into a buffer.
      max_arrays: Where more arrays than that are small enough, all travel
        each for itself; None for no limit.
    """

    max_entries: int
    max_arrays: int | None

    def groups(self, arrays: Sequence[jax.Array]) -> list[list[int]]:
        """Positions of the arrays that share a buffer, by dtype."""
        small = [i for i, a in enumerate(arrays) if a.size <= self.max_entries]
        if self.max_arrays is not None and len(small) > self.max_arrays:
            return []
        by_dtype: dict[object, list[int]] = {}
        for i in small:
            by_dtype.setdefault(arrays[i].dtype, []).append(i)
        return [members for members in by_dtype.values() if len(members) > 1]


# Measured on 2 cores with jax 0.10.2, beside an all-reduce of each array.
# Steps of dense stacks of width 32 to 64 with 6 arrays take 0.9x on 2 devices
# and 0.7x to 0.8x on 4; a small transformer's, a ResNet's and those of 16
# dense layers (31 to 40 arrays) 0.9x to 1.0x and 0.8x to 0.9x, for up to a
# second of compiling. Arrays of 16384 entries: 1.3x (width 128, 9 layers).
IN_PROCESS = Buffering(max_entries=4096, max_arrays=40)
# Over gloo the same steps take 0.2x, with 34 arrays 0.15x; width 512 0.6x
# where arrays of 2**18 entries are among them, 0.9x with the small ones alone.
BETWEEN_PROCESSES = Buffering(max_entries=2**18, max_arrays=None)


def buffering_of(mesh: ReplicaMesh) -> Buffering | None:
    """How arrays travel between a mesh's devices; None: each for itself.

    The compilers for TPU and GPU combine all-reduces by themselves. A
    replica's cores may hold parts of an array, which a buffer would gather.
    """
    if mesh.platform != "cpu" or mesh.cores_per_replica > 1:
        return None
    return IN_PROCESS if mesh.num_processes == 1 else BETWEEN_PROCESSES


def packed(arrays: Sequence[jax.Array]) -> jax.Array:
    """Arrays of one dtype, each after the other in one buffer: (entries,)."""
    total = sum(array.size for array in arrays)
    # Not `lax.empty`, which `vmap` takes for batched, and so `jacfwd` refuses.
    buffer = jnp.zeros((total,), arrays[0].dtype)
    start = 0
    for array in arrays:
        buffer = jax.lax.dynamic_update_slice(buffer, array.ravel(), (start,))
        start += array.size
    return buffer


def unpacked(buffer: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """A buffer's pieces, with the shapes of the arrays it was made of."""
    pieces, start = [], 0
    for array in like:
        piece = jax.lax.slice(buffer, (start,), (start + array.size,))
        pieces.append(piece.reshape(array.shape))
        start += array.size
    return pieces
