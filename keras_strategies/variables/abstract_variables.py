"""Variables without values, for models that are only compiled.

Such a variable stores its initializer but stays uninitialized, like Keras's
variables in a StatelessScope. While Keras infers shapes, the variable reads as
zeros, which take no memory, because shapes are inferred in traces. In a step,
the variable reads as its value in the step's state. Any other read raises an
error, because otherwise a trace would contain the zeros as a constant. But in
`storing_values`, such a read returns the variable's initial or assigned value.
"""

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from keras_strategies._types import Array
from keras_strategies.keras_bridge.patches import Patches, replacement
from keras_strategies.spmd.identity import temporary_attribute
from keras_strategies.variables.sharded_variable import make_plain, make_sharded
from keras_strategies.variables.shardings import get_placement

MAX_REAL_SIZE = 64
"""The largest number of entries of a variable that still gets a value."""

# Keras sets its own `_initializer` to None after a deferred initialization.
_INITIALIZER = "_ks_initializer"
_SLOTS = "_ks_abstract_slots"
_VALUE = "_ks_stored_value"


class ValueStore:
    """Initial and assigned values of abstract variables.

    The variables stay abstract: the values are only for code that reads them
    outside of a step. They are stored with the variables, up to a number of
    bytes in total.

    Args:
      max_bytes: The number of bytes that the values of all variables may take.
      refuse: A function of a variable that returns the error to raise if the
        variable is read, but its value was not or cannot be stored.
    """

    def __init__(
        self, max_bytes: int, refuse: Callable[[keras.Variable], Exception]
    ) -> None:
        self._free_bytes, self._refuse = max_bytes, refuse

    def read(self, variable: keras.Variable) -> Array:
        """Returns a variable's value, which is first initialized if needed."""
        if _VALUE not in variable.__dict__:
            initializer = variable.__dict__[_INITIALIZER]
            # Without an initializer, the assigned value was not stored.
            if initializer is None or not self._reserve(variable):
                raise self._refuse(variable)
            # Traces read values, too, as constants.
            with jax.ensure_compile_time_eval():
                value = initializer(variable.shape, dtype=variable._dtype)
            variable.__dict__[_VALUE] = np.asarray(value)
        value = variable.__dict__[_VALUE]
        return variable._convert_to_tensor(value, dtype=variable._dtype)

    def write(self, variable: keras.Variable, value: Array) -> bool:
        """Stores a value, if there is room for it; returns whether it does."""
        is_stored = _VALUE in variable.__dict__ or self._reserve(variable)
        if is_stored:
            # NumPy arrays do not depend on the mesh of a trace, and programs
            # that donate their arguments do not delete them.
            variable.__dict__[_VALUE] = np.asarray(value)
        return is_stored

    def _reserve(self, variable: keras.Variable) -> bool:
        dtype = jax.dtypes.canonicalize_dtype(variable._dtype)
        size = math.prod(variable.shape) * dtype.itemsize
        has_room = size <= self._free_bytes
        self._free_bytes -= size * has_room
        return has_room


class _Thread(threading.local):
    is_abstract = False
    is_inferring = False


_thread = _Thread()


class _Process:
    store: ValueStore | None = None


class AbstractVariable(keras.Variable):
    """A variable with a shape and without a value; see `make_abstract`."""

    @property
    def value(self) -> Array:
        """The value in a step's state; zeros while shapes are inferred.

        Returns:
          An array of the variable's shape.
        """
        scope = get_stateless_scope()
        if scope is not None:
            value = scope.get_current_value(self)
            if value is not None:
                return self._maybe_autocast(value)
        if in_symbolic_scope() or _thread.is_inferring:
            zeros = keras.ops.zeros(self.shape, self._dtype)
            return self._maybe_autocast(zeros)
        if _Process.store is not None:
            return self._maybe_autocast(_Process.store.read(self))
        raise RuntimeError(_message(self))

    def assign(self, value: Array) -> Array:
        """Assigns a value.

        In a step, the value is written to the step's state. While a model is
        created, the variable becomes a plain variable with this value. In
        `storing_values`, the value is stored if there is room for it.

        Returns:
          The value, in the variable's dtype.
        """
        if get_stateless_scope() is not None or _Process.store is not None:
            return super().assign(value)
        if not _thread.is_abstract:
            raise RuntimeError(_message(self))
        value = self._convert_to_tensor(value, dtype=self._dtype)
        if tuple(value.shape) == tuple(self.shape):
            make_real(self)
        return keras.Variable.assign(self, value)

    def _direct_assign(self, value: Array) -> None:
        """Stores a value; Keras calls it in `assign` outside of traces."""
        store = _Process.store
        if store is None or not store.write(self, value):
            # Its initial value would not be its value any more.
            self.__dict__[_INITIALIZER] = None

    def _deferred_initialize(self) -> None:
        """Sets only the layout; Keras's method would create the value."""
        self._initialize_layout()


