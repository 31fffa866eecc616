"""The training step of `fit`, which a plan compiles but does not run."""

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping

import jax
import keras
from jax.sharding import NamedSharding

from keras_strategies._types import Batch, Tree
from keras_strategies.planning.compile.step import (
    Step,
    count_shape_bytes,
    count_variable_bytes,
    describe_attention,
    with_rows,
)
from keras_strategies.planning.seam import (
    ReplicaMesh,
    Strategy,
    blocked_head,
    collect_reasons,
    find_blocks,
    get_shape,
    is_rematerialized,
    lower_step,
    model_flops,
    shardings,
    step_variables,
    temporary_attribute,
)


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
        self._batch = jax.tree.map(get_shape, batch)
        self.mesh = strategy.mesh
        # Layers that `with_remat` additionally rematerializes.
        self._again: list[keras.layers.Layer] = []
        self._model, self._binding = model, strategy._get_binding("plan", model)
        self.rows = jax.tree.leaves(self._batch)[0].shape[0]
        parts = keras.utils.unpack_x_y_sample_weight(self._batch)
        self._binding.build_for_shapes(parts)
        if model_flops.embeds_tokens(model):
            self.tokens = _count_tokens(parts[0])
        self.has_remat = any(map(is_rematerialized, model._flatten_layers()))
        blocks = None if self.has_remat else find_blocks(model)
        self._layers = None if blocks is None else blocks.layers
        if len(jax.tree.leaves(parts[1])) == 1:
            count = blocked_head.count_logit_bytes(model, parts[1])
            self.logit_bytes = count / self.mesh.num_replicas

    def with_remat(self) -> "FitStep | None":
        """Implements `Step.with_remat`."""
        if self._layers is None:
            return None
        other = copy.copy(self)
        other._again = self._layers
        return other

    def lower(self, rows: int) -> jax.stages.Lowered:
        """Implements `Step.lower`."""
        with rematerialize(self._again), collect_reasons() as reasons:
            lowered = lower_step(
                self._model,
                self.mesh,
                "train",
                with_rows(self._batch, rows),
                self._binding.build_for_shapes,
                self.steps,
                self._binding.replica_scope,
            )
        self.note = describe_attention(reasons)
        return lowered

    def model_flops(self, rows: int) -> float | None:
        """Implements `Step.model_flops`."""
        parts = keras.utils.unpack_x_y_sample_weight(
            with_rows(self._batch, rows)
        )
        self._binding.build_for_shapes(parts)
        flops = model_flops.count_model_flops(self._model, parts[0])
        return None if flops is None else flops / len(self.mesh.devices)

    def list_variables(self) -> Iterable[keras.Variable]:
        """Implements `Step.list_variables`."""
        return itertools.chain(*step_variables(self._model, "train"))

    def state_bytes(self) -> Mapping[str, float]:
        """Implements `Step.state_bytes`."""
        weights, others, slots, *rest = step_variables(self._model, "train")
        slots = [v for v in slots if not shardings.is_on_host(v)]
        return {
            "weights": count_variable_bytes([*weights, *others], self.mesh),
            "slots": count_variable_bytes(slots, self.mesh),
            "other": count_variable_bytes(itertools.chain(*rest), self.mesh),
            "gradients": _count_gradient_bytes(weights, self.mesh),
        }


def _count_tokens(x: Tree) -> int | None:
    """Returns the number of tokens per row, or None if `x` has no token ids."""
    for leaf in jax.tree.leaves(x):
        is_integer = jax.numpy.issubdtype(leaf.dtype, jax.numpy.integer)
        if is_integer and len(leaf.shape) == 2:
            return leaf.shape[1]
    return None


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
    placement = shardings.get_placement(variable)
    if placement is None or placement.mesh is not mesh:
        return mesh.whole
    return placement.slot_sharding


@contextlib.contextmanager
def rematerialize(layers: Iterable[keras.layers.Layer]) -> Iterator[None]:
    """Makes layers rematerialize their activations while the block runs.

    The layers behave as if they had been created in a `keras.RematScope`.
    """
    with keras.RematScope(mode="full"):
        mode = keras.layers.Identity()._remat_mode
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(temporary_attribute(layer, "_remat_mode", mode))
        yield
