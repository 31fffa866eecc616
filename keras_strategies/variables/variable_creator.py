"""The variable creator, which places a scope's variables on the mesh.

Keras asks the current `Distribution` for the layout of each variable that it
creates (weights, optimizer slots, metrics, seeds). `ReplicaDistribution`
returns the sharding of the variable over the mesh, and registers the variable.
"""

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding
from keras.src.distribution.distribution_lib import Distribution
from keras.src.optimizers.base_optimizer import BaseOptimizer

from keras_strategies.cluster.exchange import same_variables
from keras_strategies.keras_bridge.patches import Patches, replacement
from keras_strategies.spmd.identity import temporary_attribute
from keras_strategies.spmd.mesh import (
    ReplicaMesh,
    copy_with_sharding,
    format_devices,
)
from keras_strategies.variables import initial_values
from keras_strategies.variables.abstract_variables import (
    creating,
    is_abstract,
    make_abstract,
    note_slot,
)
from keras_strategies.variables.initial_values import (
    VariableCreator,
    place_from_chief,
)
from keras_strategies.variables.shardings import (
    Placements,
    forget_placement,
    get_placement,
    get_sharding,
    shard_like,
)


class Registry:
    """Weak references to the variables created in a strategy's scope."""

    def __init__(self) -> None:
        # The keys are ids, because variables compare elementwise.
        self._variables = weakref.WeakValueDictionary[int, keras.Variable]()

    def add(self, variable: keras.Variable) -> None:
        """Adds a variable, which stays until it is garbage-collected."""
        self._variables[id(variable)] = variable

    def __contains__(self, variable: object) -> bool:
        return self._variables.get(id(variable)) is variable

    def __iter__(self) -> Iterator[keras.Variable]:
        return iter(list(self._variables.values()))


class ReplicaDistribution(Distribution):
    """A Keras distribution that places new variables and registers them."""

    def __init__(
        self, mesh: ReplicaMesh, registry: Registry, placements: Placements
    ) -> None:
        device_mesh = keras.distribution.DeviceMesh(
            shape=mesh.mesh.devices.shape,
            axis_names=list(mesh.mesh.axis_names),
            devices=[f"{d.platform}:{d.id}" for d in mesh.devices],
        )
        super().__init__(
            device_mesh, batch_dim_name=mesh.axis, auto_shard_dataset=False
        )
        self._mesh = mesh
        self._registry = registry
        self.placements = placements

    @property
    def num_model_replicas(self) -> int:
        """Number of replicas of the model."""
        return self._mesh.num_replicas

    def get_variable_layout(
        self, variable: keras.Variable
    ) -> NamedSharding | None:
        """Registers a variable that is being created; returns its layout."""
        self._registry.add(variable)
        self.placements.assign([variable])
        # If the strategy can only compile, variables stay on the host.
        mesh = self._mesh
        return None if mesh.is_abstract else get_sharding(variable, mesh)

    @contextlib.contextmanager
    def creating_equal(self) -> Iterator[None]:
        """Creates the block's variables with equal values in all processes."""
        if not self._is_shared():
            yield
            return
        create = functools.partial(initial_values.create, self._mesh)
        with variable_creator_scope(create):
            yield
        same_variables.compare(self._mesh.processes)

    def compare(self, find: Callable[[], Iterable[keras.Variable]]) -> None:
        """Compares the result of `find` between processes. Collective."""
        if self._is_shared():
            initial_values.compare_existing(self._mesh, find())

    def _is_shared(self) -> bool:
        return self._mesh.num_processes > 1 and not self._mesh.is_abstract

    def get_data_layout(
        self, data_shape: Iterable[int]
    ) -> NamedSharding | None:
        """Returns the layout of data that other libraries place in a scope.

        keras-hub's `generate` calls this, unlike `fit`. Rows are replicated if
        the replicas cannot share them evenly. If there are several processes,
        the data stay on the host: JAX compares placed data, on the devices.
        """
        mesh, rows = self._mesh, next(iter(data_shape), 0)
        shares = rows and rows % mesh.num_replicas == 0
        if mesh.num_processes > 1:
            return None
        return mesh.split if shares else mesh.whole

    def get_tensor_layout(self, path: str) -> None:
        """Returns None: activations keep the layout that the step chose."""
        return


