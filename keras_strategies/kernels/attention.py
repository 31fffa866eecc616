"""Attention in TPU steps: by a kernel that stores no scores, where it applies.

On a TPU, Keras 3.15 computes attention without a mask in a kernel (JAX's splash
attention). It calls the kernel so that it always computes causal attention and
does not scale the scores. With a mask, or for causal attention, a traced step
uses XLA's attention, which stores all scores, but does not cap them even if the
layer asks for it. So this module computes attention in every step for TPUs,
also if the step is planned without a TPU.
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
from jax.sharding import PartitionSpec

from keras_strategies._types import Array
from keras_strategies.keras_bridge import keras_names
from keras_strategies.keras_bridge.patches import Patches
from keras_strategies.kernels import splash_attention as splash
from keras_strategies.kernels.attention_masks import (
    LAYERS,
    describe_mask,
)
from keras_strategies.kernels.attention_reasons import (
    find_reason_against_kernel,
)
from keras_strategies.kernels.capped_attention import (
    capped_attention,
)
from keras_strategies.kernels.mapped_kernels import (
    Trace,
    map_over_cores,
)
from keras_strategies.kernels.splash_attention import AttentionMask
from keras_strategies.passes.row_kinds.kernels import BY_ROWS
from keras_strategies.spmd.attributes import temporary_attribute
from keras_strategies.spmd.mesh import ReplicaMesh


class _Thread(threading.local):
    """The state of the thread that traces a step.

    Attributes:
      trace: The trace of a step for TPUs, or None.
      made_mask: The last mask that a layer computed, as an array and as an
        `AttentionMask`.
      layer_mask: The `made_mask` that was passed to the layer that is computing
        attention.
      reasons: The reasons that are being collected, or None. See
        `collect_reasons`.
      has_called: Whether the layer that is computing attention has called
        `dot_product_attention`.
    """

    trace: Trace | None = None
    reasons: dict[str, None] | None = None
    has_called: bool = False
    made_mask: tuple[Array, AttentionMask] | None = None
    layer_mask: AttentionMask | None = None


_thread = _Thread()
_ARRAYS = ("query", "key", "value")


@contextlib.contextmanager
def attention_for(
    mesh: ReplicaMesh, *, is_global: bool = False
) -> Iterator[None]:
    """Makes this thread trace attention correctly, if the devices are TPUs.

    Args:
      mesh: The replicas.
      is_global: Whether the block traces with the rows of all replicas instead
        of one replica's.
    """
    if mesh.platform != "tpu":
        yield
        return
    trace = Trace.of(mesh, is_global=is_global)
    with (
        _patches.hold(),
        temporary_attribute(_thread, "trace", trace),
        temporary_attribute(_thread, "made_mask", None),
    ):
        yield


@contextlib.contextmanager
def collect_reasons() -> Iterator[dict[str, None]]:
    """Collects why XLA computes attention in TPU steps that the block traces.

    Yields:
      A dict whose keys are the reasons, such as "attention dropout".
    """
    reasons: dict[str, None] = {}
    with temporary_attribute(_thread, "reasons", reasons):
        yield reasons


def _note_reason(reason: str) -> None:
    if _thread.reasons is not None:
        _thread.reasons[reason] = None


def _wrap_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def attention(*args: Any, **kwargs: Any) -> Array:
        trace = _thread.trace
        if trace is None:
            return original(*args, **kwargs)
        _thread.has_called = True
        arguments: dict[str, Any] = {
            name: keras.ops.convert_to_tensor(value)
            if isinstance(value, keras.Variable) or name in _ARRAYS
            else value
            for name, value in signature.bind(*args, **kwargs).arguments.items()
        }
        known, _thread.layer_mask = _thread.layer_mask, None
        reason = find_reason_against_kernel(
            trace.mesh, is_mask_known=known is not None, **arguments
        )
        if reason is None:
            return _attend(trace, known, **arguments)
        _note_reason(reason)
        arguments["flash_attention"] = False
        if arguments.get("attn_logits_soft_cap") is None:
            return original(**arguments)
        del arguments["flash_attention"]
        return capped_attention(**arguments)

    return attention


def _wrap_layer_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a layer's method that computes the mask of its scores.

    The wrapper records the parts of the mask. From the array alone, the
    kernel could not know which blocks of scores it may skip.
    """

    @functools.wraps(original)
    def compute_mask(layer: Any, *args: Any, **kwargs: Any) -> Array | None:
        array = original(layer, *args, **kwargs)
        if _thread.trace is not None and array is not None:
            mask = describe_mask(layer, *args, **kwargs)
            _thread.made_mask = mask and (array, mask)
        return array

    return compute_mask


