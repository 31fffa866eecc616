"""Attention by XLA operations, with a cap of the scores."""

import jax
import jax.numpy as jnp

from keras_strategies._types import Array


def capped_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array = None,
    scale: float | None = None,
    is_causal: bool = False,
    *,
    attn_logits_soft_cap: float,
) -> jax.Array:
    """Computes attention with each score s capped to `cap * tanh(s / cap)`.

    Args:
      query: An array of shape (batch, T, heads, depth).
      key: An array of shape (batch, S, heads or a divisor of it, depth).
      value: An array of the key's shape.
      bias: An array to add to the scores, broadcast to (batch, heads, T, S).
      mask: True for the scores to use, broadcast like the bias. A shape of
        (batch, T, S) is also accepted, unless the batch size equals the number
        of heads.
      scale: The factor by which scores are multiplied; None for 1 /
        sqrt(depth).
      is_causal: Whether each position attends only to itself and earlier
        positions.
      attn_logits_soft_cap: The cap.

    Returns:
      An array of the query's shape, in the common dtype of query, key and
      value.

    References:
      - Gemma Team, Gemma 2 (2024), section 2: https://arxiv.org/abs/2408.00118
    """
    dtype = jnp.result_type(query, key, value)
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    heads, depth = query.shape[-2:]
    key, value = (
        jnp.repeat(x, heads // x.shape[2], axis=2) for x in (key, value)
    )
    scores = jnp.einsum(
        "bthd,bshd->bhts", query, key, preferred_element_type=jnp.float32
    )
    scores *= depth**-0.5 if scale is None else scale
    scores = attn_logits_soft_cap * jnp.tanh(scores / attn_logits_soft_cap)
    if bias is not None:
        scores += bias
    counts = jnp.ones(scores.shape[-2:], bool)
    if is_causal:
        counts = jnp.tril(counts)
    if mask is not None:
        mask = jnp.asarray(mask, bool)
        if mask.ndim == 3 and mask.shape[0] not in (1, heads):
            mask = mask[:, None]
        counts = counts & mask
    scores = jnp.where(counts, scores, 0.7 * jnp.finfo(scores.dtype).min)
    shares = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bhts,bshd->bthd", shares, value)
