"""Steps in TensorFlow's form: `train_step(self, data)`.

Such a step reads and writes the variables themselves, and returns only its
logs or outputs. It is called in a scope that has the values of the state. It
may use optimizers that are attributes of the model. Their variables follow
those of the model's own optimizer in the state.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import keras

from keras_strategies._types import Batch
from keras_strategies.hooks.optimizer_hooks import apply_purely
from keras_strategies.hooks.variables_used import (
    InnerScope,
    LiftingScope,
    chain_scopes,
)
from keras_strategies.keras_bridge.patches import Patches, replacement
from keras_strategies.keras_bridge.step_context import current_step
from keras_strategies.kernels.kernels import patched
from keras_strategies.spmd.identity import IdentitySet
from keras_strategies.step.state.layout import OPTIMIZER
from keras_strategies.variables.model_variables import (
    defer_creation,
    find_optimizers,
)


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
    """
    step: Any = getattr(model, f"{kind}_step")
    if not is_in_place(model, kind):
        return step
    in_place: Any = functools.partial(_call_in_place, step, variables, kind)
    # As a method has them.
    in_place.__wrapped__ = step
    in_place.__self__ = getattr(step, "__self__", None)
    return in_place


def is_in_place(model: keras.Model, kind: str) -> bool:
    """Returns whether a model's step takes only the data.

    Args:
      model: The model.
      kind: `"train"`, `"test"` or `"predict"`.

    Raises:
      TypeError: if it takes neither `(state, data)` nor `(data)`.
    """
    step = getattr(model, f"{kind}_step")
    try:
        signature = inspect.signature(step)
    except ValueError:
        return False
    takes_data = _accepts(signature, "data")
    takes_state = _accepts(signature, "state", "data")
    if not (takes_data or takes_state):
        raise TypeError(
            f"`{kind}_step` must accept `(state, data)`, as in Keras for JAX, "
            f"or `(data)`, as in Keras for TensorFlow. Received: "
            f"{type(model).__name__}.{kind}_step{signature}. Write it in one "
            "of these forms; see docs/migration.md."
        )
    parameters = list(signature.parameters.values())
    has_star = any(each.kind == each.VAR_POSITIONAL for each in parameters)
    if takes_state and (has_star or parameters[0].name == "state"):
        return False
    return takes_data


def _accepts(signature: inspect.Signature, *arguments: str) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def find_other_variables(model: keras.Model, kind: str) -> list[keras.Variable]:
    """Returns the variables of the other optimizers that a step may use.

    These are optimizers that are attributes of the model or of its layers, and
    are not the one that the model was compiled with. Steps that take the state
    have none.

    Args:
      model: The model.
      kind: `"train"`, `"test"` or `"predict"`.
    """
    if kind != "train" or not is_in_place(model, kind):
        return []
    known = IdentitySet(model.optimizer.variables if model.optimizer else ())
    found: list[keras.Variable] = []
    for optimizer in find_optimizers(model):
        # Several parts of the model may have the same optimizer.
        new = [v for v in optimizer.variables if v not in known]
        known.update(new)
        found += new
    return found


def write_others(
    state: Sequence[Any],
    variables: Sequence[Sequence[keras.Variable]],
    others: Sequence[keras.Variable],
) -> None:
    """Writes new values of the variables that Keras does not take them from.

    Args:
      state: A step's state. It has no such values if no step was called.
      variables: The groups of the state's variables.
      others: The last variables of the optimizer's group.
    """
    if others and len(state[OPTIMIZER]) == len(variables[OPTIMIZER]):
        values = state[OPTIMIZER][-len(others) :]
        for variable, value in zip(others, values, strict=True):
            variable._value = value