@contextlib.contextmanager
def distribution_scope(
    distribution: ReplicaDistribution | None,
) -> Iterator[None]:
    """Sets this thread's Keras distribution while the block runs."""
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(distribution)
    try:
        with contextlib.ExitStack() as stack:
            if distribution is not None:
                # Keras copies a slot's layout from its weight, without asking
                # the distribution.
                stack.enter_context(slot_creation.hold())
                stack.enter_context(distribution.creating_equal())
            yield
    finally:
        keras.distribution.set_distribution(before)


@replacement
def _create_slot(
    original: Callable[..., keras.Variable],
    optimizer: BaseOptimizer,
    reference_variable: keras.Variable,
    *args: Any,
    **kwargs: Any,
) -> keras.Variable:
    weight = reference_variable
    # The distribution of the calling thread, if any.
    distribution = keras.distribution.distribution()
    layouts = contextlib.nullcontext()
    if isinstance(distribution, ReplicaDistribution):
        # A weight that was created in a trace is not placed yet.
        if weight._value is None and weight._layout is None:
            distribution.get_variable_layout(weight)
        layouts = _set_layout_of_slots(weight, distribution)
    abstract = is_abstract(weight)
    with layouts, creating(abstract=abstract):
        slot = original(optimizer, weight, *args, **kwargs)
    if abstract and slot._value is None and not is_abstract(slot):
        # Otherwise Keras would initialize the slot when the trace ends.
        make_abstract(slot, slot._initializer)
    if is_abstract(slot):
        note_slot(weight, slot)
    if isinstance(distribution, ReplicaDistribution):
        shard_like(slot, weight)
        distribution.get_variable_layout(slot)
    return slot


def _set_layout_of_slots(
    weight: keras.Variable, distribution: ReplicaDistribution
) -> contextlib.AbstractContextManager[None]:
    """Makes Keras give slots the layout for slots, not the weight's layout.

    If variables are sharded over the replicas, but not this weight, its layout
    is None in the block, so that Keras asks the distribution for the slot's.
    """
    placement, layout = get_placement(weight), weight._layout
    if placement is None and distribution.placements.partitioner is not None:
        layout = None
    if placement is not None and not placement.mesh.is_abstract:
        layout = placement.slot_sharding
    return temporary_attribute(weight, "_layout", layout)


_SLOTS = (BaseOptimizer, "add_variable_from_reference", _create_slot)
slot_creation = Patches(lambda: [_SLOTS])
"""Creates slots without values if their weights have none."""


def adopt(
    variables: Iterable[keras.Variable],
    mesh: ReplicaMesh,
    placements: Placements,
) -> None:
    """Moves variables that were created elsewhere onto the mesh.

    A variable gets its layout and a copy of its value. A plain `device_put`
    would share the source's buffer, which a step that donates its state would
    delete. If the strategy can only compile, nothing is moved.

    Raises:
      ValueError: if a variable is on the devices of another strategy or
        distribution, or its layout does not fit.
    """
    variables = list(variables)
    for variable in variables:
        placement = get_placement(variable)
        if placement is not None and placement.mesh is not mesh:
            forget_placement(variable)
    placements.assign(variables)
    if mesh.is_abstract:
        return
    moved = []
    for variable in variables:
        value, sharding = variable._value, get_sharding(variable, mesh)
        if value is None:
            variable._layout = sharding
            continue
        is_same = value.sharding.is_equivalent_to(sharding, value.ndim)
        if variable._layout is not sharding or not is_same:
            moved.append(variable)
    check_home(moved, mesh)
    if not moved:
        return
    shardings = [get_sharding(v, mesh) for v in moved]
    values = [v._value for v in moved]
    if mesh.num_processes == 1:
        copies = list(map(copy_with_sharding, values, shardings))
    else:
        initial_values.compare_existing(mesh, moved)
        copies = place_from_chief(values, shardings, mesh)
    for variable, value, sharding in zip(moved, copies, shardings, strict=True):
        variable._value, variable._layout = value, sharding


