"""Attention in steps for TPUs, as their layers define it.

On a TPU, Keras 3.15 gives attention without a mask to a kernel (JAX's splash
attention). It calls the kernel as if each entry saw those before it alone, and
without the scale of the scores; with a mask, or of causal attention, a traced
step takes XLA's attention instead, without the cap of the scores that was
asked for. So in a step for TPUs attention is XLA's, with the cap, and the same
where the step is planned without a TPU.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from keras_strategies._core.attributes import attribute_set
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._types import Array
from keras_strategies.keras_bridge import keras_names
from keras_strategies.keras_bridge.patches import Patches


@contextlib.contextmanager
def attention_for(mesh: ReplicaMesh) -> Iterator[None]:
    """Makes this thread trace attention for the mesh's devices."""
    if mesh.platform != "tpu":
        yield
        return
    with _patches.held(), attribute_set(_thread, "is_for_tpus", True):
        yield


class _Thread(threading.local):
    is_for_tpus = False


_thread = _Thread()


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def attention(*args: Any, **kwargs: Any) -> Array:
        if not _thread.is_for_tpus:
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        given["flash_attention"] = False
        if given.get("attn_logits_soft_cap") is None:
            return original(**given)
        del given["flash_attention"]
        return capped_attention(**given)

    return attention


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
    """Attention whose scores s become `cap * tanh(s / cap)`.

    Args:
      query: Of shape (batch, T, heads, depth).
      key: Of shape (batch, S, heads or a divisor of them, depth).
      value: As the key.
      bias: What is added to the scores; broadcast to (batch, heads, T, S).
      mask: Which of them count; broadcast as the bias, or (batch, T, S) if
        the batch is not as many as the heads.
      scale: Of the scores; None: 1 / sqrt(depth).
      is_causal: Whether an entry sees none that is after it.
      attn_logits_soft_cap: The cap.

    Returns:
      Of the query's shape, and of the dtype that the three have in common.

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


_patches = Patches(
    lambda: [(keras_names.NN, "dot_product_attention", _wrapped)]
)
