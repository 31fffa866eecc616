"""The variable creator: every variable made in a scope lies on the mesh.

Keras asks the current `Distribution` for the layout of each variable it
creates (weights, optimizer slots, metrics, seeds). Ours answers with the
replicated sharding of the mesh and remembers the variable.
"""

import contextlib
import functools
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding
from keras.src.distribution.distribution_lib import Distribution
from keras.src.optimizers.base_optimizer import BaseOptimizer

from keras_strategies._core.attributes import attribute_set
from keras_strategies._core.chief import from_chief
from keras_strategies._core.dispatch import dispatch
from keras_strategies._core.mesh import ReplicaMesh, copied, shown_devices
from keras_strategies.keras_bridge.patches import Patches
from keras_strategies.keras_bridge.variables import initial_values
from keras_strategies.keras_bridge.variables.abstract_variables import (
    creating,
    is_abstract,
    make_abstract,
    note_slot,
)
from keras_strategies.keras_bridge.variables.initial_values import (
    VariableCreator,
)
from keras_strategies.keras_bridge.variables.shardings import (
    Placements,
    follow,
    forget_placement,
    placement_of,
    sharding_of,
)


class Registry:
    """The variables that were created in a strategy's scope, held weakly."""

    def __init__(self) -> None:
        # By id: variables compare elementwise, so they are no dict keys.
        self._variables: weakref.WeakValueDictionary[int, keras.Variable]
        self._variables = weakref.WeakValueDictionary()

    def add(self, variable: keras.Variable) -> None:
        """Remembers a variable until it is collected."""
        self._variables[id(variable)] = variable

    def __contains__(self, variable: object) -> bool:
        return self._variables.get(id(variable)) is variable

    def __iter__(self) -> Iterator[keras.Variable]:
        return iter(list(self._variables.values()))


class ReplicaDistribution(Distribution):
    """Lays every variable out over a mesh and registers it."""

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
        """The layout of a variable that is being created."""
        self._registry.add(variable)
        self.placements.assign([variable])
        # Where a slice is only compiled for, variables stay on the host.
        mesh = self._mesh
        return None if mesh.is_abstract else sharding_of(variable, mesh)

    def alike(self) -> contextlib.AbstractContextManager[None]:
        """While it is open, processes create variables with equal values."""
        if self._mesh.num_processes == 1 or self._mesh.is_abstract:
            return contextlib.nullcontext()
        create = functools.partial(initial_values.create, self._mesh)
        return variable_creator_scope(create)

    def get_data_layout(self, data_shape: Iterable[int]) -> NamedSharding:
        """Where others lay data out in a scope, as keras-hub's `generate`.

        The feed of a loop does not ask. Rows that the replicas cannot share
        lie whole on each; and all rows where there are several processes, of
        which each can read only what lies on its own devices.
        """
        mesh, rows = self._mesh, next(iter(data_shape), 0)
        shares = rows and rows % mesh.num_replicas == 0
        return mesh.split if shares and mesh.num_processes == 1 else mesh.whole

    def get_tensor_layout(self, path: str) -> None:
        """Activations keep the layout that the step gives them."""
        return


@contextlib.contextmanager
def distribution_scope(
    distribution: ReplicaDistribution | None,
) -> Iterator[None]:
    """Makes `distribution` this thread's Keras distribution for a block."""
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(distribution)
    try:
        with contextlib.ExitStack() as stack:
            if distribution is not None:
                # Optimizer slots take their weight's layout: no one is asked.
                stack.enter_context(_slots_registered.held())
                stack.enter_context(distribution.alike())
            yield
    finally:
        keras.distribution.set_distribution(before)


def _registering(
    make_slot: Callable[..., keras.Variable],
) -> Callable[..., keras.Variable]:
    @functools.wraps(make_slot)
    def make(
        optimizer: BaseOptimizer,
        reference_variable: keras.Variable,
        *args: Any,
        **kwargs: Any,
    ) -> keras.Variable:
        # The calling thread's, if any.
        distribution = keras.distribution.distribution()
        layouts = contextlib.nullcontext()
        if isinstance(distribution, ReplicaDistribution):
            if _is_made_later(reference_variable):
                distribution.get_variable_layout(reference_variable)
            layouts = _with_layout_of_slots(reference_variable, distribution)
        abstract = is_abstract(reference_variable)
        with layouts, creating(abstract=abstract):
            slot = make_slot(optimizer, reference_variable, *args, **kwargs)
        if abstract and slot._value is None and not is_abstract(slot):
            # Keras would give it a value where a trace ends.
            make_abstract(slot, slot._initializer)
        if is_abstract(slot):
            note_slot(reference_variable, slot)
        if isinstance(distribution, ReplicaDistribution):
            follow(slot, reference_variable)
            distribution.get_variable_layout(slot)
        return slot

    return make


def _is_made_later(weight: keras.Variable) -> bool:
    """Whether a weight is placed after its slots: both are made in a trace."""
    has_nothing = getattr(weight, "_value", None) is None
    return has_nothing and getattr(weight, "_layout", None) is None


def _with_layout_of_slots(
    weight: keras.Variable, distribution: ReplicaDistribution
) -> contextlib.AbstractContextManager[None]:
    """Shows Keras the layout of a weight's slots, where it is another one.

    None, where the replicas divide variables and not this weight: then the
    distribution is asked for the slot's own.
    """
    held = placement_of(weight)
    if held is None and distribution.placements.partitioner is None:
        return contextlib.nullcontext()
    layout = None if held is None else held.of_slots
    is_same = layout is getattr(weight, "_layout", None)
    if is_same or (held is not None and held.mesh.is_abstract):
        return contextlib.nullcontext()
    return attribute_set(weight, "_layout", layout)


