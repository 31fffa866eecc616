"""The train step of `fit`, as it is planned."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding
from keras import tree

from keras_strategies._core.jaxprs.flops import flops_of
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._types import Array, Batch, Tree
from keras_strategies.keras_bridge.loops.binding import Binding
from keras_strategies.keras_bridge.steps.lower_step import (
    lower_step,
    shape_of,
)
from keras_strategies.keras_bridge.steps.step_functions import step_variables
from keras_strategies.keras_bridge.variables import shardings
from keras_strategies.keras_bridge.variables.abstract_models import abstract
from keras_strategies.planning.compile.call_signatures import is_rematerialized
from keras_strategies.planning.compile.clones import (
    accumulates,
    embeds_tokens,
    has_own_step,
    has_rematerialized,
    rematerialized,
    shorter_clone,
)
from keras_strategies.planning.compile.equal_blocks import find_blocks
from keras_strategies.planning.compile.step import (
    Step,
    shape_bytes,
    variable_bytes,
    with_rows,
)
from keras_strategies.strategy.strategy import Strategy

_FORWARD_AND_BACKWARD = 3
"""Operations of a train step, of one forward pass: the backward pass has a
product for the inputs and one for the weights."""


class FitStep(Step):
    """The train step of `fit`.

    Args:
      model: A model of the strategy.
      strategy: The strategy.
      batch: What a dataset would yield, of shapes.
      steps: Of its program; None: as the model is compiled.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        batch: Batch,
        steps: int | None = None,
    ) -> None:
        self.steps = steps or model.steps_per_execution
        self._batch = jax.tree.map(shape_of, batch)
        self._strategy, self.mesh = strategy, strategy.mesh
        # Layers that are rematerialized in the backward pass.
        self._again: list[keras.layers.Layer] = []
        self._models: dict[int | None, keras.Model] = {None: model}
        self.rows = jax.tree.leaves(self._batch)[0].shape[0]
        parts = keras.utils.unpack_x_y_sample_weight(self._batch)
        self._binding_of(model).build_for_shapes(parts)
        self._length = _length(parts[0])
        self.tokens = _tokens(parts[0]) if embeds_tokens(model) else None
        is_whole = has_own_step(model) or accumulates(model)
        self.blocks = None if is_whole else find_blocks(model)
        layers = None if self.blocks is None else self.blocks.layers
        self.keeps_nothing_else = layers is not None and all(
            map(is_rematerialized, layers)
        )

    def _binding_of(self, model: keras.Model) -> Binding:
        return self._strategy._binding_of("plan", model)

    def _model_of(self, blocks: int | None) -> tuple[keras.Model, Binding]:
        if blocks not in self._models:
            assert self.blocks is not None
            assert blocks is not None
            with self._strategy.scope(), abstract():
                self._models[blocks] = shorter_clone(
                    self._models[None], self.blocks, blocks
                )
        model = self._models[blocks]
        return model, self._binding_of(model)

    def with_remat(self) -> "FitStep | None":
        """See `Step`."""
        layers = None if self.blocks is None else self.blocks.layers
        if layers is None or has_rematerialized(self._models[None]):
            return None
        other = copy.copy(self)
        other._again, other.keeps_nothing_else = layers, True
        return other

    def lower(self, rows: int, blocks: int | None) -> jax.stages.Lowered:
        """See `Step`."""
        with rematerialized(self._again):
            model, binding = self._model_of(blocks)
            return lower_step(
                model,
                self.mesh,
                "train",
                with_rows(self._batch, rows),
                binding.build_for_shapes,
                self.steps,
                binding.replica_scope,
            )

    def model_flops(self, rows: int, blocks: int | None) -> float | None:
        """See `Step`."""
        model, binding = self._model_of(blocks)
        parts = keras.utils.unpack_x_y_sample_weight(
            with_rows(self._batch, rows)
        )
        binding.build_for_shapes(parts)

        def shapes(variables: Iterable[Any]) -> list[Any]:
            return [
                jax.ShapeDtypeStruct(tuple(v.shape), v.dtype) for v in variables
            ]

        def forward(
            weights: Sequence[Array], others: Sequence[Array], x: Tree
        ) -> Tree:
            # As keras-hub's tasks are, a model may be made for inference.
            return model.stateless_call(weights, others, x, training=False)[0]

        jaxpr = jax.make_jaxpr(forward)(
            shapes(model.trainable_variables),
            shapes(model.non_trainable_variables),
            parts[0],
        )
        flops = flops_of(jaxpr.jaxpr) * _FORWARD_AND_BACKWARD
        return flops / len(self.mesh.devices)

    def state_bytes(self) -> Mapping[str, float]:
        """See `Step`."""
        model = self._models[None]
        weights, others, slots, *rest = step_variables(model, "train")
        return {
            "weights": variable_bytes([*weights, *others], self.mesh),
            "slots": variable_bytes(slots, self.mesh),
            "other": sum(variable_bytes(group, self.mesh) for group in rest),
            "gradients": _gradient_bytes(weights, self.mesh),
        }

    def batch_bytes(self, rows: int) -> float:
        """See `Step`."""
        sizes = [
            math.prod(leaf.shape) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(with_rows(self._batch, rows))
        ]
        return sum(sizes) / self.mesh.num_replicas

    def block_bytes(self, rows: int) -> tuple[float, float]:
        """See `Step`.

        At least what it takes, for the backward pass, and gradients that
        replicas divide, which wait for each other. A whole one may be used up
        as soon as it is there.
        """
        blocks = self.blocks
        if blocks is None:
            return 0.0, 0.0
        operation, index = blocks.trunks[0]
        trunk = tree.flatten(operation.output)[index]
        # Of a model for any number of tokens, or of time steps.
        sizes = [self._length if n is None else n for n in trunk.shape[1:]]
        size = math.prod(sizes) * rows / self.mesh.num_replicas
        dtype = jax.dtypes.canonicalize_dtype(trunk.dtype)
        first, second = (
            {
                id(v): v
                for x in segment
                for v in getattr(x, "trainable_variables", ())
            }
            for segment in blocks.segments[:2]
        )
        # Weights that blocks share are not another block's, too.
        weights = [v for key, v in first.items() if key not in second]
        kept = size * dtype.itemsize
        divided = [
            v
            for v in weights
            if self.mesh.axis in _gradient_sharding(v, self.mesh).spec
        ]
        return (
            kept + _gradient_bytes(divided, self.mesh),
            kept + _gradient_bytes(weights, self.mesh),
        )


