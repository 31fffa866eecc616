"""The variables of a model, and the arrays of their values while steps run.

While Keras's `fit` runs, the values of a model's variables are in the state
that it passes from step to step, and the variables themselves may have no
values. Writing all values back to read one number would take longer than a
small step.

A step updates an array in place if it owns it: if nothing else refers to it.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_strategies.keras_bridge.step_context import Group
from keras_strategies.spmd.mesh import (
    ReplicaMesh,
    copy_with_sharding,
    has_sharding,
)
from keras_strategies.variables.abstract_variables import refuse_abstract
from keras_strategies.variables.shardings import get_sharding
from keras_strategies.variables.variable_creator import variable_creator_scope

Owned = dict[int, "weakref.ref[Any]"]
"""Weak references, by id, to arrays that steps returned. No other array shares
the buffers of these arrays."""

_device_sets: set[frozenset[jax.Device]] = set()
"""The devices of every strategy whose steps may donate their state."""


def all_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns every variable of a model, its optimizers, metrics and losses."""
    by_id: dict[int, keras.Variable] = {}
    # A class's `metrics` may read attributes that its `compile`, which is still
    # running, has not set yet. If they stay missing, Keras's `fit` raises.
    owners: list[Any] = [model, *getattr(model, "metrics", ())]
    for owner in [*owners, *find_optimizers(model)]:
        by_id |= {id(v): v for v in owner.variables}
    by_id |= {id(v): v for v in getattr(model, "metrics_variables", ())}
    return list(by_id.values())


def find_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers that are attributes of a model or its layers."""
    return [
        optimizer
        for layer in model._flatten_layers()
        for optimizer in _find_optimizers(vars(layer).values())
    ]


def _find_optimizers(values: Iterable[Any]) -> list[keras.optimizers.Optimizer]:
    found = []
    for value in values:
        if isinstance(value, keras.optimizers.Optimizer):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _find_optimizers(value)
        elif isinstance(value, dict):
            found += _find_optimizers(value.values())
    return found


def read_learning_rates(model: keras.Model) -> dict[str, float]:
    """Returns the learning rates of the next step.

    Nothing is computed on the strategy's devices, so a single process may call
    this function.

    Args:
      model: A compiled model. A fit of the model may be running.

    Returns:
      A dict {"learning_rate": rate}. Empty if the model has no Keras optimizer
      or a MultiOptimizer, or the rate is not a scalar.
    """
    optimizer = _unwrap_optimizer(model)
    several = keras.optimizers.MultiOptimizer
    if optimizer is None or isinstance(optimizer, several):
        return {}
    rate: Any = optimizer._learning_rate
    if isinstance(rate, keras.Variable):
        rate = _read_values(model, [rate])[0]
    else:
        # A schedule computes the rate from the optimizer's step. A function may
        # also read other scalars of the optimizer.
        scalars = [v for v in model.optimizer.variables if v.shape == ()]
        values = _read_values(model, scalars)
        with keras.StatelessScope(list(zip(scalars, values, strict=True))):
            rate = keras.ops.convert_to_numpy(optimizer.learning_rate)
    return {"learning_rate": float(rate)} if np.ndim(rate) == 0 else {}


def count_optimizer_steps(model: keras.Model) -> int:
    """Returns the number of train steps of the model's optimizer.

    Steps that accumulate gradients are counted; steps that loss scaling skips
    are not. The result is 0 if the model has no Keras optimizer.
    """
    optimizer = _unwrap_optimizer(model)
    if optimizer is None:
        return 0
    return int(_read_values(model, [optimizer._iterations])[0])


def _unwrap_optimizer(model: keras.Model) -> keras.optimizers.Optimizer | None:
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    is_known = isinstance(optimizer, keras.optimizers.Optimizer)
    return optimizer if is_known else None


def _read_values(
    model: keras.Model, variables: Sequence[keras.Variable]
) -> list[Any]:
    """Returns current values of optimizer variables, on the host."""
    values: Any = [v._value for v in variables]
    state = getattr(model, "_jax_state", None) or {}
    if "optimizer_variables" in state and not model._jax_state_synced:
        places = {id(v): k for k, v in enumerate(model.optimizer.variables)}
        current = state["optimizer_variables"]
        values = [current[places[id(v)]] for v in variables]
    return jax.device_get(values)


models_in_loops: "weakref.WeakSet[keras.Model]" = weakref.WeakSet()
"""Models whose values may be in the state that a running `fit` passes on."""


@contextlib.contextmanager
def defer_creation() -> Iterator[None]:
    """Allows a trace to create variables, which get their values afterwards.

    Keras can initialize a variable later only if it has an initializer, so a
    plain value is wrapped in an initializer.
    """

    def create(
        next_creator: Callable[..., keras.Variable], **kwargs: Any
    ) -> keras.Variable:
        initializer = kwargs["initializer"]
        if not callable(initializer) and not isinstance(initializer, str):
            value = np.asarray(initializer, kwargs.get("dtype"))
            if value.dtype == np.float64:
                value = value.astype(keras.config.floatx())
            kwargs |= {
                "initializer": lambda shape, dtype: jnp.asarray(value, dtype),
                "shape": value.shape,
                "dtype": kwargs.get("dtype") or str(value.dtype),
            }
        return next_creator(**kwargs)

    with variable_creator_scope(create):
        yield


def sync_fits(variables: Sequence[keras.Variable]) -> None:
    """Writes values from the state of a running fit back to the variables.

    Does nothing if all the variables have values.

    Raises:
      RuntimeError: if a variable was created in `ks.abstract()` and has no
        value.
    """
    if any(v._value is None for v in variables):
        sync_all_fits()
        refuse_abstract(variables)


def sync_all_fits() -> None:
    """Writes the values from the states of running fits back to variables."""
    for model in list(models_in_loops):
        if any(v._value is None for v in model.variables):
            model.jax_state_sync()


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
        value, sharding = group[i], get_sharding(variable, mesh)
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
                # Two variables of the group may still share a buffer. (Not by
                # `addressable_shards`: see `spmd.values.local_shards`.)
                pointer = value.addressable_data(0).unsafe_buffer_pointer()
                if pointer in pointers:
                    value = copy_with_sharding(value, sharding)
                pointers.add(pointer)
        group[i] = value


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
