"""Ownership of arrays: which a step may take in place."""

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import keras

from keras_strategies._core.mesh import (
    ReplicaMesh,
    copy_with_sharding,
    has_sharding,
)
from keras_strategies.keras_bridge.step_context import Group
from keras_strategies.keras_bridge.variables.shardings import sharding_of

Made = dict[int, "weakref.ref[Any]"]
"""Group that steps returned, weakly and by id: no one shares their buffers."""


def own(
    group: Group,
    variables: Sequence[keras.Variable],
    holders: Sequence[Group],
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
      made: Group that steps returned in earlier loops, or None where even
        those may share their buffers.
      mesh: The replicas, where every array must lie.
      donate: Whether the step donates the group.
    """
    alone = _count_references([object()])[0]
    counts = _count_references(group) if donate else []
    pointers: set[int] = set()
    for i, variable in enumerate(variables):
        value, sharding = group[i], sharding_of(variable, mesh)
        if not has_sharding(value, sharding):
            value = copy_with_sharding(value, sharding)
        elif donate:
            known = sum(i < len(h) and h[i] is value for h in holders)
            is_ours = made is not None and (known or _is_among(value, made))
            num_others = counts[i] - alone - known
            if not is_ours or num_others > (variable._value is value):
                value = copy_with_sharding(value, sharding)
            elif not known:
                pointer = _pointer(value)
                if pointer in pointers:
                    value = copy_with_sharding(value, sharding)
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
    on the common devices, which neither array shows.
    """
    if len(_device_sets) < 2:
        return False
    mine = frozenset(mesh.devices)
    return any(mine != other and mine & other for other in _device_sets)


def are_alone(values: Group, known: Sequence[Any]) -> bool:
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


def are(references: list[Any], values: Group) -> bool:
    """Whether weak references are to these very arrays."""
    return len(references) == len(values) and all(
        reference() is value
        for reference, value in zip(references, values, strict=True)
    )


def still_held(made: Made, state: Sequence[Group]) -> Made:
    """Adds a state's arrays to `made`, without those that are gone."""
    held = {key: array for key, array in made.items() if array() is not None}
    for group in state:
        held |= {id(array): weakref.ref(array) for array in group}
    return held


def _is_among(array: object, made: Made) -> bool:
    reference = made.get(id(array))
    return reference is not None and reference() is array


def _count_references(group: Group) -> list[int]:
    return [sys.getrefcount(group[i]) for i in range(len(group))]


def _pointer(array: jax.Array) -> int:
    # Not `addressable_shards`: see `_core.values.local_shards`.
    return array.addressable_data(0).unsafe_buffer_pointer()
