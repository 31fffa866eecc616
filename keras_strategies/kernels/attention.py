"""Attention in TPU steps: by a kernel that stores no scores, where it applies.

On a TPU, Keras 3.15 computes attention without a mask in a kernel (JAX's splash
attention). It calls the kernel so that it always computes causal attention and
does not scale the scores. With a mask, or for causal attention, a traced step
uses XLA's attention, which stores all scores, but does not cap them even if the
layer asks for it. So this module computes attention in every step for TPUs,
also if it is planned without a TPU, until Keras does (docs/upstream.md).
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_strategies._types import Array
from keras_strategies.keras_bridge import keras_names
from keras_strategies.keras_bridge.patches import Patch, replacement
from keras_strategies.kernels import splash_attention as splash
from keras_strategies.kernels.attention_mask import (
    NUM_BY_POSITION,
    AttentionMask,
    make_causal,
    read_mask,
)
from keras_strategies.kernels.mapped_kernels import (
    Trace,
    current_trace,
    map_attention,
)
from keras_strategies.kernels.mask_arrays import Known, recognize_mask
from keras_strategies.passes.row_kinds.kernels import BY_ROWS
from keras_strategies.spmd.identity import temporary_attribute
from keras_strategies.spmd.mesh import ReplicaMesh

LAYERS = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)

_WITHOUT_KERNELS = ("TPU v2", "TPU v3")
_PRECISIONS = (None, "default", "bfloat16")
"""The values of `jax_default_matmul_precision` that the kernel implements."""


class _Thread(threading.local):
    """The state of the thread that traces a step.

    Attributes:
      reasons: The reasons that are being collected, or None. See
        `collect_reasons`.
      has_called: Whether the layer that is computing attention has called
        `dot_product_attention`.
    """

    reasons: dict[str, None] | None = None
    has_called: bool = False


_thread = _Thread()
_ARRAYS = ("query", "key", "value")


def _find_trace() -> Trace | None:
    """Returns the trace for TPUs that this thread makes, or None."""
    trace = current_trace()
    return trace if trace and trace.mesh.platform == "tpu" else None


@contextlib.contextmanager
def collect_reasons() -> Iterator[dict[str, None]]:
    """Yields a dict whose keys are why XLA computes attention in TPU steps."""
    reasons: dict[str, None] = {}
    with temporary_attribute(_thread, "reasons", reasons):
        yield reasons


def _note_reason(reason: str) -> None:
    if _thread.reasons is not None:
        _thread.reasons[reason] = None


@replacement
def _compute_attention(
    original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Array:
    """Computes `dot_product_attention` of Keras's backend."""
    trace = _find_trace()
    if trace is None:
        return original(*args, **kwargs)
    _thread.has_called = True
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    arguments: dict[str, Any] = {
        name: keras.ops.convert_to_tensor(value)
        if isinstance(value, keras.Variable) or name in _ARRAYS
        else value
        for name, value in given.items()
    }
    query, key, mask = (arguments.get(n) for n in ("query", "key", "mask"))
    known = None if mask is None else recognize_mask(mask, query, key)
    array = None if known else mask
    reason = find_reason_against_kernel(
        trace.mesh, **arguments | {"mask": array}
    )
    if reason is None:
        return _attend(trace, known, **arguments)
    _note_reason(reason)
    if arguments.get("attn_logits_soft_cap") is None:
        return original(**arguments | {"flash_attention": False})
    arguments.pop("flash_attention", None)
    return capped_attention(**arguments)


