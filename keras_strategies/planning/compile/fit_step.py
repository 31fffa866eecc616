"""The training step of `fit`, which a plan compiles but does not run."""

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

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
    Sharded,
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
        self.tokens = (
            _count_tokens(parts[0])
            if model_flops.embeds_tokens(model)
            else None
        )
        blocks = find_blocks(model)
        self._layers = None
        if blocks is not None and not has_remat_layers(model):
            self._layers = blocks.layers
        self.has_remat = blocks is not None and self._layers is None
        if len(jax.tree.leaves(parts[1])) == 1:
            count = blocked_head.count_logit_bytes(model, parts[1])
            self.logit_bytes = count / self.mesh.num_replicas
        # XLA chooses the dtype of sums in a step over the global batch.
        if self.rows % self.mesh.num_replicas == 0:
            self.narrow_sums = _find_narrow_sums(model, self.mesh)

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


def _find_narrow_sums(model: keras.Model, mesh: ReplicaMesh) -> str:
    """Implements `Step.narrow_sums`."""
    layers = model._flatten_layers()
    if not any(x.compute_dtype == "bfloat16" for x in layers):
        return ""
    weights = [v for v in model.trainable_variables if v.dtype == "float32"]
    specs = [shardings.get_gradient_spec(v, mesh) for v in weights]
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
    placement = shardings.get_placement(variable)
    if placement is None or placement.mesh is not mesh:
        return mesh.whole
    return placement.slot_sharding


def clone_from_config(model: keras.Model) -> keras.Model:
    """Clones a model from its config, and compiles the clone like the model.

    Args:
      model: A model that has a config.

    Returns:
      A model with new variables, which are initialized, not copied.

    Raises:
      ValueError: if the model has no config, or Keras cannot create a model
        from the config.
    """
    try:
        config = model.get_config()
        clone: Any = type(model).from_config(config)
        shape = None if clone.built else model.get_build_config()
        if shape:
            clone.build_from_config(shape)
        _copy_modes(model, clone)
        if model.compiled:
            compile_like(clone, model)
    except Exception as error:
        raise ValueError(
            "A planned model must be a model that Keras can create from its "
            f"config. Received: {model.name!r} of type {type(model).__name__}, "
            f"for which this failed ({type(error).__name__}: {error}). Pass a "
            "function that creates and compiles the model instead."
        ) from error
    return clone


def compile_like(clone: keras.Model, model: keras.Model) -> None:
    """Compiles a clone like the original model, with a new optimizer.

    The clone and the original share losses and metrics.
    """
    arguments = dict(model._compile_config.config)
    optimizer = model.optimizer
    if optimizer is not None:
        config = optimizer.get_config()
        arguments["optimizer"] = type(optimizer).from_config(config)
    arguments["auto_scale_loss"] = False
    clone.compile(**arguments)


def _copy_modes(model: keras.Model, clone: keras.Model) -> None:
    """Copies what is not in configs, such as rematerialization modes."""
    pairs = zip(model._flatten_layers(), clone._flatten_layers(), strict=True)
    for layer, other in pairs:
        other._remat_mode = layer._remat_mode
        blocked_head.copy_head(layer, other)


def has_remat_layers(model: keras.Model) -> bool:
    """Returns whether a layer is rematerialized (by `keras.RematScope`)."""
    return any(map(is_rematerialized, model._flatten_layers()))


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