_slots_registered = Patches(
    lambda: [(BaseOptimizer, "add_variable_from_reference", _registering)]
)


def slots_follow_weights() -> contextlib.AbstractContextManager[None]:
    """In which slots have values, or none, as their weights."""
    return _slots_registered.held()


def adopt(
    variables: Iterable[keras.Variable],
    mesh: ReplicaMesh,
    placements: Placements,
) -> None:
    """Moves variables that were created elsewhere onto the mesh.

    A variable gets its layout and a true copy of its value: a plain
    `device_put` shares the source's buffer, which a donating step deletes.
    For a mesh that is only compiled for nothing is moved.

    Raises:
      ValueError: a variable that is laid out over the devices of another
        strategy or distribution, or cannot have its layout.
    """
    variables = list(variables)
    for variable in variables:
        held = placement_of(variable)
        if held is not None and held.mesh is not mesh:
            forget_placement(variable)
    placements.assign(variables)
    if mesh.is_abstract:
        return
    moved = []
    for variable in variables:
        value, sharding = variable._value, sharding_of(variable, mesh)
        if value is None:
            variable._layout = sharding
            continue
        is_ours = variable._layout is sharding
        if is_ours and value.sharding.is_equivalent_to(sharding, value.ndim):
            continue
        moved.append(variable)
    check_home(moved, mesh)
    if not moved:
        return
    shardings = [sharding_of(v, mesh) for v in moved]
    values = [v._value for v in moved]
    copies = (
        list(map(copied, values, shardings))
        if mesh.num_processes == 1
        else _from_chief(values, shardings, mesh)
    )
    for variable, value, sharding in zip(moved, copies, shardings, strict=True):
        variable._value, variable._layout = value, sharding


def _from_chief(
    values: list[Any], shardings: list[Any], mesh: ReplicaMesh
) -> list[Any]:
    """The chief's values; divided ones one by one, as each is whole first."""
    are_whole = [sharding is mesh.whole for sharding in shardings]
    whole = from_chief(list(itertools.compress(values, are_whole)), mesh)
    found = []
    for value, sharding in zip(values, shardings, strict=True):
        if sharding is mesh.whole:
            found.append(whole.pop(0))
            continue
        divide = jax.jit(list, out_shardings=[sharding])
        found += dispatch(mesh, divide, from_chief([value], mesh))
    return found


def check_home(variables: Iterable[keras.Variable], mesh: ReplicaMesh) -> None:
    """Raises ValueError unless `adopt` can move all the variables."""
    for variable in variables:
        value = variable._value
        if value is None or variable._layout is sharding_of(variable, mesh):
            continue
        devices = value.sharding.device_set
        if len(devices) > 1 and devices != set(mesh.devices):
            raise ValueError(
                "The model's variables must be placed on one device or on the "
                "devices of its strategy. Received: variable "
                f"{variable.path!r} on {shown_devices(list(devices))}, "
                f"strategy on {shown_devices(mesh.devices)}. Create the "
                "model in this strategy's scope, or call `detach(model)` on "
                "the strategy (or leave the keras.distribution) that placed "
                "it."
            )


def release(variables: Iterable[keras.Variable]) -> None:
    """Moves variables back to the default device, without a layout.

    Collective, where no process has all shards of one.
    """
    home = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    for variable in variables:
        value = variable._value
        if value is not None and not value.is_fully_addressable:
            # JAX moves nothing from devices of several processes to one.
            is_replicated = value.sharding.is_fully_replicated
            value = (
                value.addressable_data(0) if is_replicated else variable.numpy()
            )
        variable._layout = None
        forget_placement(variable)
        if value is not None:
            variable._value = copied(value, home)


class _Creators(threading.local):
    def __init__(self) -> None:
        self.stack: list[functools.partial[keras.Variable]] = []


_creators = _Creators()


@contextlib.contextmanager
def variable_creator_scope(creator: VariableCreator) -> Iterator[None]:
    """Calls `creator` for every Keras variable created in the block.

    As `tf.variable_creator_scope`: creators stack, the innermost is called
    first and passes on by calling `next_creator(**kwargs)`, with its keywords
    changed as it likes. Holds for this thread.

    Differs from tf: the variable that `next_creator` returns must be
    returned; another object cannot take its place.

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
    # An object of its own, since a creator may be entered again.
    entered = functools.partial(creator)
    _creators.stack.append(entered)
    try:
        with _creation.held():
            yield
    finally:
        is_nested = innermost_creator() is entered
        _creators.stack.remove(entered)
        if not is_nested:
            raise RuntimeError(
                "Exiting variable_creator_scope without proper nesting: scopes "
                "must be left in the reverse order of their entry. Received: "
                "an exit while another scope is open in it. Leave that first."
            )


def innermost_creator() -> object:
    """Returns what stands for the innermost open creator of this thread."""
    return _creators.stack[-1] if _creators.stack else None


def _creating_init(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: keras.Variable, *args: Any, **kwargs: Any) -> None:
        if not _creators.stack:
            original(self, *args, **kwargs)
            return
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        arguments.pop(next(iter(arguments)))
        arguments |= arguments.pop("kwargs", {})

        def create(**kwargs: Any) -> keras.Variable:
            original(self, **kwargs)
            return self

        for creator in _creators.stack:
            create = functools.partial(creator, create)
        if create(**arguments) is not self:
            raise ValueError(
                "A variable creator must return the variable that its "
                "`next_creator` returned. Received: another object from "
                f"{_creators.stack[-1].func!r}. Change the keywords passed to "
                "`next_creator` instead of the variable."
            )

    return init


_creation = Patches(lambda: [(keras.Variable, "__init__", _creating_init)])
