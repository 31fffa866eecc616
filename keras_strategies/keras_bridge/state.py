"""A model's state as arrays, and how the replicas' states become one."""

import dataclasses
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_strategies._core.mesh import ReplicaMesh, copied, is_laid_out
from keras_strategies._core.replica_map import (
    all_max,
    all_min,
    all_sum,
    replica_id,
)
from keras_strategies._core.step_context import StepContext
from keras_strategies.keras_bridge import metric_rules
from keras_strategies.keras_bridge.partitions import sharding_of

Arrays = list[Any]
Made = dict[int, "weakref.ref[Any]"]
"""Arrays that steps returned, weakly and by id: no one shares their buffers."""

MERGE_RULES = ("mean", "sum", "max", "min", "any", "all", "first")
_HASH = np.uint32(0x9E3779B9)


def merge(variable: keras.Variable, rule: str) -> keras.Variable:
    """Says how a variable that a step writes is merged over the replicas.

    By default floating-point state (moving statistics) is averaged, integer
    and boolean state is replica 0's, metrics are summed up. Call it where
    that is not what the variable means: a counter of rows, a maximum.

    Args:
      variable: The variable; typically made by `layer.add_weight`.
      rule: `"mean"`, `"sum"` (what the replicas added is added up), `"max"`,
        `"min"`, `"any"`, `"all"` (booleans) or `"first"` (replica 0's).

    Returns:
      The variable, for use in an assignment.

    Raises:
      ValueError: an unknown rule.
      TypeError: not a variable.

    Example:
      ```python
      self.rows_seen = ks.merge(
          self.add_weight(shape=(), dtype="int32", trainable=False), "sum"
      )
      ```
    """
    if not isinstance(variable, keras.Variable):
        raise TypeError(
            "`merge` takes a Keras variable. Received: "
            f"{type(variable).__name__}. Pass what `add_weight` returned."
        )
    if rule not in MERGE_RULES:
        raise ValueError(
            "A variable is merged by one of the known rules. Received: "
            f"rule={rule!r}. Choose from {', '.join(MERGE_RULES)}."
        )
    variable._ks_merge = rule
    return variable


