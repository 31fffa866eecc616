"""The step of a custom training loop: a call of `strategy.run` to plan."""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import keras
import numpy as np

from keras_strategies.planning.compile.step import (
    Step,
    count_variable_bytes,
    describe_attention,
)
from keras_strategies.planning.seam import (
    Runner,
    collect_reasons,
    shardings,
    values,
)


class RunStep(Step):
    """A step that consists of one call of `strategy.run`.

    Args:
      runner: The callable that implements `strategy.run`.
      fn: The function that was passed to `run`.
      args: The function's arguments, where distributed batches are replaced by
        shapes.
      kwargs: The function's keyword arguments.
    """

    def __init__(
        self,
        runner: Runner,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._runner, self._fn = runner, fn
        self.mesh = runner._mesh
        self._given = jax.tree.map(
            _wrap_array, (tuple(args), dict(kwargs)), is_leaf=_is_leaf
        )
        leaves = jax.tree.leaves(self._given, is_leaf=_is_leaf)
        batches = [leaf for leaf in leaves if _is_rows(leaf)]
        shapes = [x.arrays[0].shape[1:] for x in leaves if _is_of_rows(x)]
        replicas = self.mesh.num_replicas
        # The number of rows per replica, if it was guessed from the shapes of
        # per-replica values because no argument is a distributed batch;
        # otherwise 0.
        self._own_rows = 0 if batches else _guess_rows(shapes)
        if batches:
            self.rows = max(leaf.arrays[0].shape[0] for leaf in batches)
        elif self._own_rows:
            self.rows = self._own_rows * replicas
        else:
            self.rows = replicas

    def lower(self, rows: int) -> jax.stages.Lowered:
        """Implements `Step.lower`."""
        if rows != self.rows and self._own_rows:
            try:
                return self._lower(rows)
            except Exception:
                # The guess was wrong. The arrays are not a batch, so the number
                # of rows cannot be changed.
                rows = self.rows
        return self._lower(rows)

    def _lower(self, rows: int) -> jax.stages.Lowered:
        replicas = self.mesh.num_replicas

        def scale(leaf: object) -> object:
            if _is_rows(leaf):
                dim = 0
            elif self._own_rows and _is_of_rows(leaf, self._own_rows):
                dim = 1
            else:
                return leaf
            array = leaf.arrays[0]
            shape = list(array.shape)
            number = -(-shape[dim] * rows // self.rows)
            if dim == 0:
                # Rounded up to a multiple of the number of replicas.
                number = -(-number // replicas) * replicas
            shape[dim] = number
            array = jax.ShapeDtypeStruct(
                tuple(shape), array.dtype, sharding=array.sharding
            )
            return values.PerReplica.of(array, leaf.layout)

        args, kwargs = jax.tree.map(scale, self._given, is_leaf=_is_leaf)
        with collect_reasons() as reasons:
            lowered, written = self._runner.lower(self._fn, args, kwargs)
        notes = [describe_attention(reasons)]
        trained = self._list_trained()
        if trained and not {id(v) for v in written} & set(map(id, trained)):
            name = getattr(self._fn, "__name__", "a function")
            notes.append(
                f"The script's first `run` calls {name!r}, which does not "
                "write a trainable variable. The plan is for that call, which "
                "is not a training step."
            )
        self.note = " ".join(filter(None, notes))
        return lowered

    def state_bytes(self) -> Mapping[str, float]:
        """Implements `Step.state_bytes`.

        Counts all variables that were created in the strategy's scope. A
        non-trainable variable with the shape of a trainable variable is counted
        as an optimizer slot.
        """
        shapes = {tuple(v.shape) for v in self._list_trained()}
        groups: dict[str, list[keras.Variable]] = {
            name: [] for name in ("weights", "slots", "other")
        }
        for variable in self.list_variables():
            if variable.shape is None or shardings.is_on_host(variable):
                continue
            is_slot = math.prod(variable.shape) > 1 and (
                tuple(variable.shape) in shapes
            )
            kind = "slots" if is_slot else "other"
            groups["weights" if variable.trainable else kind].append(variable)
        sizes = {
            k: count_variable_bytes(v, self.mesh) for k, v in groups.items()
        }
        return sizes | {"gradients": sizes["weights"]}

    def list_variables(self) -> list[keras.Variable]:
        """Implements `Step.list_variables`."""
        return list(self._runner._strategy._runtime.registry)

    def _list_trained(self) -> list[keras.Variable]:
        return [v for v in self.list_variables() if v.trainable]


def _is_leaf(leaf: object) -> bool:
    return leaf is None or values.is_distributed(leaf)


def _is_rows(leaf: object) -> TypeGuard[values.PerReplica]:
    return isinstance(leaf, values.PerReplica) and leaf.layout == values.ROWS


def _is_of_rows(
    leaf: object, rows: int | None = None
) -> TypeGuard[values.PerReplica]:
    """Returns whether a per-replica value has `rows` rows on each replica."""
    if not isinstance(leaf, values.PerReplica):
        return False
    shape = leaf.arrays[0].shape
    if leaf.layout != values.STACKED or len(shape) < 2:
        return False
    return rows is None or shape[1] == rows


def _wrap_array(leaf: object) -> object:
    """Converts arrays to replicated values; returns other values unchanged."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return values.Mirrored(leaf)
    return leaf


def _guess_rows(shapes: Sequence[tuple[int, ...]]) -> int:
    """Guesses a batch's number of rows from shapes of per-replica values.

    Returns:
      The first dimension of one of the arrays that have at least two
      dimensions, or 0 without such arrays. If these dimensions differ, the one
      that most arrays have in common is chosen, and in a tie that of the
      largest array.
    """
    counts = collections.Counter(shape[0] for shape in shapes)
    matrices = [shape for shape in shapes if len(shape) > 1]
    if not matrices:
        return 0
    return max(matrices, key=lambda s: (counts[s[0]], math.prod(s)))[0]
