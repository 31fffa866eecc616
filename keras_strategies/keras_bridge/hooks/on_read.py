"""Variables with a copy of their own on each replica.

A `keras.Variable` with `synchronization="on_read"` is written by each replica
of a `run` on its own; outside it holds the copies, aggregated. The copies are
one array with a dimension of replicas, beside the variable's own value.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import keras
import numpy as np

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.replica_map import as_number, of_first
from keras_strategies._types import Array
from keras_strategies.keras_bridge.hooks import merge as merge_lib
from keras_strategies.keras_bridge.step_context import StepContext
from keras_strategies.keras_bridge.variables.abstract_variables import (
    creating_layer,
)
from keras_strategies.keras_bridge.variables.initial_values import (
    VariableCreator,
)

_MARK = "_ks_on_read"
_COPIES = "_ks_copies"


class Unreadable:
    """The value of a variable whose copies have no aggregation.

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
            "A variable with a copy on each replica and no aggregation has no "
            f"one value. Received: a read of {self._path!r} outside of `run`. "
            'Create it with aggregation="sum", "mean" or '
            '"only_first_replica", or ask for the copies: '
            "`strategy.experimental_local_results(variable)`."
        )

    __array__ = __jax_array__ = __float__ = __int__ = __bool__ = _raise
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _raise
    __eq__ = __ne__ = __lt__ = __gt__ = _raise  # type: ignore[assignment]
    astype = item = __getitem__ = __iter__ = _raise


@dataclasses.dataclass(frozen=True)
class Copies:
    """The copies, and the variable's own value that was made of them."""

    array: jax.Array
    value: Any


def create(
    mesh: ReplicaMesh, next_creator: VariableCreator, **kwargs: Any
) -> keras.Variable:
    """A variable creator: gives those that need it a copy on each replica.

    Raises:
      ValueError: a way of synchronizing that no strategy has.
    """
    mode, name = kwargs.get("synchronization"), kwargs.get("name")
    if mode in (None, "none"):
        raise ValueError(
            "`NONE` variable synchronization mode is not supported in a "
            f"strategy's scope. Received: synchronization={mode!r} for "
            f"variable: {name}. Choose 'auto', 'on_write' or 'on_read'."
        )
    variable = next_creator(**kwargs)
    caller = creating_layer()
    variable._ks_users = caller is None
    is_metrics = isinstance(caller, keras.metrics.Metric)
    if variable.synchronization == "on_read" and not is_metrics:
        setattr(variable, _MARK, True)
        settle(variable, mesh)
    return variable


def is_on_read(variable: object) -> bool:
    """Whether a variable has a copy of its own on each replica."""
    return getattr(variable, _MARK, False)


def copies_of(variable: keras.Variable, mesh: ReplicaMesh) -> jax.Array:
    """The copies: (replicas, *shape), one on each device.

    At first each is the initial value. What was assigned outside of `run`
    since is shared out: with aggregation "sum" in parts that add up to it,
    else as it is.
    """
    held: Copies | None = getattr(variable, _COPIES, None)
    value = variable._value
    if held is not None and held.value is value:
        _check_home(variable, held.array, mesh)
        return held.array
    host = np.asarray(value)
    parts = np.broadcast_to(host, (mesh.num_replicas, *host.shape))
    if held is not None and variable.aggregation == "sum":
        parts = _parts_of_sum(host, mesh.num_replicas)
    return jax.device_put(parts, mesh.split)


def shapes_of_copies(
    variables: Sequence[keras.Variable], mesh: ReplicaMesh
) -> list[jax.ShapeDtypeStruct]:
    """What a program is lowered with in the place of variables' copies."""
    count = mesh.num_replicas
    return [
        jax.ShapeDtypeStruct((count, *v.shape), v.dtype, sharding=mesh.split)
        for v in variables
    ]


def _check_home(
    variable: keras.Variable, array: jax.Array, mesh: ReplicaMesh
) -> None:
    if array.sharding.device_set != set(mesh.devices):
        raise ValueError(
            "A variable with a copy on each replica is used by the strategy "
            f"that made it. Received: {variable.path!r}, whose copies are on "
            f"{array.shape[0]} devices, in `run` of a strategy of "
            f"{mesh.num_replicas} replicas on others. Create it in this "
            "strategy's scope."
        )


def settle(variable: keras.Variable, mesh: ReplicaMesh) -> None:
    """Gives a variable its first copies, where it has none."""
    # Where a slice is only compiled for, variables stay on the host.
    is_made = variable._value is not None and not mesh.is_abstract
    if is_on_read(variable) and is_made and not hasattr(variable, _COPIES):
        array = copies_of(variable, mesh)
        total = np.asarray(variable._value)
        if variable.aggregation == "sum":
            total = total * np.asarray(mesh.num_replicas, total.dtype)
        hold(variable, array, jax.device_put(total, mesh.whole))


def hold(variable: keras.Variable, array: jax.Array, aggregate: Array) -> None:
    """Sets a variable's copies, and what it is outside of `run`.

    Args:
      variable: The variable.
      array: The copies.
      aggregate: The copies, aggregated; not used without an aggregation.
    """
    if variable.aggregation == "none":
        aggregate = Unreadable(variable)
    setattr(variable, _COPIES, Copies(array, aggregate))
    variable._value = aggregate


def plan_aggregate(
    plan: merge_lib.Merge, variable: keras.Variable, copy: Array
) -> Callable[[list[Any]], Any]:
    """Plans the aggregate of a replica's copies; see `merge.plan_merge`."""
    step: StepContext = plan.step
    number = as_number(copy)
    divisor = step.num_replicas if variable.aggregation == "mean" else 1
    if variable.aggregation in ("only_first_replica", "none"):
        number = of_first(number, step.axis)
    place = plan.add(number)
    return lambda sums: merge_lib.as_type_of(sums[place] / divisor, copy)


def _parts_of_sum(value: np.ndarray, count: int) -> np.ndarray:
    if np.issubdtype(value.dtype, np.integer):
        floor, rest = np.divmod(value, count)
        index = np.arange(count).reshape(count, *[1] * value.ndim)
        return (floor + (index < rest)).astype(value.dtype)
    parts = np.broadcast_to(value / count, (count, *value.shape))
    return parts.astype(value.dtype)