def _wrap_layer_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a layer's method that computes attention with a given mask."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compute_attention(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if _thread.trace is None:
            return original(layer, *args, **kwargs)
        made, _thread.made_mask = _thread.made_mask, None
        arguments = signature.bind(layer, *args, **kwargs).arguments
        is_made = made and arguments.get("attention_mask") is made[0]
        mask = made[1] if made and is_made else None
        _thread.has_called = False
        with temporary_attribute(_thread, "layer_mask", mask):
            result = original(layer, *args, **kwargs)
        if not _thread.has_called:
            is_usual = arguments["query"].ndim == 4
            _note_reason(
                "dropout or returned scores" if is_usual else "`attention_axes`"
            )
        return result

    return compute_attention


def _attend(
    trace: Trace,
    known: AttentionMask | None,
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
    if mask is None:
        known = AttentionMask()
    elif known is None:
        known = splash.read_mask(mask, query, key)
    if is_causal:
        known = splash.make_causal(known, query, key)
    # Outside of the jitted function, which hides numbers from the analysis of
    # losses (`row_kinds`).
    query *= query.shape[-1] ** -0.5 if scale is None else scale
    cap = attn_logits_soft_cap
    cap = None if cap is None else float(cap)
    # The TPU compiler (libtpu 0.0.42) crashes if a function that is mapped over
    # a replica's cores is called twice and differentiated.
    is_shared = trace.mesh.cores_per_replica == 1
    make_call = _make_call if is_shared else _make_call.__wrapped__
    call = make_call(trace, known.left, known.right, cap)
    return call(query.astype(dtype), key, value, *known.arrays)


@functools.lru_cache(maxsize=64)
def _make_call(
    trace: Trace, left: int | None, right: int | None, soft_cap: float | None
) -> Callable[..., jax.Array]:
    """Returns a jitted function of query, key, value and a mask's arrays.

    Equal layers share one function, so it is traced once (but see `_attend`).
    """
    limits = AttentionMask(left=left, right=right)
    attend = functools.partial(splash.splash_attention, soft_cap=soft_cap)

    def call(query: Array, key: Array, value: Array, *masks: Array) -> Array:
        mask = limits.with_arrays(masks)
        return _map_over_cores(trace, attend, query, key, value, mask)

    call.__name__ = f"{BY_ROWS}_{left}_{right}_{soft_cap}"
    return jax.jit(call)


def _map_over_cores(
    trace: Trace,
    attend: Callable[..., jax.Array],
    query: Array,
    key: Array,
    value: Array,
    mask: AttentionMask,
) -> jax.Array:
    """Calls `attend` on each core, with its heads and its replica's rows."""

    def call(
        query: Array, key: Array, value: Array, *masks: Array
    ) -> jax.Array:
        return attend(query, key, value, mask.with_arrays(masks))

    rows, model = trace.rows, trace.model
    heads, of_rows = PartitionSpec(rows, None, model), PartitionSpec(rows)
    # A mask may have one row or one head for all.
    sizes = [1, 1] if mask.scores is None else mask.scores.shape[:2]
    axes = [
        axis if size > 1 else None
        for axis, size in zip((rows, model), sizes, strict=True)
    ]
    specs = [*[heads] * 3, *[of_rows] * 2, PartitionSpec(*axes)]
    return map_over_cores(trace, call, [query, key, value, *mask.arrays], specs)


def _wrap_public(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `keras.ops`'s function, which refuses caps where no TPU is."""

    @functools.wraps(original)
    def attention(*args: Any, **kwargs: Any) -> Any:
        is_capped = kwargs.get("attn_logits_soft_cap") is not None
        if _thread.trace is None or not is_capped:
            return original(*args, **kwargs)
        return keras_names.NN.dot_product_attention(*args, **kwargs)

    return attention


def _find_patches() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    yield keras_names.NN, "dot_product_attention", _wrap_attention
    yield keras.ops, "dot_product_attention", _wrap_public
    for layer in LAYERS:
        yield layer, "_compute_attention_mask", _wrap_layer_mask
        yield layer, "_compute_attention", _wrap_layer_attention


_patches = Patches(_find_patches)
