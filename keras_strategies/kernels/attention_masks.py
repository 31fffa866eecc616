"""The masks that Keras's attention layers make from their arguments."""

import functools
from typing import Any

import jax.numpy as jnp
import keras

from keras_strategies._types import Array
from keras_strategies.kernels.splash_attention import AttentionMask

LAYERS = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)


def describe_mask(
    layer: Any,
    query: Array,
    value: Array,
    query_mask: Array | None = None,
    value_mask: Array | None = None,
    key_mask: Array | None = None,
    attention_mask: Array | None = None,
    use_causal_mask: bool = False,
) -> AttentionMask | None:
    """Returns the mask that a layer computes from these arguments.

    The arguments are those of the layer's `_compute_attention_mask`.

    Returns:
      The mask. None if it includes an array of scores, or if the layer's class
      computes the causal mask or the window in its own way.
    """
    padding = [m for m in (query_mask, value_mask, key_mask) if m is not None]
    if attention_mask is not None or any(m.ndim != 2 for m in padding):
        return None
    if _has_own_masks(layer):
        return None
    window = getattr(layer, "sliding_window", None)
    window = getattr(layer, "_sliding_window", window)
    reach = None if window is None else window - 1
    keys = [_spread(m, query) for m in (value_mask, key_mask) if m is not None]
    return AttentionMask(
        left=reach,
        right=0 if use_causal_mask else reach,
        queries=None if query_mask is None else _spread(query_mask, query),
        keys=functools.reduce(jnp.logical_and, keys) if keys else None,
    )


def _has_own_masks(layer: Any) -> bool:
    """Returns whether a layer overrides Keras's causal masks or windows."""
    base = next(base for base in LAYERS if isinstance(layer, base))
    names = ("_compute_causal_mask", "_compute_sliding_window_mask")
    return any(
        getattr(getattr(layer, name), "__func__", None)
        is not getattr(base, name)
        for name in names
    )


def _spread(mask: Array, query: Array) -> Array:
    """Returns a padding mask with an entry for each row of the query."""
    shape = (query.shape[0], mask.shape[1])
    return jnp.broadcast_to(jnp.asarray(mask, bool), shape)
