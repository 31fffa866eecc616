"""Variables with a separate copy on each replica.

A `keras.Variable` with `synchronization="on_read"` has one copy on each
replica. In `run` each replica reads and writes its own copy. Outside of `run`
the variable's value is the aggregate of the copies. All copies are stored as
one array, which is an attribute of the variable. Its dimension 0 has one entry
for each replica.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import keras
import numpy as np

from keras_strategies._types import Array
from keras_strategies.hooks import merge as merge_lib
from keras_strategies.keras_bridge.step_context import StepContext
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.replica_map import as_number, keep_first
from keras_strategies.variables.abstract_variables import (
    creating_layer,
)
from keras_strategies.variables.initial_values import (
    VariableCreator,
)

_MARK = "_ks_on_read"
# The copies, and the value outside of `run` at which they were set.
_COPIES = "_ks_copies"


class Unreadable:
    """The value that a variable without an aggregation has outside of `run`.

    The value has a shape and a dtype, but reading its entries raises a
    ValueError.

    Args:
      variable: The variable.
    """

    def __init__(self, variable: keras.Variable) -> None:
        self.shape = tuple(variable.shape)
        self.dtype = variable.dtype
        self.ndim = len(self.shape)
        self._path = variable.path

    __hash__ = None  # type: ignore[assignment]

    def _raise(self, *args: object, **kwargs: object) -> NoReturn:
        raise ValueError(
            "A variable with a copy on each replica must have an aggregation "
            "so that it can be read outside of `run`. Received: a read of "
            f"{self._path!r}, which has none. Create the variable with "
            'aggregation="sum", "mean" or "only_first_replica", or read its '
            "copies with `strategy.experimental_local_results(variable)`."
        )

    __array__ = __jax_array__ = __float__ = __int__ = __bool__ = _raise
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _raise
    __eq__ = __ne__ = __lt__ = __gt__ = _raise  # type: ignore[assignment]
    astype = item = __getitem__ = __iter__ = _raise


def create(
    mesh: ReplicaMesh, next_creator: VariableCreator, **kwargs: Any
) -> keras.Variable:
    """Creates a variable, with a copy on each replica if it is "on_read".

    Raises:
      ValueError: if `synchronization` is None or "none", which strategies do
        not support.
    """
    mode, name = kwargs.get("synchronization"), kwargs.get("name")
    if mode in (None, "none"):
        raise ValueError(
            "`NONE` variable synchronization mode is not supported in a "
            f"strategy's scope. Received: synchronization={mode!r} for "
            f"variable: {name}. Use 'auto', 'on_write' or 'on_read'."
        )
    variable = next_creator(**kwargs)
    caller = creating_layer()
    variable._ks_users = caller is None
    is_metrics = isinstance(caller, keras.metrics.Metric)
    if variable.synchronization == "on_read" and not is_metrics:
        setattr(variable, _MARK, True)
        create_copies(variable, mesh)
    return variable


def is_on_read(variable: object) -> bool:
    """Returns whether a variable has a separate copy on each replica."""
    return getattr(variable, _MARK, False)


def get_copies(variable: keras.Variable, mesh: ReplicaMesh) -> jax.Array:
    """Returns a variable's copies, one for each replica.

    At first each copy is the initial value. If a value was assigned outside of
    `run`, new copies are made from this value. With aggregation "sum", the
    value is divided into copies that add up to it. Otherwise each copy is the
    assigned value.

    Returns:
      An array of shape (replicas, *shape), with one copy on each device.
    """
    copies, known = getattr(variable, _COPIES, (None, None))
    value = variable._value
    if copies is not None and known is value:
        return copies
    host = np.asarray(value)
    parts = np.broadcast_to(host, (mesh.num_replicas, *host.shape))
    if copies is not None and variable.aggregation == "sum":
        parts = _split_sum(host, mesh.num_replicas)
    return jax.device_put(parts, mesh.split)


def make_copy_shapes(
    variables: Sequence[keras.Variable], mesh: ReplicaMesh
) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of variables' copies, for lowering a program."""
    count = mesh.num_replicas
    return [
        jax.ShapeDtypeStruct((count, *v.shape), v.dtype, sharding=mesh.split)
        for v in variables
    ]


def create_copies(variable: keras.Variable, mesh: ReplicaMesh) -> None:
    """Creates the copies of an "on_read" variable that has no copies yet."""
    # On an abstract mesh, programs are only compiled. So variables stay on the
    # host.
    is_made = variable._value is not None and not mesh.is_abstract
    if is_on_read(variable) and is_made and not hasattr(variable, _COPIES):
        array = get_copies(variable, mesh)
        total = np.asarray(variable._value)
        if variable.aggregation == "sum":
            total = total * np.asarray(mesh.num_replicas, total.dtype)
        set_copies(variable, array, jax.device_put(total, mesh.whole))


def set_copies(
    variable: keras.Variable, array: jax.Array, aggregate: Array
) -> None:
    """Sets a variable's copies, and the variable's value outside of `run`.

    Args:
      variable: The variable.
      array: The copies.
      aggregate: The aggregate of the copies. Not used if the variable has no
        aggregation.
    """
    if variable.aggregation == "none":
        aggregate = Unreadable(variable)
    setattr(variable, _COPIES, (array, aggregate))
    variable._value = aggregate


def plan_aggregate(
    step: StepContext, variable: keras.Variable, copy: Array
) -> merge_lib.Plan:
    """Plans the aggregation of the replicas' copies."""
    number = as_number(copy)
    divisor = step.num_replicas if variable.aggregation == "mean" else 1
    if variable.aggregation in ("only_first_replica", "none"):
        number = keep_first(number, step.axis)
    return merge_lib.Plan(copy, lambda total: total / divisor, number)


def _split_sum(value: np.ndarray, count: int) -> np.ndarray:
    if np.issubdtype(value.dtype, np.integer):
        floor, rest = np.divmod(value, count)
        index = np.arange(count).reshape(count, *[1] * value.ndim)
        return (floor + (index < rest)).astype(value.dtype)
    parts = np.broadcast_to(value / count, (count, *value.shape))
    return parts.astype(value.dtype)