def build_model(
    model: keras.Model, kind: str, iterator: Any = None, data_batch: Any = None
) -> None:
    """Builds a model from its first batch.

    Keras builds it by `call`. As in TensorFlow, a step that takes only the data
    builds what `call` does not: a model without `call`, other optimizers.

    Args:
      model: The compiled model.
      kind: `"train"` or `"test"`.
      iterator: An iterator of Keras's, whose first batch is read if needed.
      data_batch: The batch, if it is known, as the step receives it.
    """
    is_by_step = is_in_place(model, kind) and not _is_built(model)
    if is_by_step and data_batch is None:
        data_batch = read_first_batch(iterator)
    if type(model).call is not keras.Model.call or not is_in_place(model, kind):
        with patched():
            type(model)._symbolic_build(model, iterator, data_batch)
    if is_by_step and not _is_built(model):
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, keras.backend.standardize_dtype(x.dtype)
            ),
            data_batch,
        )
        scope = LiftingScope()

        def compute(data: Batch) -> None:
            scope.enter_trace()
            getattr(model, f"{kind}_step")(data)

        with defer_creation(), _patches.hold(), scope:
            jax.eval_shape(compute, shapes)
        model.built = True


def read_first_batch(iterator: Iterable[Any]) -> Any:
    """Returns the first batch of Keras's iterator over the data, or None."""
    for _, _, batches in iterator:
        is_list = isinstance(batches, list | tuple)
        return batches[0] if is_list else next(batches)
    return None


def _is_built(model: keras.Model) -> bool:
    others = [o for o in find_optimizers(model) if o is not model.optimizer]
    return all(part.built for part in (*model._flatten_layers(), *others))


def _call_in_place(
    step: Callable[..., Any],
    groups: Sequence[Sequence[keras.Variable]],
    kind: str,
    state: Sequence[Sequence[Any]],
    data: Batch,
) -> Any:
    """Calls a step in TensorFlow's form like one in Keras's form for JAX.

    Args:
      step: The step, a method of a model.
      groups: The variables of the state, by group.
      kind: `"train"`, `"test"` or `"predict"`.
      state: The values of the variables.
      data: The batch.

    Returns:
      The results, and the new state of `(state, data)` steps.
    """
    pairs = [
        pair
        for variables, values in zip(groups, state, strict=True)
        for pair in zip(variables, values, strict=True)
    ]
    scope = InnerScope(pairs)
    with chain_scopes(), _patches.hold(), scope:
        try:
            results = step(data)
        except TypeError as error:
            if f"{kind}_step() missing" in str(error):
                error.add_note(
                    f"A step of the form `{kind}_step(self, data)` must not "
                    f"call `super().{kind}_step` of `keras.Model`, which also "
                    "takes the state. Compute the loss with "
                    "`self.compute_loss` within a `ks.GradientTape`, or take "
                    "`(state, data)`."
                )
            raise
        # Logs may have variables, such as the learning rate.
        results = jax.tree.map(
            lambda x: x.value if isinstance(x, keras.Variable) else x, results
        )
    known = IdentitySet(variable for variable, _ in pairs)
    for variable in scope.written:
        if variable not in known:
            raise ValueError(
                "A step of the form `train_step(self, data)` must only "
                "write variables of its model. Received: a write of "
                f"{variable.path!r}. Make it an attribute of the model, or "
                "of one of its layers and metrics."
            )
    new = tuple([scope.get_current_value(v) for v in group] for group in groups)
    return results, (new[1] if kind == "predict" else new)


@replacement
def _apply_purely(
    original: Callable[..., Any],
    optimizer: keras.optimizers.Optimizer,
    grads: list[Any],
    trainable_variables: Sequence[keras.Variable] | None = None,
) -> object:
    """Replaces `LossScaleOptimizer.apply`, which writes variables in a branch.

    The hooks of a replica's step do the same.
    """
    if current_step() is not None:
        return original(optimizer, grads, trainable_variables)
    variables = trainable_variables or optimizer._trainable_variables
    return apply_purely(optimizer, grads, list(variables))


_SCALING = keras.optimizers.LossScaleOptimizer
_patches = Patches(lambda: [(_SCALING, "apply", _apply_purely)])