def check_home(variables: Iterable[keras.Variable], mesh: ReplicaMesh) -> None:
    """Raises ValueError unless `adopt` can move all the variables."""
    for variable in variables:
        value = variable._value
        if value is None or variable._layout is get_sharding(variable, mesh):
            continue
        devices = value.sharding.device_set
        if len(devices) > 1 and devices != set(mesh.devices):
            raise ValueError(
                "The model's variables must be placed on one device or on the "
                "devices of its strategy. Received: variable "
                f"{variable.path!r} on {format_devices(list(devices))}, "
                f"strategy on {format_devices(mesh.devices)}. Create the "
                "model in this strategy's scope, or call `detach(model)` on "
                "the strategy (or leave the keras.distribution) that placed "
                "it."
            )


def release(variables: Iterable[keras.Variable]) -> None:
    """Moves variables back to the default device, without a layout.

    Collective if no process has all shards of a variable.
    """
    home = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    for variable in variables:
        value = variable._value
        if value is not None and not value.is_fully_addressable:
            # JAX cannot move an array from several processes to one device.
            is_replicated = value.sharding.is_fully_replicated
            value = (
                value.addressable_data(0) if is_replicated else variable.numpy()
            )
        variable._layout = None
        forget_placement(variable)
        if value is not None:
            variable._value = copy_with_sharding(value, home)


class _Creators(threading.local):
    def __init__(self) -> None:
        self.stack: list[functools.partial[keras.Variable]] = []


_creators = _Creators()


@contextlib.contextmanager
def variable_creator_scope(creator: VariableCreator) -> Iterator[None]:
    """Calls `creator` for every Keras variable created in the block.

    As in `tf.variable_creator_scope`, creators can be nested. The innermost is
    called first. It calls the next with `next_creator(**kwargs)`, and may
    change the arguments. Affects only this thread. Unlike in TensorFlow, a
    creator must return the variable that `next_creator` returned.

    Args:
      creator: `creator(next_creator, **kwargs) -> keras.Variable`, where
        kwargs are those of `keras.Variable` (initializer, shape, dtype,
        trainable, autocast, aggregation, synchronization, name, layout).

    Example:
      ```python
      def frozen(next_creator, **kwargs):
          return next_creator(**(kwargs | {"trainable": False}))

      with ks.variable_creator_scope(frozen):
          layer = keras.layers.Dense(3)
          layer.build((None, 2))
      ```
    """
    # A new object for each scope, because a creator may be in two scopes.
    entry = functools.partial(creator)
    _creators.stack.append(entry)
    try:
        with _creation.hold():
            yield
    finally:
        _creators.stack.remove(entry)


def innermost_creator() -> object:
    """Returns an object that identifies the innermost scope, or None."""
    return _creators.stack[-1] if _creators.stack else None


@replacement
def _init(
    original: Callable[..., None],
    variable: keras.Variable,
    *args: Any,
    **kwargs: Any,
) -> None:
    if not _creators.stack:
        original(variable, *args, **kwargs)
        return
    bound = inspect.signature(original).bind(variable, *args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    arguments.pop(next(iter(arguments)))
    arguments |= arguments.pop("kwargs", {})

    def create(**kwargs: Any) -> keras.Variable:
        original(variable, **kwargs)
        return variable

    for creator in _creators.stack:
        create = functools.partial(creator, create)
    if create(**arguments) is not variable:
        raise ValueError(
            "A variable creator must return the variable that its "
            "`next_creator` returned. Received: another object from "
            f"{_creators.stack[-1].func!r}. Change the keywords passed to "
            "`next_creator` instead of replacing the variable."
        )


_creation = Patches(lambda: [(keras.Variable, "__init__", _init)])
