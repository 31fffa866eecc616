"""A step of a loop of one's own, as `run` is given it."""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import keras
import numpy as np

from keras_strategies._core import values
from keras_strategies.planning.compile.step import Step, variable_bytes
from keras_strategies.strategy.runner import Runner


class RunStep(Step):
    """The program of a call of `run`.

    Args:
      runner: The strategy's runner.
      fn: The function.
      args: Its arguments; of distributed batches what stands for them.
      kwargs: Its keyword arguments.
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
            _as_passed, (tuple(args), dict(kwargs)), is_leaf=_is_leaf
        )
        leaves = jax.tree.leaves(self._given, is_leaf=_is_leaf)
        batches = [leaf for leaf in leaves if _is_rows(leaf)]
        own = [leaf.arrays[0].shape[1:] for leaf in leaves if _is_of_rows(leaf)]
        replicas = self.mesh.num_replicas
        self._own_rows = 0 if batches else _shared_rows(own)
        if batches:
            self.rows = max(leaf.arrays[0].shape[0] for leaf in batches)
        elif self._own_rows:
            self.rows = self._own_rows * replicas
        else:
            self.rows = replicas

    def lower(self, rows: int, blocks: int | None) -> jax.stages.Lowered:
        """See `Step`; it has no blocks."""
        if rows != self.rows and self._own_rows:
            try:
                return self._lower(rows)
            except Exception:
                # They were no batch: the step is what it is.
                rows = self.rows
        return self._lower(rows)

    def _lower(self, rows: int) -> jax.stages.Lowered:
        replicas = self.mesh.num_replicas

        def scaled(leaf: object) -> object:
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
                # All replicas share it evenly.
                number = -(-number // replicas) * replicas
            shape[dim] = number
            array = jax.ShapeDtypeStruct(
                tuple(shape), array.dtype, sharding=array.sharding
            )
            return values.PerReplica.of(array, leaf.layout)

        args, kwargs = jax.tree.map(scaled, self._given, is_leaf=_is_leaf)
        lowered, written = self._runner.lowered(self._fn, args, kwargs)
        trained = self._trained()
        if trained and not {id(v) for v in written} & set(map(id, trained)):
            name = getattr(self._fn, "__name__", "a function")
            self.note = (
                f"The script's first `run` calls {name!r}, which writes none "
                "of the variables that are trained: it was planned, and not a "
                "training step."
            )
        return lowered

    def state_bytes(self) -> Mapping[str, float]:
        """See `Step`; of all variables of the strategy's scope.

        Those that are not trained and have a trained one's shape count as
        slots.
        """
        shapes = {tuple(v.shape) for v in self._trained()}
        groups: dict[str, list[keras.Variable]] = {
            name: [] for name in ("weights", "slots", "other")
        }
        for variable in self._variables():
            if variable.shape is None:
                continue
            is_slot = math.prod(variable.shape) > 1 and (
                tuple(variable.shape) in shapes
            )
            kind = "slots" if is_slot else "other"
            groups["weights" if variable.trainable else kind].append(variable)
        found = {k: variable_bytes(v, self.mesh) for k, v in groups.items()}
        return found | {"gradients": found["weights"]}

    def _variables(self) -> list[keras.Variable]:
        return list(self._runner._strategy._runtime.registry)

    def _trained(self) -> list[keras.Variable]:
        return [v for v in self._variables() if v.trainable]


def _is_leaf(leaf: object) -> bool:
    return leaf is None or values.is_distributed(leaf)


def _is_rows(leaf: object) -> TypeGuard[values.PerReplica]:
    return isinstance(leaf, values.PerReplica) and leaf.layout == values.ROWS


def _is_of_rows(
    leaf: object, rows: int | None = None
) -> TypeGuard[values.PerReplica]:
    """Whether each replica has its own array, of so many rows."""
    if not isinstance(leaf, values.PerReplica):
        return False
    shape = leaf.arrays[0].shape
    if leaf.layout != values.STACKED or len(shape) < 2:
        return False
    return rows is None or shape[1] == rows


def _as_passed(leaf: object) -> object:
    """An argument as a program is lowered with it: arrays are passed whole."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return values.Mirrored(leaf)
    return leaf


def _shared_rows(shapes: Sequence[tuple[int, ...]]) -> int:
    """The rows of what may be a batch, of values that a function made.

    It is the first dimension that most arrays have, and of as many the largest
    one's; 0: none has rows of several entries.
    """
    counts = collections.Counter(shape[0] for shape in shapes)
    matrices = [shape for shape in shapes if len(shape) > 1]
    if not matrices:
        return 0
    return max(matrices, key=lambda s: (counts[s[0]], math.prod(s)))[0]