def is_abstract(variable: object) -> bool:
    """Returns whether a variable has no value."""
    return isinstance(variable, AbstractVariable)


def creating_layer() -> Any:
    """Finds the object whose `__init__` or `build` is creating a variable.

    Returns:
      A layer, optimizer or metric, or None.
    """
    stack = global_state.get_global_attribute("name_scope_stack")
    return getattr(stack[-1], "caller", None) if stack else None


def is_creating_abstract() -> bool:
    """Returns whether variables are currently created without values."""
    return _thread.is_abstract


def make_abstract(
    variable: keras.Variable, initializer: Callable[..., Any] | None
) -> None:
    """Makes a variable abstract.

    Args:
      variable: A new variable.
      initializer: The initializer that computes the variable's value if the
        variable is made real.
    """
    make_plain(variable)
    variable._value = None
    variable.__dict__[_INITIALIZER] = initializer
    variable.__class__ = AbstractVariable


def make_real(variable: keras.Variable) -> Callable[..., Any] | None:
    """Makes an abstract variable a plain one, which must then get a value.

    Returns:
      The initializer that the variable was created with.
    """
    initializer = variable.__dict__.pop(_INITIALIZER)
    variable._initializer = None
    variable.__class__ = keras.Variable
    for name in (_SLOTS, _VALUE):
        variable.__dict__.pop(name, None)
    if get_placement(variable) is not None:
        make_sharded(variable)
    return initializer


def note_slot(weight: keras.Variable, slot: keras.Variable) -> None:
    """Records an abstract optimizer slot of an abstract weight."""
    slots = weight.__dict__.setdefault(_SLOTS, [])
    slots.append(weakref.ref(slot))


def list_slots(weight: keras.Variable) -> list[keras.Variable]:
    """Returns the recorded slots of a weight that still exist."""
    slots = [slot() for slot in weight.__dict__.get(_SLOTS, ())]
    return [slot for slot in slots if slot is not None]


def refuse_abstract(variables: Iterable[keras.Variable]) -> None:
    """Raises RuntimeError if any of the variables has no value."""
    for variable in variables:
        if is_abstract(variable):
            raise RuntimeError(_message(variable))


@contextlib.contextmanager
def creating(*, abstract: bool) -> Iterator[None]:
    """Creates this thread's variables in the block with or without values.

    Args:
      abstract: Whether to create variables without values.
    """
    patched = _patches.hold() if abstract else contextlib.nullcontext()
    with patched, temporary_attribute(_thread, "is_abstract", abstract):
        yield


def inferring_shapes() -> contextlib.AbstractContextManager[None]:
    """Lets abstract variables read as zeros in a block that infers shapes."""
    return temporary_attribute(_thread, "is_inferring", True)


def storing_values(
    store: ValueStore,
) -> contextlib.AbstractContextManager[None]:
    """Lets code of all threads read and write abstract variables in the block.

    Args:
      store: The store of the values.
    """
    return temporary_attribute(_Process, "store", store)


def describe(variable: keras.Variable) -> str:
    """Returns a variable's path and shape, for messages."""
    return f"{variable.path!r} of shape {tuple(variable.shape)}"


def _message(variable: keras.Variable) -> str:
    return (
        "A variable that was created in `ks.abstract()` has a shape and no "
        f"value. Received: a read or write of {describe(variable)}, which is "
        "not in the state of a step. To compile a step of a model, call "
        "`strategy.compile_step(model, batch)`, which needs no values; the "
        "variable must belong to the model or to one of its layers. To "
        "initialize the variables, call `strategy.materialize(model)`."
    )


@replacement
def _initialize(
    original: Callable[..., None],
    variable: keras.Variable,
    initializer: Callable[..., Any],
) -> None:
    is_small = math.prod(variable.shape) <= MAX_REAL_SIZE
    if not _thread.is_abstract or is_small:
        original(variable, initializer)
        return
    variable._initialize_layout()
    make_abstract(variable, initializer)


_PATCH = keras.Variable, "_initialize_with_initializer", _initialize
_patches = Patches(lambda: [_PATCH])
