"""Sums over the replicas: few ones, and on CPU those of packed buffers.

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

A step sums gradients where its optimizer is called, and metrics, moving
statistics and losses at its end, although most of these could be summed
together with the gradients. So the sums of a traced step are computed in
rounds, and the sums of one round are combined. A sum is in round k if the
longest chain of sums that it depends on has length k. A round may contain sums
that are computed only under a condition. The other sums of the round are then
computed in both branches: together with them, or without.

References:
  - Li et al., PyTorch Distributed (2020), on buckets of gradients:
    https://arxiv.org/abs/2006.15704
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from keras_strategies._types import Array
from keras_strategies.passes import stages
from keras_strategies.passes.specs import Axis
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
        # Booleans share no buffer, because the sum over the replicas converts
        # them to int32.
        small = [
            i
            for i, a in enumerate(arrays)
            if a.size <= self.max_entries and a.dtype != bool
        ]
        shapes = {arrays[i].shape for i in small}
        if self.max_shapes is not None and len(shapes) > self.max_shapes:
            return []
        by_dtype: dict[object, list[int]] = {}
        for i in small:
            by_dtype.setdefault(arrays[i].dtype, []).append(i)
        return [members for members in by_dtype.values() if len(members) > 1]


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
    arrays: Sequence[jax.Array],
    *,
    axis: Axis,
    buffering: Buffering | None = None,
) -> list[jax.Array]:
    """Sums each array over the replicas, those that share a buffer in one sum.

    Args:
      arrays: This replica's arrays.
      axis: The replica axis.
      buffering: The rule that decides which arrays share a buffer. None for no
        buffers.
    """
    sums: dict[int, jax.Array] = {}
    for members in buffering.groups(arrays) if buffering else ():
        group = [arrays[i] for i in members]
        total = _sum_over(pack(group, axis), axis)
        sums |= zip(members, unpack(total, group, axis), strict=True)
    return [
        sums[i] if i in sums else _sum_over(array, axis)
        for i, array in enumerate(arrays)
    ]


def _sum_over(array: jax.Array, axis: Axis) -> jax.Array:
    # XLA's partitioner (jax 0.10) rejects a sum over the replicas if there is
    # only one replica, with several cores.
    is_alone = jax.lax.axis_size(axis) == 1
    return array if is_alone else jax.lax.psum(array, axis)


def pack(arrays: Sequence[jax.Array], axis: Axis) -> jax.Array:
    """Packs arrays of one dtype into a one-dimensional buffer."""
    sizes = [array.size for array in arrays]
    buffer = jax.lax.iota(arrays[0].dtype, sum(sizes))
    starts = _find_starts(sizes, axis)
    for array, start in zip(arrays, starts, strict=True):
        buffer = jax.lax.dynamic_update_slice(
            buffer, array.ravel(), (start,), allow_negative_indices=False
        )
    return buffer


def unpack(
    buffer: jax.Array, like: Sequence[jax.Array], axis: Axis
) -> list[jax.Array]:
    """Splits a buffer into arrays with the shapes of those in `like`."""
    starts = _find_starts([array.size for array in like], axis)
    return [
        jax.lax.dynamic_slice(
            buffer, (start,), (array.size,), allow_negative_indices=False
        ).reshape(array.shape)
        for array, start in zip(like, starts, strict=True)
    ]


def _find_starts(sizes: Sequence[int], axis: Axis) -> Sequence[jax.Array]:
    """Returns where arrays start in a buffer, as numbers that XLA cannot know.

    The condition is always true.
    """
    starts = np.cumsum([0, *sizes[:-1]], dtype="int32")
    return jax.lax.cond(
        jax.lax.axis_index(axis) >= 0,
        lambda: [jax.lax.full((), start, "int32") for start in starts],
        lambda: [jax.lax.full((), 0, "int32") for _ in starts],
    )


def with_combined_sums(
    traced: ClosedJaxpr, axis: Axis, buffering: Buffering | None
) -> Callable[..., list[Any]]:
    """Returns a traced function in which sums over an axis are combined.

    Args:
      traced: The function. Its sums are not combined if it prints, calls back
        into Python or uses references.
      axis: The replica axis.
      buffering: The rule that decides which arrays share a buffer.

    Returns:
      A function that takes the flat inputs and returns the flat outputs.
    """
    jaxpr = traced.jaxpr
    has_effects = any(map(stages.has_effects, jaxpr.eqns))
    if has_effects or stages.has_references(jaxpr):
        return jaxpr_as_fun(traced)
    equations = stages.needed_equations(jaxpr.eqns, jaxpr.outvars)
    rounds = _rounds(equations, axis)
    if all(len(sums) < 2 for _, sums in rounds):
        return jaxpr_as_fun(traced)

    def compute(*inputs: Array) -> list[Any]:
        values = dict(zip(jaxpr.constvars, traced.consts, strict=True))
        values |= dict(zip(jaxpr.invars, inputs, strict=True))
        for computed, sums in rounds:
            stages.update_values(jaxpr, computed, values)
            totals = _compute_sums(sums, values, axis, buffering)
            results = [v for equation in sums for v in equation.outvars]
            values.update(zip(results, totals, strict=True))
        return [stages.read_value(v, values) for v in jaxpr.outvars]

    return compute


def _compute_sums(
    sums: Sequence[Any],
    values: Mapping[Any, Any],
    axis: Axis,
    buffering: Buffering | None,
) -> list[Any]:
    """Computes the sums of a round, of which the first may be conditional."""

    def add_up(arrays: list[Any]) -> list[jax.Array]:
        arrays = list(map(jnp.asarray, arrays))
        return sum_arrays(arrays, axis=axis, buffering=buffering)

    has_condition = bool(sums) and not _is_psum(sums[0])
    plain = sums[1:] if has_condition else sums
    operands = [v for equation in plain for v in equation.invars]
    summands = [stages.read_value(v, values) for v in operands]
    if not has_condition:
        return add_up(summands)
    call = sums[0]
    traced = call.params["jaxpr"]
    *before, branch = traced.jaxpr.eqns
    inner = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
    inputs = [stages.read_value(v, values) for v in call.invars]
    inner |= zip(traced.jaxpr.invars, inputs, strict=True)
    stages.update_values(traced.jaxpr, before, inner)
    index, *read = [stages.read_value(v, inner) for v in branch.invars]
    compute, compute_sums = map(jaxpr_as_fun, branch.params["branches"])
    is_rounded = _sums_in_other_dtype(branch.params["branches"][1])

    def sum_all(read: list[Any], summands: list[Any]) -> list[Any]:
        if is_rounded:
            return [*compute_sums(*read), *add_up(summands)]
        return add_up([*compute(*read), *summands])

    def sum_plain(read: list[Any], summands: list[Any]) -> list[Any]:
        return [*compute(*read), *add_up(summands)]

    return jax.lax.switch(index, [sum_plain, sum_all], read, summands)


def _sums_in_other_dtype(traced: ClosedJaxpr) -> bool:
    """Returns whether a function sums its results in a dtype of its own."""
    sums = filter(_is_psum, stages.all_equations(traced))
    sent = {v.aval.dtype for equation in sums for v in equation.invars}
    return sent != {aval.dtype for aval in traced.out_avals}


def _rounds(equations: Sequence[Any], axis: Axis) -> list[tuple[Any, Any]]:
    """Returns each round of sums, with the equations to compute before it.

    The first sum of a round may be conditional.
    """
    waits: dict[Any, int] = {}
    computed, sums = collections.defaultdict(list), {}
    for equation in equations:
        operands = stages.variables(equation.invars)
        latest = max((waits.get(v, 0) for v in operands), default=0)
        round_sums = sums.setdefault(latest, [])
        is_sum = _is_sum(equation, axis)
        is_sum_if = equation.params.get("name") == stages.SUM_IF
        if is_sum:
            round_sums.append(equation)
        elif is_sum_if and all(map(_is_psum, round_sums[:1])):
            round_sums.insert(0, equation)
            is_sum = True
        else:
            computed[latest].append(equation)
        waits.update((v, latest + is_sum) for v in equation.outvars)
    last = max([*computed, *sums], default=0)
    return [(computed[k], sums.get(k, [])) for k in range(last + 1)]


def _is_sum(equation: JaxprEqn, axis: Axis) -> bool:
    return (
        _is_psum(equation)
        and equation.params["axes"] in ((axis,), axis)
        and equation.params["axis_index_groups"] is None
    )


def _is_psum(equation: JaxprEqn) -> bool:
    return equation.primitive.name == "psum"