def _tokens(x: Tree) -> int | None:
    """Tokens of a row, where the inputs are numbers of tokens."""
    for leaf in jax.tree.leaves(x):
        is_whole = jax.numpy.issubdtype(leaf.dtype, jax.numpy.integer)
        if is_whole and len(leaf.shape) == 2:
            return leaf.shape[1]
    return None


def _length(x: Tree) -> int:
    """Entries of a row's first dimension; 1 if there is none."""
    lengths = [s.shape[1] for s in jax.tree.leaves(x) if len(s.shape) > 1]
    return max(lengths, default=1)


def _gradient_bytes(
    weights: Iterable[keras.Variable], mesh: ReplicaMesh
) -> float:
    """Bytes of all gradients, where they are summed."""
    shapes = (
        jax.ShapeDtypeStruct(
            tuple(v.shape), v.dtype, sharding=_gradient_sharding(v, mesh)
        )
        for v in weights
    )
    return sum(map(shape_bytes, shapes), 0.0)


def _gradient_sharding(
    variable: keras.Variable, mesh: ReplicaMesh
) -> NamedSharding:
    """Returns where a weight's gradient lies once it is summed."""
    held = shardings.placement_of(variable)
    if held is None or held.mesh is not mesh:
        return mesh.whole
    return held.of_slots
