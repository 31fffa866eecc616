"""Steps in TensorFlow's form: `train_step(self, data)`.

Such a step reads and writes the variables themselves, and returns only its
logs or outputs. It is called in a scope that has the values of the state.
"""

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras

from keras_strategies._types import Batch
from keras_strategies.hooks.optimizer_hooks import apply_purely
from keras_strategies.hooks.variables_used import InnerScope, chain_scopes
from keras_strategies.keras_bridge.patches import Patches
from keras_strategies.keras_bridge.step_context import current_step
from keras_strategies.spmd.identity import IdentitySet


def make_stateless(
    model: keras.Model,
    kind: str,
    variables: Sequence[Sequence[keras.Variable]],
) -> Callable[..., Any]:
    """Returns a model's step in Keras's form for JAX.

    Args:
      model: The model, whose step is `step(state, data)`, or `step(data)`.
      kind: `"train"`, `"test"` or `"predict"`.
      variables: The variables of the state, by group.

    Raises:
      TypeError: if a step that takes only the data calls Keras's own step.
    """
    step: Any = getattr(model, f"{kind}_step")
    if not _is_in_place(step):
        return step
    if _calls_keras(model, step):
        raise TypeError(
            f"A step of the form `{kind}_step(self, data)` must not call that "
            f"of `keras.Model`, which also takes the state. Received: "
            f"{type(model).__name__}, whose step calls "
            f"`super().{kind}_step`. Compute the loss with "
            "`self.compute_loss` within a `ks.GradientTape`, or take "
            "`(state, data)`."
        )
    return _InPlaceStep(step, variables, is_predict=kind == "predict")


def _is_in_place(step: Callable[..., Any]) -> bool:
    """Returns whether a step takes only the data."""

    def accepts(*arguments: str) -> bool:
        try:
            inspect.signature(step).bind(*arguments)
        except (TypeError, ValueError):
            return False
        return True

    return accepts("data") and not accepts("state", "data")


def _calls_keras(model: keras.Model, step: Any) -> bool:
    """Returns whether a model's step calls the one that Keras defines."""
    function = getattr(step, "__func__", step)
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    methods = [
        (cls, vars(cls)[function.__name__])
        for cls in type(model).__mro__
        if function.__name__ in vars(cls)
    ]
    after = [
        cls
        for (_, method), (cls, _) in itertools.pairwise(methods)
        if method is function
    ]
    is_super = {"super", function.__name__} <= set(names)
    return is_super and any(c.__module__.startswith("keras.") for c in after)


class _InPlaceStep:
    """A step in Keras's form for JAX that calls one in TensorFlow's form.

    Args:
      step: The step, a method of a model.
      variables: See `make_stateless`.
      is_predict: Whether this is a predict step.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        variables: Sequence[Sequence[keras.Variable]],
        *,
        is_predict: bool,
    ) -> None:
        # As a method has them.
        self.__wrapped__ = step
        self.__self__ = getattr(step, "__self__", None)
        self._variables = variables
        self._is_predict = is_predict

    def __call__(self, state: Sequence[Sequence[Any]], data: Batch) -> Any:
        """Returns the results, and the new state of `(state, data)` steps."""
        pairs = [
            pair
            for variables, values in zip(self._variables, state, strict=True)
            for pair in zip(variables, values, strict=True)
        ]
        scope = InnerScope(pairs)
        with chain_scopes(), _patches.hold(), scope:
            # Logs may have variables, such as the learning rate.
            results = jax.tree.map(
                lambda x: x.value if isinstance(x, keras.Variable) else x,
                self.__wrapped__(data),
            )
        _check_written(scope, IdentitySet(variable for variable, _ in pairs))
        new = tuple(
            [scope.get_current_value(v) for v in group]
            for group in self._variables
        )
        return results, (new[1] if self._is_predict else new)


def _check_written(scope: InnerScope, known: IdentitySet) -> None:
    """Raises ValueError if a step wrote a variable that has no group."""
    for variable in scope.written:
        if variable not in known:
            raise ValueError(
                "A step of the form `train_step(self, data)` must only write "
                "variables of its model. Received: a write of "
                f"{variable.path!r}. Make it an attribute of the model, or of "
                "one of its layers and metrics."
            )


def _make_pure(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `LossScaleOptimizer.apply`, which writes variables in a branch."""

    def apply(
        optimizer: keras.optimizers.Optimizer,
        grads: list[Any],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> object:
        if current_step() is not None:
            # The hooks of a replica's step do the same.
            return original(optimizer, grads, trainable_variables)
        variables = trainable_variables or optimizer._trainable_variables
        return apply_purely(optimizer, grads, list(variables))

    return apply


_patches = Patches(
    lambda: [(keras.optimizers.LossScaleOptimizer, "apply", _make_pure)]
)
