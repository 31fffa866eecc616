"""Counts the operations of a model's training, and finds its kind of inputs."""

import inspect
from typing import Any

import jax
import keras

from keras_strategies._types import Tree
from keras_strategies.passes.flops import count_training_flops


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

    def forward(weights: Any, others: Any, x: Tree) -> Tree:
        # `training` is False, because some models can only be called for
        # inference, such as keras-hub's tasks.
        takes_mode = "training" in inspect.signature(model.call).parameters
        mode = {"training": False} if takes_mode else {}
        return model.stateless_call(weights, others, x, **mode)[0]

    try:
        weights, others = jax.tree.map(
            lambda v: jax.ShapeDtypeStruct(tuple(v.shape), v.dtype),
            (model.trainable_variables, model.non_trainable_variables),
        )
        return count_training_flops(forward, weights, others, x)
    except Exception:
        # `call` is the user's code. The model may also not be built.
        return None


def embeds_tokens(model: keras.Model) -> bool:
    """Returns whether a model has an embedding, for inputs that are tokens."""
    return any(
        isinstance(layer, keras.layers.Embedding)
        or "embedding" in type(layer).__name__.lower()
        for layer in model._flatten_layers()
    )
