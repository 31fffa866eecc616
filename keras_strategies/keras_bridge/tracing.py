"""Looking at a step's trace before it is used, and saying what it showed."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from keras_strategies._core.replica_map import has_unsure_collectives
from keras_strategies._core.step_context import StepContext


class StepsNotFused(Exception):
    """Raised by a trace: the steps are faster one by one.

    XLA computes gradients of convolutions up to twenty times slower inside of
    a loop on CPU (jaxlib 0.10.2).
    """


class Traced:
    """A function that was traced once, to be looked at before it is used.

    Args:
      fn: The function.
      *args: Arguments to trace it with.
    """

    def __init__(self, fn: Callable[..., Any], *args: Any) -> None:
        self.jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        self._structure = jax.tree.structure(shapes)

    def __call__(self, *args: Any) -> Any:
        """Computes the function as it was traced."""
        leaves = jaxpr_as_fun(self.jaxpr)(*jax.tree.leaves(args))
        return jax.tree.unflatten(self._structure, leaves)


def traced_once(step: StepContext, body: Callable[..., Any], *args: Any) -> Any:
    """Traces `body(step, *args)` and looks at it before it is used.

    Raises:
      WholeBatchNeeded: the replicas would communicate in a branch or a loop
        that not all of them need take, and wait for each other for ever.
    """
    traced = Traced(functools.partial(body, step), *args)
    if has_unsure_collectives(traced.jaxpr):
        step.demand_whole(
            "gradients or metrics are reduced over the replicas inside of a "
            "`cond`, `switch` or `while_loop`, which not every replica may "
            "enter. Apply optimizers and update metrics outside of it"
        )
    return traced(*args)


def forget_losses(step: Callable[..., Any]) -> None:
    """Clears what a failed trace left on its model.

    Keras keeps the losses of a call on the model until its `compute_loss` has
    read them, and would read those of the failed trace in the next one.

    Args:
      step: A model's train, test or predict step.
    """
    model = getattr(step, "__self__", None)
    if getattr(model, "_losses_override", None):
        model._losses_override = []  # type: ignore[union-attr]


def warn_of_whole(reason: str) -> None:
    """Warns that a step is not mapped over the replicas, and why."""
    warnings.warn(
        "This step is run over the whole batch instead of replica by "
        f"replica, which is exact and may be slower: {reason}.",
        UserWarning,
        stacklevel=2,
    )


def reason_of(error: Exception) -> str:
    """Why a step is not mapped over the replicas, from a trace's error."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (
        "it cannot be traced with one replica's share of the rows "
        f"({type(error).__name__}: {lines[0] if lines else ''}). Leave the "
        "batch size out of the model's shapes"
    )
