"""Steps that are planned: what lowers them, for whatever number of rows."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import jax
import keras
from keras import tree

from keras_strategies._core.jaxprs.flops import flops_of
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.keras_bridge.loops.binding import binding_of
from keras_strategies.keras_bridge.models.call_kinds import (
    is_computed_again,
)
from keras_strategies.keras_bridge.models.equal_blocks import (
    Blocks,
    find_blocks,
)
from keras_strategies.keras_bridge.models.twins import (
    accumulates,
    embeds_tokens,
    has_own_step,
    is_rematerialized,
    rematerialized,
    shorter_twin,
)
from keras_strategies.keras_bridge.steps.lower_step import (
    lower_step,
    shape_of,
)
from keras_strategies.keras_bridge.steps.step_functions import step_variables
from keras_strategies.keras_bridge.variables import shardings

_FORWARD_AND_BACKWARD = 3
"""Operations of a train step, of one forward pass: the backward pass has a
product for the inputs and one for the weights."""


class Step(Protocol):
    """A step that is planned.

    Attributes:
      mesh: The replicas.
      rows: Of the global batch that it was given.
      tokens: Tokens of a row; None: its rows are no sequences of them.
      blocks: Equal blocks of its model, of which fewer can be lowered.
      keeps_nothing_else: Whether `block_bytes` are all that a block adds: it
        is computed again in the backward pass.
      steps: Of its program, as `steps_per_execution` says.
      note: What to know of it once it is lowered, in a sentence; "" for
        nothing.
    """

    mesh: ReplicaMesh
    rows: int
    tokens: int | None
    blocks: Blocks | None
    keeps_nothing_else: bool
    steps: int
    note: str

    def lower(self, rows: int, blocks: int | None) -> Any:
        """Lowers it for a global batch of so many rows, and so many blocks."""
        ...

    def with_remat(self) -> "Step | None":
        """The same with its model's blocks under `keras.RematScope`.

        None: they are, or it has none that are layers.
        """
        ...

    def model_flops(self, rows: int, blocks: int | None) -> float | None:
        """Operations of a device, none of them twice; None: unknown."""
        ...

    def state_bytes(self) -> Mapping[str, float]:
        """Bytes of a device: weights, slots, other and gradients."""
        ...

    def batch_bytes(self, rows: int) -> float:
        """Bytes of a step's batch, on a device."""
        ...

    def block_bytes(self, rows: int) -> tuple[float, float]:
        """Bytes of a device that each block adds at least, in between, and
        with all of its gradients."""
        ...


class FitStep:
    """The train step of `fit`.

    Args:
      model: A model of a strategy.
      mesh: The strategy's replicas.
      builder_of: What builds a model of the strategy, given a batch's shapes.
      making: In which other models of the strategy are made and compiled.
      batch: What a dataset would yield, of shapes.
      steps: Of its program; None: as the model is compiled.
    """

    def __init__(
        self,
        model: keras.Model,
        mesh: ReplicaMesh,
        builder_of: Callable[[keras.Model], Callable[[Any], None]],
        making: Callable[[], contextlib.AbstractContextManager[None]],
        batch: Any,
        steps: int | None = None,
    ) -> None:
        self.steps = steps or model.steps_per_execution
        self._batch = jax.tree.map(shape_of, batch)
        self.mesh = mesh
        self.note = ""
        self._builder_of, self._making = builder_of, making
        # Layers that are computed again in the backward pass.
        self._again: list[keras.layers.Layer] = []
        self._models: dict[int | None, keras.Model] = {None: model}
        self.rows = jax.tree.leaves(self._batch)[0].shape[0]
        parts = keras.utils.unpack_x_y_sample_weight(self._batch)
        builder_of(model)(parts)
        self._length = _length(parts[0])
        self.tokens = _tokens(parts[0]) if embeds_tokens(model) else None
        is_whole = has_own_step(model) or accumulates(model)
        self.blocks = None if is_whole else find_blocks(model)
        layers = None if self.blocks is None else self.blocks.layers
        self.keeps_nothing_else = layers is not None and all(
            map(is_computed_again, layers)
        )

    def _model_of(self, blocks: int | None) -> tuple[keras.Model, Any]:
        if blocks not in self._models:
            assert self.blocks is not None
            assert blocks is not None
            with self._making():
                self._models[blocks] = shorter_twin(
                    self._models[None], self.blocks, blocks
                )
        model = self._models[blocks]
        return model, self._builder_of(model)

    def with_remat(self) -> "FitStep | None":
        """The same with its model's blocks under `keras.RematScope`.

        None: they are, or it has none that are layers.
        """
        layers = None if self.blocks is None else self.blocks.layers
        if layers is None or is_rematerialized(self._models[None]):
            return None
        other = copy.copy(self)
        other._again, other.keeps_nothing_else = layers, True
        return other

    def lower(self, rows: int, blocks: int | None) -> Any:
        """Lowers it for a global batch of so many rows, and so many blocks."""
        with rematerialized(self._again):
            return self._lower(rows, blocks)

    def _lower(self, rows: int, blocks: int | None) -> Any:
        model, build = self._model_of(blocks)
        batch = self._with_rows(rows)
        binding = binding_of(model)
        scope = None if binding is None else binding.replica_scope
        return lower_step(
            model, self.mesh, "train", batch, build, self.steps, scope
        )

    def model_flops(self, rows: int, blocks: int | None) -> float | None:
        """Operations of a device, none of them twice."""
        model, build = self._model_of(blocks)
        parts = keras.utils.unpack_x_y_sample_weight(self._with_rows(rows))
        build(parts)

        def shapes(variables: Iterable[Any]) -> list[Any]:
            return [
                jax.ShapeDtypeStruct(tuple(v.shape), v.dtype) for v in variables
            ]

        def forward(weights: Any, others: Any, x: Any) -> Any:
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
        """Bytes of a device: weights, slots, other and gradients."""
        model = self._models[None]
        weights, others, slots, *rest = step_variables(model, "train")
        return {
            "weights": self._bytes([*weights, *others]),
            "slots": self._bytes(slots),
            "other": self._bytes([v for group in rest for v in group]),
            "gradients": _gradient_bytes(weights, self.mesh),
        }

    def batch_bytes(self, rows: int) -> float:
        """Bytes of a step's batch, on a device."""
        sizes = [
            math.prod(leaf.shape) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(self._with_rows(rows))
        ]
        return sum(sizes) / self.mesh.num_replicas

    def block_bytes(self, rows: int) -> tuple[float, float]:
        """Bytes of a device that each block adds at least, in between, and
        with all of its gradients.

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
        divided = [v for v in weights if _is_divided(v, self.mesh)]
        return (
            kept + _gradient_bytes(divided, self.mesh),
            kept + _gradient_bytes(weights, self.mesh),
        )

    def _bytes(self, variables: Iterable[keras.Variable]) -> float:
        return sum(
            map(_bytes_on_device, shardings.shapes_of(variables, self.mesh))
        )

    def _with_rows(self, rows: int) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                (rows, *leaf.shape[1:]), leaf.dtype
            ),
            self._batch,
        )


def _tokens(x: Any) -> int | None:
    """Tokens of a row, where the inputs are numbers of tokens."""
    for leaf in jax.tree.leaves(x):
        is_whole = jax.numpy.issubdtype(leaf.dtype, jax.numpy.integer)
        if is_whole and len(leaf.shape) == 2:
            return leaf.shape[1]
    return None


def _length(x: Any) -> int:
    """Entries of a row's first dimension; 1 if there is none."""
    lengths = [s.shape[1] for s in jax.tree.leaves(x) if len(s.shape) > 1]
    return max(lengths, default=1)


def _bytes_on_device(shape: jax.ShapeDtypeStruct) -> float:
    sharding: Any = shape.sharding
    dtype = jax.dtypes.canonicalize_dtype(shape.dtype)
    return math.prod(sharding.shard_shape(shape.shape)) * dtype.itemsize


def _gradient_bytes(
    weights: Iterable[keras.Variable], mesh: ReplicaMesh
) -> float:
    """Bytes of all gradients, where they are summed."""
    total = 0.0
    for variable in weights:
        held = shardings.placement_of(variable)
        is_held = held is not None and held.mesh is mesh
        sharding = held.of_slots if held is not None and is_held else mesh.whole
        shape = jax.ShapeDtypeStruct(
            tuple(variable.shape), variable.dtype, sharding=sharding
        )
        total += _bytes_on_device(shape)
    return total


def _is_divided(variable: keras.Variable, mesh: ReplicaMesh) -> bool:
    """Whether replicas divide a weight's gradient."""
    held = shardings.placement_of(variable)
    if held is None or held.mesh is not mesh:
        return False
    return mesh.axis in held.of_slots.spec
