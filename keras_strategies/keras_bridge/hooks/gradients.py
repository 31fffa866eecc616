"""Gradients with respect to Keras variables: the tape's counterpart."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras

from keras_strategies._types import Array, Tree
from keras_strategies.keras_bridge.hooks import loss_hooks
from keras_strategies.keras_bridge.hooks.variables_used import (
    InnerScope,
    scopes_ask_outwards,
)
from keras_strategies.keras_bridge.step_context import current_step


def value_and_grad(
    fn: Callable[..., Any],
    variables: Sequence[keras.Variable],
    has_aux: bool = False,
) -> Callable[..., tuple[Any, list[Any]]]:
    """Makes a function that returns the value of `fn` and its gradients.

    What `jax.value_and_grad` is for functions of arrays, for functions that
    use Keras variables; in the place of `tf.GradientTape`. Variables that
    `fn` writes (moving statistics, seeds, metrics) are written.

    Inside of `run` the gradients are the replica's own; `optimizer.apply` or
    `all_reduce` sums them.

    Args:
      fn: Returns a scalar, or with `has_aux` a scalar and anything else.
      variables: The variables to differentiate with respect to.
      has_aux: Whether `fn` returns a pair.

    Returns:
      A function of `fn`'s arguments that returns `(value, gradients)`, where
      value is what `fn` returns and gradients is a list of arrays, one for
      each variable.

    Raises:
      TypeError: something in `variables` is no variable.
      ValueError: there are none, as of a model that is not built.

    Example:
      ```python
      loss, grads = ks.value_and_grad(
          lambda: loss_of(y, model(x, training=True)),
          model.trainable_variables,
      )()
      ```
    """
    variables = list(variables)
    _check_variables(variables)

    def with_gradients(*args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        def call() -> tuple[Array, Any]:
            result = fn(*args, **kwargs)
            return result if has_aux else (result, None)

        value, aux, grads = _differentiate(call, variables)
        return ((value, aux) if has_aux else value), grads

    return with_gradients


def _differentiate(
    call: Callable[[], tuple[Array, Any]], variables: list[keras.Variable]
) -> tuple[Array, Any, list[Any]]:
    """Returns a call's value, what it returns beside, and the gradients."""
    step = current_step()
    traced: list[tuple[InnerScope, list[bool]]] = []

    def pure(values: list[Any]) -> tuple[Array, Any]:
        scope = InnerScope(zip(variables, values, strict=True))
        with scopes_ask_outwards(), scope:
            value, aux = call()
        new = [scope.get_current_value(v) for v in scope.written]
        equal = [step is not None and n in step.notes.equal for n in new]
        traced.append((scope, equal))
        return value, (aux, new, scope.outputs())

    start = [v.value for v in variables]
    differentiated = jax.value_and_grad(pure, has_aux=True)
    (value, (aux, new, losses)), grads = differentiated(start)
    scope, equal = traced[-1]
    scope.hand_out(losses)
    if step is not None:
        value = loss_hooks.mark_loss(step, value)
    outer = scope.original_scope
    for variable, after, is_equal in zip(
        scope.written, new, equal, strict=True
    ):
        if outer is None:
            variable.assign(after)
            continue
        # Not `assign`: what `call` wrote was combined when it wrote it.
        outer.add_update((variable, after))
        if step is not None and is_equal:
            step.notes.equal.add(after)
    return value, aux, grads


def _check_variables(variables: Sequence[object]) -> None:
    if not variables:
        raise ValueError(
            "Gradients are taken with respect to variables. Received: none, "
            "as of a model that has no variables yet. Call it on one batch "
            "first, or begin it with `keras.Input`. `model.build` makes none "
            "for a class that has no `build` of its own."
        )
    for variable in variables:
        if not isinstance(variable, keras.Variable):
            raise TypeError(
                "Gradients are taken with respect to Keras variables. "
                f"Received: {type(variable).__name__} in `variables`. Use "
                "`jax.grad` for arrays."
            )


def grad(
    fn: Callable[..., Any],
    variables: Sequence[keras.Variable],
    has_aux: bool = False,
) -> Callable[..., Any]:
    """As `value_and_grad`, without the value.

    Args:
      fn: Returns a scalar, or with `has_aux` a scalar and anything else.
      variables: The variables to differentiate with respect to.
      has_aux: Whether `fn` returns a pair.

    Returns:
      A function of `fn`'s arguments that returns the gradients, or with
      `has_aux` `(gradients, aux)`.

    Example:
      ```python
      gradients = ks.grad(
          lambda: loss_of(y, model(x, training=True)),
          model.trainable_variables,
      )()
      ```
    """
    both = value_and_grad(fn, variables, has_aux)

    def gradients(*args: Any, **kwargs: Any) -> Tree:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradients
