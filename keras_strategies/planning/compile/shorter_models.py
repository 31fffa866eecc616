"""Shortens functional models with equal blocks to a few of the blocks."""

from collections.abc import Callable
from typing import Any

import keras
from keras import tree

from keras_strategies._types import Tree
from keras_strategies.kernels.equal_blocks import Blocks


def shorten(model: keras.Model, blocks: Blocks, number: int) -> keras.Model:
    """Returns a model with the same layers but only the first `number` blocks.

    Args:
      model: The model in which `blocks` were found.
      blocks: The model's blocks.
      number: The number of blocks to keep, at least one.

    Returns:
      A functional model that is not compiled. It shares its layers with the
      original model.
    """
    if isinstance(model, keras.Sequential):
        shorter = _shorten_sequential(model, blocks, number)
    elif model is blocks.model:
        shorter = _shorten_functional(model, blocks, number)
    else:
        inner = {
            id(layer): shorten(layer, blocks, number)
            for layer in model.layers
            if layer is blocks.model or _contains(layer, blocks.model)
        }
        shorter = _clone(
            model,
            lambda layer: inner.get(id(layer), layer),
            lambda layer, *args, **kwargs: layer(*args, **kwargs),
        )
    # The model itself may be rematerialized, which its config does not contain.
    shorter._remat_mode = model._remat_mode
    return shorter


def _clone(
    model: keras.Model,
    layer_of: Callable[..., keras.layers.Layer],
    call: Callable[..., Tree],
) -> keras.Model:
    if model.compiled:
        # Keras would also compile the clone from the config, which fails for
        # lambdas.
        model = keras.Model(model.input, model.output, name=model.name)
    return keras.models.clone_model(
        model, clone_function=layer_of, call_function=call
    )


def _shorten_functional(
    model: keras.Model, blocks: Blocks, number: int
) -> keras.Model:
    dropped = {id(x) for part in blocks.segments[number:] for x in part}
    last, last_index = blocks.trunks[number - 1]
    end, end_index = blocks.trunks[-1]
    trunk: list[Any] = []

    def call(
        operation: keras.Operation, *args: object, **kwargs: object
    ) -> Tree:
        if id(operation) not in dropped:
            outputs = operation(*args, **kwargs)
            if operation is last:
                trunk.append(tree.flatten(outputs)[last_index])
            return outputs
        # The outputs of dropped operations are placeholders, which no remaining
        # operation reads. In place of the last dropped block's trunk, the trunk
        # of the last remaining block is used.
        outputs = tree.map_structure(
            lambda t: keras.KerasTensor(t.shape, t.dtype), operation.output
        )
        if operation is not end:
            return outputs
        leaves = tree.flatten(outputs)
        leaves[end_index] = trunk[0]
        return tree.pack_sequence_as(outputs, leaves)

    return _clone(model, lambda layer: layer, call)


def _contains(layer: object, inner: object) -> bool:
    if not isinstance(layer, keras.Model):
        return False
    return any(part is inner for part in layer._flatten_layers())


def _shorten_sequential(
    model: keras.Model, blocks: Blocks, number: int
) -> keras.Model:
    dropped = {id(x) for part in blocks.segments[number:] for x in part}
    inputs = [
        keras.Input(batch_shape=t.shape, dtype=t.dtype) for t in model.inputs
    ]
    layers = [
        shorten(x, blocks, number)
        if x is blocks.model or _contains(x, blocks.model)
        else x
        for x in model.layers
        if id(x) not in dropped
    ]
    return keras.Sequential([*inputs, *layers])
