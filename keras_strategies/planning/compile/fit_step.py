"""The training step of `fit`, which a plan compiles but does not run."""

import copy
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding
from keras import tree

from keras_strategies._types import Array, Batch, Tree
from keras_strategies.fit.binding import Binding
from keras_strategies.kernels.attention import collect_reasons
from keras_strategies.kernels.call_signatures import (
    is_rematerialized,
)
from keras_strategies.kernels.equal_blocks import find_blocks
from keras_strategies.kernels.scanned_blocks import are_scanned
from keras_strategies.passes.flops import count_training_flops
from keras_strategies.passes.specs import Sharded
from keras_strategies.planning.compile.clones import (
    accumulates_gradients,
    embeds_tokens,
    has_own_step,
    has_remat_layers,
    make_shorter_clone,
    rematerialize,
)
from keras_strategies.planning.compile.step import (
    Step,
    count_shape_bytes,
    count_variable_bytes,
    describe_attention,
    with_rows,
)
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.step.lower_step import (
    lower_step,
    shape_of,
)
from keras_strategies.step.step_functions import step_variables
from keras_strategies.strategy.strategy import Strategy
from keras_strategies.variables import shardings
from keras_strategies.variables.abstract_models import abstract


class FitStep(Step):
    """The training step of `fit`, for any number of rows.

    Args:
      model: A model that was created in the strategy's scope.
      strategy: The strategy.
      batch: A batch of arrays or shapes, in the structure that a dataset for
        `fit` yields.
      steps: The number of training steps in the program. None for the model's
        `steps_per_execution`.
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
        # Layers that `with_remat` additionally rematerializes.
        self._again: list[keras.layers.Layer] = []
        self._models: dict[int | None, keras.Model] = {None: model}
        self.rows = jax.tree.leaves(self._batch)[0].shape[0]
        parts = keras.utils.unpack_x_y_sample_weight(self._batch)
        self._get_binding(model).build_for_shapes(parts)
        self._length = _length(parts[0])
        self.tokens = _count_tokens(parts[0]) if embeds_tokens(model) else None
        is_whole = has_own_step(model) or accumulates_gradients(model)
        blocks = None if is_whole else find_blocks(model)
        # A loop compiles quickly with all blocks.
        is_loop = blocks is not None and are_scanned(blocks)
        self.blocks = None if is_loop else blocks
        self._layers = None if blocks is None else blocks.layers
        # XLA chooses the dtype of sums in a step over the global batch.
        if self.rows % self.mesh.num_replicas == 0:
            self.narrow_sums = _find_narrow_sums(model, self.mesh)
        self.keeps_nothing_else = self._layers is not None and all(
            map(is_rematerialized, self._layers)
        )

    def _get_binding(self, model: keras.Model) -> Binding:
        return self._strategy._get_binding("plan", model)

    def _get_model(self, blocks: int | None) -> tuple[keras.Model, Binding]:
        if blocks not in self._models:
            assert self.blocks is not None
            assert blocks is not None
            with self._strategy.scope(), abstract():
                self._models[blocks] = make_shorter_clone(
                    self._models[None], self.blocks, blocks
                )
        model = self._models[blocks]
        return model, self._get_binding(model)

    def with_remat(self) -> "FitStep | None":
        """Implements `Step.with_remat`."""
        layers = self._layers
        if layers is None or has_remat_layers(self._models[None]):
            return None
        other = copy.copy(self)
        other._again, other.keeps_nothing_else = layers, True
        return other

    def lower(self, rows: int, blocks: int | None) -> jax.stages.Lowered:
        """Implements `Step.lower`."""
        with rematerialize(self._again), collect_reasons() as reasons:
            model, binding = self._get_model(blocks)
            lowered = lower_step(
                model,
                self.mesh,
                "train",
                with_rows(self._batch, rows),
                binding.build_for_shapes,
                self.steps,
                binding.replica_scope,
            )
        self.note = describe_attention(reasons)
        return lowered

    def model_flops(self, rows: int, blocks: int | None) -> float | None:
        """Implements `Step.model_flops`."""
        model, binding = self._get_model(blocks)
        parts = keras.utils.unpack_x_y_sample_weight(
            with_rows(self._batch, rows)
        )
        binding.build_for_shapes(parts)

        flops = count_model_flops(model, parts[0])
        return None if flops is None else flops / len(self.mesh.devices)

    def state_bytes(self) -> Mapping[str, float]:
        """Implements `Step.state_bytes`."""
        model = self._models[None]
        weights, others, slots, *rest = step_variables(model, "train")
        return {
            "weights": count_variable_bytes([*weights, *others], self.mesh),
            "slots": count_variable_bytes(slots, self.mesh),
            "other": sum(
                count_variable_bytes(group, self.mesh) for group in rest
            ),
            "gradients": _count_gradient_bytes(weights, self.mesh),
        }

    def block_bytes(self, rows: int) -> tuple[float, float]:
        """Implements `Step.block_bytes`.

        The lower bound consists of the block's input, which is stored for the
        backward pass, and of the block's sharded gradients, which are all
        reduced before any of them is used. It does not include unsharded
        gradients, because each of them may be used, and freed, as soon as it is
        computed.
        """
        blocks = self.blocks
        if blocks is None:
            return 0.0, 0.0
        operation, index = blocks.trunks[0]
        trunk = tree.flatten(operation.output)[index]
        # A dimension is None if the model accepts any number of tokens or time
        # steps.
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
        # Weights that blocks share are not counted, because their size does not
        # grow with the number of blocks.
        weights = [v for key, v in first.items() if key not in second]
        kept = size * dtype.itemsize
        sharded = [
            v
            for v in weights
            if self.mesh.axis in _find_gradient_sharding(v, self.mesh).spec
        ]
        return (
            kept + _count_gradient_bytes(sharded, self.mesh),
            kept + _count_gradient_bytes(weights, self.mesh),
        )


def count_model_flops(model: keras.Model, x: Tree) -> float | None:
    """Counts the operations of a model and of its gradients, on all devices.

    Args:
      model: A built model.
      x: The inputs of a batch, as arrays or shapes.

    Returns:
      The number of multiplications and additions, or None if the model cannot
      be called with the inputs alone or its `call` has no gradients. Its train
      step does not use its `call` then.
    """

    def shapes(variables: Iterable[Any]) -> list[Any]:
        return [
            jax.ShapeDtypeStruct(tuple(v.shape), v.dtype) for v in variables
        ]

    def forward(
        weights: Sequence[Array], others: Sequence[Array], x: Tree
    ) -> Tree:
        # `training` is False, because some models can only be called for
        # inference, such as keras-hub's tasks.
        takes_mode = "training" in inspect.signature(model.call).parameters
        mode = {"training": False} if takes_mode else {}
        return model.stateless_call(weights, others, x, **mode)[0]

    try:
        return count_training_flops(
            forward,
            shapes(model.trainable_variables),
            shapes(model.non_trainable_variables),
            x,
        )
    except Exception:
        # `call` is the user's code.
        return None


def _count_tokens(x: Tree) -> int | None:
    """Returns the number of tokens per row, or None if `x` has no token ids."""
    for leaf in jax.tree.leaves(x):
        is_integer = jax.numpy.issubdtype(leaf.dtype, jax.numpy.integer)
        if is_integer and len(leaf.shape) == 2:
            return leaf.shape[1]
    return None


def _length(x: Tree) -> int:
    """Returns the inputs' largest second dimension; 1 if all have one only."""
    lengths = [s.shape[1] for s in jax.tree.leaves(x) if len(s.shape) > 1]
    return max(lengths, default=1)


