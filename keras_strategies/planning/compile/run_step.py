"""The step of a custom training loop: a call of `strategy.run` to plan."""

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
        rows = [x.arrays[0].shape[0] for x in leaves if _is_rows(x)]
        self.rows = max(rows, default=self.mesh.num_replicas)

    def lower(self, rows: int) -> jax.stages.Lowered:
        """Implements `Step.lower`."""
        replicas = self.mesh.num_replicas

        def scale(leaf: object) -> object:
            if not _is_rows(leaf):
                return leaf
            array = leaf.arrays[0]
            number = -(-array.shape[0] * rows // self.rows)
            # Rounded up to a multiple of the number of replicas.
            shape = -(-number // replicas) * replicas, *array.shape[1:]
            return values.PerReplica.of(array.update(shape=shape), leaf.layout)

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


def _wrap_array(leaf: object) -> object:
    """Converts arrays to replicated values; returns other values unchanged."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return values.Mirrored(leaf)
    return leaf