def find_reason_against_kernel(
    mesh: ReplicaMesh, *, flash_attention: bool | None = None, **arguments: Any
) -> str | None:
    """Returns why attention is computed by XLA instead of by the kernel.

    Args:
      mesh: The replicas.
      flash_attention: Whether the layer may use a kernel; None for Keras's
        setting.
      **arguments: The other arguments of Keras's `dot_product_attention`,
        without a mask that consists of limits and padding.

    Returns:
      The reason, such as "a bias added to the scores", or None if the kernel
      computes the attention.
    """
    kind = mesh.devices[0].device_kind
    config: Any = jax.config
    precision = config.jax_default_matmul_precision
    if flash_attention is None:
        flash_attention = keras.config.is_flash_attention_enabled()
    if flash_attention is False:
        return "flash_attention=False or `disable_flash_attention()`"
    if kind.startswith(_WITHOUT_KERNELS):
        return f"a {kind}"
    if precision not in _PRECISIONS:
        return f"jax_default_matmul_precision={precision!r}"
    if config.jax_enable_x64:
        return "jax_enable_x64"
    return next(splash.find_reasons(mesh.cores_per_replica, **arguments), None)


@replacement
def _compute_layer_attention(
    original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Calls a layer's method that computes attention with a given mask."""
    if _find_trace() is None:
        return original(layer, *args, **kwargs)
    given = inspect.signature(original).bind(layer, *args, **kwargs).arguments
    _thread.has_called = False
    result = original(layer, *args, **kwargs)
    if not _thread.has_called:
        is_usual = given["query"].ndim == 4
        _note_reason(
            "dropout or returned scores" if is_usual else "`attention_axes`"
        )
    return result


def _attend(
    trace: Trace,
    known: Known | None,
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    attn_logits_soft_cap: float | None = None,
    **_: Any,
) -> jax.Array:
    """Computes attention with the kernel, on each core its heads."""
    dtype = jnp.result_type(query, key, value)
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    parts, wrong = known or (read_mask(mask, query, key), None)
    if is_causal:
        parts = make_causal(parts, query, key)
    # Outside of the jitted function, which hides numbers from the analysis of
    # losses (`row_kinds`).
    query *= query.shape[-1] ** -0.5 if scale is None else scale
    cap = attn_logits_soft_cap
    cap = None if cap is None else float(cap)
    # The TPU compiler (libtpu 0.0.42) crashes if a function that is mapped over
    # a replica's cores is called twice and differentiated.
    is_shared = trace.mesh.cores_per_replica == 1
    make_call = _make_call if is_shared else _make_call.__wrapped__
    call = make_call(trace, parts.left, parts.right, cap)
    result = call(query.astype(dtype), key, value, *parts.arrays)
    if wrong is not None:
        result = jnp.where(wrong[:, None, None, None], jnp.nan, result)
    return result


@functools.lru_cache(maxsize=64)
def _make_call(
    trace: Trace, left: int | None, right: int | None, soft_cap: float | None
) -> Callable[..., jax.Array]:
    """Returns a jitted function of query, key, value and a mask's arrays.

    Equal layers share one function, so it is traced once (but see `_attend`).
    """
    limits = AttentionMask(left=left, right=right)

    def attend(
        query: Array, key: Array, value: Array, *masks: Array
    ) -> jax.Array:
        mask = limits.with_arrays(masks)
        return splash.splash_attention(
            query, key, value, mask, soft_cap=soft_cap
        )

    def call(*arrays: Array | None) -> jax.Array:
        return map_attention(trace, attend, arrays, num_padding=NUM_BY_POSITION)

    call.__name__ = f"{BY_ROWS}_{left}_{right}_{soft_cap}"
    return jax.jit(call)


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

    The arguments are those of Keras's `dot_product_attention`. A mask of shape
    (batch, T, S) is also accepted, unless the batch size equals the number of
    heads.

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


@replacement
def _compute_public_attention(
    original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Calls `keras.ops`'s function, which refuses caps where no TPU is."""
    is_capped = kwargs.get("attn_logits_soft_cap") is not None
    if _find_trace() is None or not is_capped:
        return original(*args, **kwargs)
    return keras_names.NN.dot_product_attention(*args, **kwargs)


def find_attention_patches() -> Iterator[Patch]:
    """Yields the patches by which steps for TPUs compute attention."""
    yield keras_names.NN, "dot_product_attention", _compute_attention
    yield keras.ops, "dot_product_attention", _compute_public_attention
    for layer in LAYERS:
        yield layer, "_compute_attention", _compute_layer_attention