def is_seed(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a `keras.random.SeedGenerator`."""
    return (
        variable.name == "seed_generator_state"
        and tuple(variable.shape) == (2,)
        and "uint32" in str(variable.dtype)
    )


def fold_seeds(
    variables: Sequence[keras.Variable], values: Arrays, step: StepContext
) -> Arrays:
    """Gives every replica random streams of its own.

    A hash of the replica's id is mixed into the seed. Adding the id instead
    would make seed 3 on replica 1 the stream of seed 4 on replica 0.
    """
    step.seeds |= {id(variable) for variable in variables if is_seed(variable)}
    return [
        _folded(value, step) if is_seed(variable) else value
        for variable, value in zip(variables, values, strict=True)
    ]


def _folded(seed: Any, step: StepContext) -> Any:
    """The seed of a replica's own stream; and back, if it is one."""
    mixed = jnp.asarray(replica_id(step.axis)).astype("uint32") * _HASH
    mixed = (mixed ^ (mixed >> 15)) * np.uint32(0x85EBCA6B)
    return seed.at[0].set(seed[0] ^ mixed ^ (mixed >> 13))


def next_seed(
    step: StepContext,
    original: Callable[..., Any],
    generator: keras.random.SeedGenerator,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`SeedGenerator.next`: what is written to all copies draws alike.

    An optimizer that adds noise is given that of one device.
    """
    seed = original(generator, *args, **kwargs)
    is_for_all = step.in_optimizer or step.in_update
    if is_for_all and id(generator.state) in step.seeds:
        return _folded(seed, step)
    return seed


@dataclasses.dataclass(kw_only=True)
class Merge:
    """Collects what a step changed and reduces all of it at once."""

    step: StepContext
    summands: list[Any] = dataclasses.field(default_factory=list)

    def add(self, value: Any) -> int:
        """Takes an array to be summed over the replicas; returns its place."""
        self.summands.append(value)
        return len(self.summands) - 1

    def sums(self) -> list[Any]:
        """The sums, by place."""
        return all_sum(self.summands, self.step.axis, self.step.buffering)


def plan_merge(
    plan: Merge,
    variables: Sequence[keras.Variable],
    old: Arrays,
    folded: Arrays,
    new: Arrays,
    *,
    are_metrics: bool = False,
) -> Any:
    """Plans the merge of one group of variables.

    Args:
      plan: Where the summands go.
      variables: The variables of the group.
      old: Their values before the step.
      folded: As `old`, with the seeds that the replica used.
      new: Their values after the step on this replica.
      are_metrics: Whether what the replicas added is added up by default.

    Returns:
      A function of the plan's sums that returns the merged values.
    """
    finishers = []
    for variable, o, f, n in zip(variables, old, folded, new, strict=True):
        finishers.append(_finisher(plan, variable, o, f, n, are_metrics))

    def finish(sums: list[Any]) -> Arrays:
        return [
            as_type_of(finisher(sums), o)
            for finisher, o in zip(finishers, old, strict=True)
        ]

    return finish


def _finisher(
    plan: Merge,
    variable: keras.Variable,
    old: Any,
    folded: Any,
    new: Any,
    is_metric: bool,
) -> Any:
    step = plan.step
    if new is folded or new is old or new is None:
        return lambda sums: old
    is_float = keras.backend.is_float_dtype(str(new.dtype))
    if id(new) in step.equal and not (step.is_uneven and is_float):
        return lambda sums: new
    if id(new) in step.equal:
        # Computed alike, but in branches that the compiler may round in
        # different ways.
        return _of_first(plan, new)
    if is_seed(variable):
        # Every replica drew as often, or the next draws are those after the
        # most; the stream's own seed stays.
        drawn = all_max(new[1], step.axis) if step.is_uneven else new[1]
        return lambda sums: jnp.stack([old[0], drawn])
    rule = _rule(variable, step, is_metric)
    if rule in (metric_rules.SAME, metric_rules.IN_TURN):
        return lambda sums: new
    number = new.astype("int32") if _is_bool(new) else new
    if rule in ("max", "any"):
        largest = all_max(number, step.axis)
        return lambda sums: largest
    if rule in ("min", "all"):
        smallest = all_min(number, step.axis)
        return lambda sums: smallest
    if rule == "sum":
        place = plan.add(new - old)
        return lambda sums: old + sums[place]
    if rule == metric_rules.MEAN and is_metric:
        place = plan.add((new - old) / step.num_replicas)
        return lambda sums: old + sums[place]
    if rule == "mean":
        place = plan.add(_shared(new, step))
        return lambda sums: sums[place]
    return _of_first(plan, number)


def _of_first(plan: Merge, value: Any) -> Any:
    """Replica 0's value, for all."""
    is_first = replica_id(plan.step.axis) == 0
    place = plan.add(jnp.where(is_first, value, jnp.zeros_like(value)))
    return lambda sums: sums[place]


def _shared(value: Any, step: StepContext) -> Any:
    """This replica's part of the average over the replicas."""
    if step.share is None:
        return value / step.num_replicas
    share = jnp.asarray(step.share, value.dtype)
    # Statistics of no rows are no numbers.
    return jnp.where(share > 0, value * share, jnp.zeros_like(value))


def _rule(variable: keras.Variable, step: StepContext, is_metric: bool) -> str:
    chosen = getattr(variable, "_ks_merge", None)
    if chosen is not None:
        return chosen
    if is_metric:
        return step.metric_rules.get(id(variable), metric_rules.SUM)
    if variable.aggregation == "sum":
        return "sum"
    if variable.aggregation == "only_first_replica":
        return "first"
    floating = keras.backend.is_float_dtype(str(variable.dtype))
    return "mean" if floating else "first"


def _is_bool(value: Any) -> bool:
    return value.dtype == bool


def as_type_of(new: Any, old: Any) -> Any:
    """`new` with the dtype of `old`, so that no step changes a type."""
    return jax.lax.convert_element_type(jnp.asarray(new), old.dtype)


def changed_values(old: list[Any], new: list[Any]) -> dict[str, Any]:
    """The values that a step replaced, by their position in the group."""
    return {
        str(k): as_type_of(n, o)
        for k, (o, n) in enumerate(zip(old, new, strict=True))
        if n is not o and n is not None
    }


def own(
    group: Arrays,
    variables: Sequence[keras.Variable],
    holders: Sequence[Arrays],
    made: Made | None,
    mesh: ReplicaMesh,
    *,
    donate: bool,
) -> None:
    """Makes a group's arrays ones that a step may take, in place.

    An array that lies elsewhere is moved. Of a group that the step donates,
    one that somebody else holds (a user's `v.value`, a target network after
    `assign`, a second variable) is copied, and so is one that no step of
    ours returned: moving a user's array to the devices, which `assign` does,
    shares its buffer. jaxlib crashes on a buffer that is donated twice.

    Args:
      group: The values of variables.
      variables: The variables.
      holders: Lists of Keras and ours that may hold the same arrays and
        never read them again.
      made: Arrays that steps returned in earlier loops, or None where even
        those may share their buffers.
      mesh: The replicas, where every array must lie.
      donate: Whether the step donates the group.
    """
    alone = _count_references([object()])[0]
    counts = _count_references(group) if donate else []
    pointers: set[int] = set()
    for i, variable in enumerate(variables):
        value, sharding = group[i], sharding_of(variable, mesh)
        if not is_laid_out(value, sharding):
            value = copied(value, sharding)
        elif donate:
            known = sum(i < len(h) and h[i] is value for h in holders)
            is_ours = made is not None and (known or _is_among(value, made))
            num_others = counts[i] - alone - known
            if not is_ours or num_others > (variable._value is value):
                value = copied(value, sharding)
            elif not known:
                pointer = _pointer(value)
                if pointer in pointers:
                    value = copied(value, sharding)
                pointers.add(pointer)
        group[i] = value


_device_sets: set[frozenset[jax.Device]] = set()
"""The devices of every strategy whose steps took some state."""


def note_devices(mesh: ReplicaMesh) -> None:
    """Notes the devices of a strategy whose steps donate what they take."""
    _device_sets.add(frozenset(mesh.devices))


def has_rivals(mesh: ReplicaMesh) -> bool:
    """Whether another strategy uses some of the devices, and not the same.

    A variable of one that is assigned to the other's then shares its buffers
    on the common devices, which neither array tells.
    """
    if len(_device_sets) < 2:
        return False
    mine = frozenset(mesh.devices)
    return any(mine != other and mine & other for other in _device_sets)


def are_alone(values: Arrays, known: Sequence[Any]) -> bool:
    """Whether a step may take arrays that are held by their variables alone.

    Args:
      values: The arrays, those of variables.
      known: For each, a weak reference to the array that a step of ours
        returned for the variable last, or None.
    """
    alone = _count_references([object()])[0]
    counts = _count_references(values)
    return all(
        count == alone + 1 and reference is not None and reference() is value
        for count, reference, value in zip(counts, known, values, strict=True)
    )


def are(references: list[Any], values: list[Any]) -> bool:
    """Whether weak references are to these very arrays."""
    return len(references) == len(values) and all(
        reference() is value
        for reference, value in zip(references, values, strict=True)
    )


def still_held(made: Made, state: Sequence[Arrays]) -> Made:
    """Adds a state's arrays to `made`, without those that are gone."""
    held = {key: array for key, array in made.items() if array() is not None}
    for group in state:
        held |= {id(array): weakref.ref(array) for array in group}
    return held


def _is_among(array: Any, made: Made) -> bool:
    reference = made.get(id(array))
    return reference is not None and reference() is array


def _count_references(group: Arrays) -> list[int]:
    return [sys.getrefcount(group[i]) for i in range(len(group))]


def _pointer(array: jax.Array) -> int:
    # Not `addressable_shards`: see `_core.values.local_shards`.
    return array.addressable_data(0).unsafe_buffer_pointer()
