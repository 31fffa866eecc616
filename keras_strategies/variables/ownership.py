"""Ownership of arrays: decides which arrays a step may update in place."""

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import keras

from keras_strategies.keras_bridge.step_context import Group
from keras_strategies.spmd.mesh import (
    ReplicaMesh,
    copy_with_sharding,
    has_sharding,
)
from keras_strategies.variables.shardings import sharding_of

Owned = dict[int, "weakref.ref[Any]"]
"""Weak references, by id, to arrays that steps returned. No other array shares
the buffers of these arrays."""


def take_ownership(
    group: Group,
    variables: Sequence[keras.Variable],
    holders: Sequence[Group],
    owned: Owned | None,
    mesh: ReplicaMesh,
    *,
    donate: bool,
) -> None:
    """Copies the arrays of a group that a step may not update in place.

    An array with a different sharding is moved. If the step donates the group,
    an array that something else refers to is copied: for example, a user's
    `v.value`, a target network after `assign`, or a second variable. An array
    that no step returned is copied too: `assign` moves a user's array to the
    devices, but both arrays then share a buffer. jaxlib crashes if a buffer is
    donated twice.

    Args:
      group: The values of variables; changed in place.
      variables: The variables.
      holders: Lists, in Keras and in this package, that may refer to the same
        arrays but are never read again.
      owned: Arrays that steps returned in earlier calls of `fit`, or None if
        even those may share their buffers.
      mesh: The mesh of the replicas. Every array must be on its devices.
      donate: Whether the step donates the group.
    """
    # The number of references that `_count_references` itself adds.
    baseline = _count_references([object()])[0]
    counts = _count_references(group) if donate else []
    pointers: set[int] = set()
    for i, variable in enumerate(variables):
        value, sharding = group[i], sharding_of(variable, mesh)
        if not has_sharding(value, sharding):
            value = copy_with_sharding(value, sharding)
        elif donate:
            known = sum(i < len(h) and h[i] is value for h in holders)
            is_ours = owned is not None and (known or _is_among(value, owned))
            num_others = counts[i] - baseline - known
            # The variable itself may also refer to the array. If anything else
            # does, the array must not be donated.
            if not is_ours or num_others > (variable._value is value):
                value = copy_with_sharding(value, sharding)
            elif not known:
                # Two variables of the group may still share a buffer.
                pointer = _pointer(value)
                if pointer in pointers:
                    value = copy_with_sharding(value, sharding)
                pointers.add(pointer)
        group[i] = value


_device_sets: set[frozenset[jax.Device]] = set()
"""The devices of every strategy whose steps may donate their state."""


def note_devices(mesh: ReplicaMesh) -> None:
    """Records the devices of a strategy whose steps may donate their state."""
    _device_sets.add(frozenset(mesh.devices))


def has_rivals(mesh: ReplicaMesh) -> bool:
    """Returns whether another strategy shares only some of these devices.

    The devices of the two strategies overlap but are not the same. If a
    variable of one strategy is then assigned to a variable of the other, the
    two arrays share buffers on the common devices, and this cannot be detected
    from either array.
    """
    if len(_device_sets) < 2:
        return False
    devices = frozenset(mesh.devices)
    return any(devices != other and devices & other for other in _device_sets)


def are_unshared(values: Group, known: Sequence[Any]) -> bool:
    """Returns whether steps returned the arrays, and only variables use them.

    Args:
      values: The arrays of the variables.
      known: For each variable, a weak reference to the array that a step last
        returned for it, or None.
    """
    baseline = _count_references([object()])[0]
    counts = _count_references(values)
    return all(
        count == baseline + 1 and reference is not None and reference() is value
        for count, reference, value in zip(counts, known, values, strict=True)
    )


def refer_to(references: list[Any], values: Group) -> bool:
    """Returns whether each weak reference points to the array at its index."""
    return len(references) == len(values) and all(
        reference() is value
        for reference, value in zip(references, values, strict=True)
    )


def update_owned(owned: Owned, state: Sequence[Group]) -> Owned:
    """Returns `owned` without arrays that are gone, plus a state's arrays."""
    owned = {key: array for key, array in owned.items() if array() is not None}
    for group in state:
        arrays = [array for array in group if array is not None]
        owned |= {id(array): weakref.ref(array) for array in arrays}
    return owned


def _is_among(array: object, owned: Owned) -> bool:
    reference = owned.get(id(array))
    return reference is not None and reference() is array


def _count_references(group: Group) -> list[int]:
    return [sys.getrefcount(group[i]) for i in range(len(group))]


def _pointer(array: jax.Array) -> int:
    # Not `addressable_shards`: see `spmd.values.local_shards`.
    return array.addressable_data(0).unsafe_buffer_pointer()
