"""Changes to losses, optimizers and variables while a step is traced.

While a step is traced, and only in the tracing thread:
- the outermost optimizer first reduces the gradients over the replicas
  (optimizer_hooks.py);
- losses use the denominators of the global batch, and losses whose value for
  one row depends on other rows receive the rows of all replicas
  (loss_hooks.py);
- each metric is updated by the rule that is chosen for it (metric_hooks.py);
- derivatives that user code computes are marked (gradients.py).

The hooks wrap methods of classes rather than of instances, so that they affect
every optimizer, loss and metric of a model and leave no attributes on them.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
from keras.src.backend.common.variables import Variable as KerasVariable
from keras.src.losses import loss as loss_module
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.compile_utils import CompileMetrics, MetricsList

from keras_strategies.hooks import (
    batch_norm,
    gradients,
    loss_hooks,
    metric_hooks,
    optimizer_hooks,
    seeds,
    variable_writes,
)
from keras_strategies.keras_bridge.patches import Patch, Patches
from keras_strategies.keras_bridge.step_context import current_step

_OF_LOSSES = {"__call__": loss_hooks.call_loss}
_OF_MODELS = {"compute_loss": loss_hooks.compute_loss}
_OF_OPTIMIZERS = {
    "apply": optimizer_hooks.apply,
    "stateless_apply": optimizer_hooks.stateless_apply,
    "scale_loss": optimizer_hooks.scale_loss,
}
_OF_METRICS = {
    "update_state": metric_hooks.update_state,
    "reset_state": metric_hooks.reset_state,
    "result": metric_hooks.result,
}
_METRIC_LISTS = (CompileMetrics, MetricsList)


def trace_hooks() -> contextlib.AbstractContextManager[None]:
    """Installs the hooks while the block, which traces a step, runs."""
    return _patches.hold()


def _find_patches() -> Iterator[Patch]:
    yield loss_module, "reduce_values", _make_hook(loss_hooks.reduce_values)
    yield loss_module, "apply_mask", _make_hook(loss_hooks.apply_mask)
    yield from _patch_classes(keras.losses.Loss, _OF_LOSSES)
    yield from _patch_classes(keras.Model, _OF_MODELS)
    normalization = keras.layers.BatchNormalization
    yield normalization, "call", _make_hook(batch_norm.call_layer)
    yield normalization, "_moments", _make_hook(batch_norm.find_moments)
    yield from _patch_classes(BaseOptimizer, _OF_OPTIMIZERS, "in_optimizer")
    yield from _patch_classes(keras.metrics.Metric, _OF_METRICS)
    for cls in _METRIC_LISTS:
        yield cls, "update_state", _make_hook(metric_hooks.update_compiled)
    yield keras.random.SeedGenerator, "next", _make_hook(seeds.next_seed)
    for cls in (jax.custom_jvp, jax.custom_vjp):
        yield cls, "__call__", _make_hook(gradients.call_with_derivative)
    for name in ("assign", "assign_add", "assign_sub"):
        hook = _make_hook(variable_writes.assign, "in_optimizer")
        yield KerasVariable, name, hook


def _patch_classes(
    base: type, hooks: dict[str, Callable[..., Any]], inside: str = ""
) -> Iterator[Patch]:
    """Yields the patches of a class, of its bases and of its subclasses."""
    for cls in dict.fromkeys((*base.__mro__, *_find_classes(base))):
        for name in [n for n in hooks if n in vars(cls)]:
            if not issubclass(cls, _METRIC_LISTS):
                yield cls, name, _make_hook(hooks[name], inside)


def _make_hook(
    wrapper: Callable[..., Any], inside: str = ""
) -> Callable[..., Any]:
    """Makes a patch that calls `wrapper(step, original, ...)`.

    Args:
      wrapper: The hook.
      inside: A flag of the step, or "". If no step is being traced, or while
        the flag is set, the patch calls only the original method.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call_hooked(*args: Any, **kwargs: Any) -> Any:
            step = current_step()
            if step is None or (inside and getattr(step.flags, inside)):
                return original(*args, **kwargs)
            return wrapper(step, original, *args, **kwargs)

        return call_hooked

    return wrap


def _find_classes(base: type) -> list[type]:
    classes = {base: None}
    for cls in base.__subclasses__():
        classes |= dict.fromkeys(_find_classes(cls))
    return list(classes)


_patches = Patches(_find_patches)
