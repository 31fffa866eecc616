"""Gradients with respect to Keras variables, and those of one replica."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer

from keras_strategies._types import Array, Tree
from keras_strategies.hooks import loss_hooks
from keras_strategies.hooks.variables_used import (
    InnerScope,
    chain_scopes,
)
from keras_strategies.keras_bridge.step_context import StepContext, current_step
from keras_strategies.passes import traces
from keras_strategies.passes.row_kinds import marks
from keras_strategies.spmd.identity import IdentityMap, IdentitySet


def value_and_grad(
    fn: Callable[..., Any],
    variables: Tree,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Makes a function that returns the value of `fn` and its gradients.

    It is like `jax.value_and_grad`, but for functions that use Keras variables.
    Use it instead of `tf.GradientTape`. Variables that `fn` writes (moving
    statistics, seeds, metrics) are updated.

    Inside `run` each replica gets the gradients of its own rows. They are
    summed over the replicas by `optimizer.apply` or by `all_reduce`.

    Args:
      fn: A function that returns a scalar, or with `has_aux` a pair of a
        scalar and anything else.
      variables: The variables to differentiate with respect to: a variable, or
        a nest of variables.
      has_aux: Whether `fn` returns a pair.

    Returns:
      A function with the same arguments as `fn` that returns
      `(value, gradients)`. `value` is the result of `fn` (a pair with
      `has_aux`), and `gradients` has the structure of `variables`, with an
      array in place of each variable.

    Raises:
      TypeError: if an element of `variables` is not a Keras variable. When the
        returned function is called: if `fn` does not return what `has_aux`
        requires.
      ValueError: if `variables` is empty, for example because the model is
        not built yet.

    Example:
      ```python
      loss, grads = ks.value_and_grad(
          lambda: loss_of(y, model(x, training=True)),
          model.trainable_variables,
      )()
      ```
    """
    is_nest = isinstance(variables, list | tuple | Mapping)
    if not is_nest and isinstance(variables, Iterable):
        # An iterator can be read only once.
        variables = list(variables)
    flat = keras.tree.flatten(variables)
    _check_variables(flat)
    unique = list(IdentitySet(flat))

    def with_gradients(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        def call() -> tuple[Array, Any]:
            return _check_result(fn(*args, **kwargs), has_aux)

        value, aux, grads = _differentiate(call, unique)
        found = IdentityMap(zip(unique, grads, strict=True))
        nest = keras.tree.pack_sequence_as(variables, [found[v] for v in flat])
        return ((value, aux) if has_aux else value), nest

    return with_gradients


def _differentiate(
    call: Callable[[], tuple[Array, Any]], variables: list[keras.Variable]
) -> tuple[Array, Any, list[Any]]:
    """Returns the value of a call, its auxiliary result, and the gradients."""
    step = current_step()
    traced: list[tuple[InnerScope, list[bool]]] = []

    def pure(values: list[Any]) -> tuple[Array, Any]:
        scope = InnerScope(zip(variables, values, strict=True))
        with chain_scopes(), scope:
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
        # `assign` would combine the replicas' values a second time.
        outer.add_update((variable, after))
        if step is not None and is_equal:
            step.notes.equal.add(after)
    return value, aux, grads


def _check_result(result: Tree, has_aux: bool) -> tuple[Array, Any]:
    """Returns the scalar that a function computed, and its other result.

    Raises:
      TypeError: if the function did not return them.
    """
    if has_aux and not (isinstance(result, list | tuple) and len(result) == 2):
        raise TypeError(
            "With `has_aux=True`, a function to be differentiated must return "
            f"a pair of a scalar and anything else. Received: {_show(result)}. "
            "Return `(loss, aux)`, or omit `has_aux`."
        )
    value, aux = result if has_aux else (result, None)
    is_number = isinstance(value, float | np.ndarray | np.generic | jax.Array)
    is_scalar = is_number and not np.shape(value)
    if is_scalar and jnp.issubdtype(jnp.result_type(value), jnp.floating):
        return value, aux
    fix = "Return a scalar array of a floating dtype."
    if value is None:
        fix = "Add `return loss` to the function."
    elif isinstance(value, list | tuple):
        fix = "Pass `has_aux=True` to return `(loss, aux)`."
    elif is_number and np.shape(value):
        fix = (
            "Reduce it with `keras.ops.mean`, or with "
            "`ks.compute_average_loss` in a function given to `run`."
        )
    raise TypeError(
        "A function to be differentiated must return a scalar, the loss. "
        f"Received: {_show(value)}. {fix}"
    )


def _show(value: Tree) -> str:
    """Describes a function's result, whose arrays may have no values."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of shape {tuple(value.shape)} and {value.dtype}"
    is_nest = isinstance(value, list | tuple)
    of = f" with {len(value)} entries" if is_nest else ""
    return f"an object of type {type(value).__name__}{of}"


def _check_variables(variables: Sequence[object]) -> None:
    if not variables:
        raise ValueError(
            "`variables` must contain at least one variable, but is empty. If "
            "the model is not built yet, call it on one batch "
            "first, or start it with a `keras.Input`. `model.build(shape)` "
            "creates no variables if the model's class does not define `build`."
        )
    for variable in variables:
        if not isinstance(variable, keras.Variable):
            raise TypeError(
                "`variables` must contain only Keras variables. Received: an "
                f"object of type {type(variable).__name__}. To differentiate "
                "with respect to arrays, use `jax.grad`."
            )


def grad(
    fn: Callable[..., Any],
    variables: Tree,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Makes a function that returns the gradients of `fn`.

    It is like `value_and_grad`, but the value of `fn` is not returned.

    Args:
      fn: A function that returns a scalar, or with `has_aux` a pair of a
        scalar and anything else.
      variables: See `value_and_grad`.
      has_aux: Whether `fn` returns a pair.

    Returns:
      A function with the same arguments as `fn` that returns the gradients, or
      `(gradients, aux)` if `has_aux` is true.

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


def call_with_derivative(
    step: StepContext,
    original: Callable[..., Any],
    function: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Marks the arguments of a function whose derivative user code computes.

    It is a function of `jax.custom_jvp` or `jax.custom_vjp`.
    """
    del step
    names = ("fun", "jvp", "fwd", "bwd")
    parts = [getattr(function, name, None) for name in names]
    # `jax.custom_gradient` and `defjvps` wrap functions of the user.
    parts = [inner for part in parts for inner in (part, *_list_captured(part))]
    if any(map(traces.is_user_function, filter(inspect.isfunction, parts))):
        args, kwargs = jax.tree.map(_mark, (args, kwargs))
    return original(function, *args, **kwargs)


def _list_captured(function: Any) -> list[Any]:
    """Returns what a function captures, also in a tuple."""
    captured = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # The cell is empty.
            value = cell.cell_contents
            captured += value if isinstance(value, tuple) else [value]
    return captured


def _mark(value: Any) -> Any:
    if isinstance(value, Tracer) and jnp.issubdtype(value.dtype, jnp.inexact):
        return marks.mark_both_ways(value, marks.DERIVATIVE)
    return value