def _find_narrow_sums(model: keras.Model, mesh: ReplicaMesh) -> str:
    """Implements `Step.narrow_sums`."""
    layers = model._flatten_layers()
    if not any(x.compute_dtype == "bfloat16" for x in layers):
        return ""
    weights = [v for v in model.trainable_variables if v.dtype == "float32"]
    specs = [shardings.gradient_spec_of(v, mesh) for v in weights]
    sharded = [s for s in specs if isinstance(s, Sharded)]
    if not sharded:
        is_sent = bool(weights) and mesh.num_replicas > 1
        is_wide = is_sent and not mesh.reduce_dtype
        return 'Replicated("bfloat16")' if is_wide else ""
    if all(s.sum_dtype for s in sharded):
        return ""
    has_shards = shardings.any_sharded(weights, mesh)
    name = "FullySharded" if has_shards else "SlotsOnly"
    return f'{name}(reduce_dtype="bfloat16")'


def _count_gradient_bytes(
    weights: Iterable[keras.Variable], mesh: ReplicaMesh
) -> float:
    """Returns the bytes of the weights' reduced gradients on one device."""
    shapes = (
        jax.ShapeDtypeStruct(
            tuple(v.shape), v.dtype, sharding=_find_gradient_sharding(v, mesh)
        )
        for v in weights
    )
    return sum(map(count_shape_bytes, shapes), 0.0)


def _find_gradient_sharding(
    variable: keras.Variable, mesh: ReplicaMesh
) -> NamedSharding:
    """Returns the sharding of a weight's reduced gradient."""
    placement = shardings.placement_of(variable)
    if placement is None or placement.mesh is not mesh:
        return mesh.whole
    return placement.of_slots
