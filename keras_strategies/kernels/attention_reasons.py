"""The reasons for which attention in TPU steps does not use the kernel."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.core import Tracer

from keras_strategies._types import Array
from keras_strategies.kernels import splash_attention as splash
from keras_strategies.spmd.mesh import ReplicaMesh

_WITHOUT_KERNELS = ("TPU v2", "TPU v3")
_PRECISIONS = (None, "default", "bfloat16")
"""The values of `jax_default_matmul_precision` that the kernel implements."""


def find_reason_against_kernel(
    mesh: ReplicaMesh,
    *,
    is_mask_known: bool = False,
    flash_attention: bool | None = None,
    **arguments: Any,
) -> str | None:
    """Returns why attention is computed by XLA instead of by the kernel.

    Args:
      mesh: The replicas.
      is_mask_known: Whether the mask consists of limits and padding, so that
        its array is not used.
      flash_attention: Whether the layer may use a kernel; None for Keras's
        setting.
      **arguments: The other arguments of Keras's `dot_product_attention`.

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
    if is_mask_known:
        arguments.pop("mask", None)
    return next(_find_in_arrays(mesh.cores_per_replica, **arguments), None)


def _find_in_arrays(
    cores: int,
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    scale: Array | float | None = None,
    attn_logits_soft_cap: Array | float | None = None,
    **_: Any,
) -> Iterator[str]:
    """Finds the reasons that follow from arrays. See Keras for their shapes."""
    if {query.ndim, key.ndim, value.ndim} != {4}:
        yield "arrays of other than 4 dimensions"
        return
    if not len(query):
        yield "a batch without rows"
    if bias is not None:
        yield "a bias added to the scores"
    dtype = str(jnp.result_type(query, key, value))
    if dtype not in splash.DTYPES:
        yield f"the dtype {dtype}"
    for name, number in (("scale", scale), ("cap", attn_logits_soft_cap)):
        shape = () if number is None else jnp.shape(number)
        if shape:
            yield f"a {name} of shape {shape}"
    if isinstance(attn_logits_soft_cap, Tracer):
        yield "a cap of the scores that the step computes"
    for length in (query.shape[1], key.shape[1]):
        if length % splash.LANES or not length:
            yield f"a length of {length}, not a multiple of {splash.LANES}"
            return
    if query.shape[2] % cores or key.shape[2] % cores:
        yield f"heads that {cores} cores cannot share evenly"
    elif mask is not None:
        yield from _find_in_mask(mask.shape, query, key, cores)


def _find_in_mask(
    shape: tuple[int, ...], query: Array, key: Array, cores: int
) -> Iterator[str]:
    """Finds the reason why the kernel cannot read a mask's array."""
    rows, length, heads = query.shape[:3]
    full = (rows, heads, length, key.shape[1])
    if len(shape) != 4 or not all(
        size in (1, all_) for size, all_ in zip(shape, full, strict=True)
    ):
        yield f"a mask of shape {shape}"
    elif not splash.is_padding(shape) and not splash.count_rows_at_once(
        heads // cores, length, key.shape[1]
    ):
        size = f"{heads // cores} x {length} x {key.shape[1]}"
        yield f"a mask array of {size}, too large for the kernel's tables"
