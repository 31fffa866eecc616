"""Attention for TPUs by JAX's splash kernel."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from keras_strategies._types import Array
from keras_strategies.kernels.attention_mask import (
    LANES,
    AttentionMask,
    Limits,
    count_pairs,
    find_queries_with_keys,
    pad_mask,
)
from keras_strategies.passes.hlo import KERNELS
from keras_strategies.passes.stages import names_in

_MAX_PADDING = 1.25
"""The largest number of scores with padding, divided by that without, for which
the kernel computes attention. Above, XLA's attention is faster."""

_BLOCKS = (512, 256, LANES)
_QUERY_BLOCKS = names_in("block_q block_q_dkv block_q_dq")
_KEY_BLOCKS = names_in(
    "block_kv block_kv_compute block_kv_dkv block_kv_dkv_compute block_kv_dq"
)
DTYPES = ("bfloat16", "float32")

_TABLE_BYTES = 7 << 17
"""The part of a TPU core's 1 MiB of scalar memory that the tables of a mask
array's blocks may fill."""


def count_rows_at_once(heads: int, queries: int, keys: int) -> int:
    """Returns for how many rows of the batch the kernel can read a mask array.

    For each head of each row, the kernel stores three tables of the mask's
    blocks. Their last two dimensions are padded to multiples of 8 and 128, and
    an entry of all three takes up to 6 bytes. Returns 0 if no row's tables fit.
    """
    blocks_q = -(-queries // _find_block(queries) // 8) * 8
    blocks_kv = -(-keys // _find_block(keys) // LANES) * LANES
    return _TABLE_BYTES // (heads * blocks_q * blocks_kv * 6)


def find_reasons(
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
    """Yields why the kernel cannot compute `dot_product_attention` of Keras."""
    if {query.ndim, key.ndim, value.ndim} != {4}:
        yield "arrays of other than 4 dimensions"
        return
    if not len(query):
        yield "a batch without rows"
    if bias is not None:
        yield "a bias added to the scores"
    dtype = str(jnp.result_type(query, key, value))
    if dtype not in DTYPES:
        yield f"the dtype {dtype}"
    for name, number in (("scale", scale), ("cap", attn_logits_soft_cap)):
        if shape := getattr(number, "shape", ()):
            yield f"a {name} of shape {shape}"
    if isinstance(attn_logits_soft_cap, Tracer):
        yield "a cap of the scores that the step computes"
    lengths = query.shape[1], key.shape[1]
    padded = map(_round_up, lengths)
    if math.prod(padded) > _MAX_PADDING * math.prod(lengths) or 0 in lengths:
        length = next(n for n in lengths if n % LANES or not n)
        yield f"a length of {length}, not a multiple of {LANES}"
        return
    if not can_share_heads(cores, query, key):
        yield f"heads that {cores} cores cannot share evenly"
    elif mask is not None:
        yield from _find_in_mask(mask.shape, query, key, cores)


def can_share_heads(cores: int, query: Array, key: Array) -> bool:
    """Returns whether cores can share heads evenly, each with its keys."""
    heads, kv_heads = query.shape[2], key.shape[2]
    return not (heads % cores or (kv_heads % cores and cores % kv_heads))


def _find_in_mask(
    shape: tuple[int, ...], query: Array, key: Array, cores: int
) -> Iterator[str]:
    """Finds the reason why the kernel cannot read a mask's array."""
    rows, length, heads = query.shape[:3]
    full = (rows, heads, length, key.shape[1])
    pairs = zip(shape, full, strict=False)
    if len(shape) != 4 or not all(n in (1, size) for n, size in pairs):
        yield f"a mask of shape {shape}"
    elif not (shape[1] == 1 and 1 in shape[2:]) and not count_rows_at_once(
        heads // cores, _round_up(length), _round_up(key.shape[1])
    ):
        size = f"{heads // cores} x {length} x {key.shape[1]}"
        yield f"a mask array of {size}, too large for the kernel's tables"


def splash_attention(
    query: Array,
    key: Array,
    value: Array,
    mask: AttentionMask,
    *,
    soft_cap: float | None = None,
) -> jax.Array:
    """Computes attention on one TPU core.

    The results are those of `jax.nn.dot_product_attention` with a scale of 1.
    In particular, a query without any key to attend to gets the mean of all
    values.

    Args:
      query: An array of shape (batch, T, heads, depth), already scaled.
      key: An array of shape (batch, S, heads or a divisor of it, depth).
      value: An array of the key's shape, except for the depth.
      mask: The keys that each query attends to.
      soft_cap: Caps each score s to `soft_cap * tanh(s / soft_cap)`; None for
        no cap.

    Returns:
      An array of shape (batch, T, heads, depth of the value).
    """
    length, heads, depth = query.shape[1], query.shape[2], value.shape[-1]
    mean = jnp.mean(value, axis=1, keepdims=True, dtype="float32")
    mean = jnp.repeat(mean, heads // value.shape[2], axis=2)
    mask = pad_mask(mask, query.shape[:2], key.shape[:2])
    query, key, value = map(_pad, (query, key, value))
    queries, keys = query.shape[1], key.shape[1]
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    pairs = count_pairs(mask, queries, keys)
    if mask.scores is None:
        with jax.ensure_compile_time_eval():
            kernel = _make_kernel(
                heads, (queries, keys), (mask.left, mask.right), soft_cap
            )
        segments = _make_segments(query, key, mask)
        with jax.named_scope(f"{KERNELS}{q.size // queries * pairs}"):
            result = jax.vmap(kernel)(q, k, v, segments)
    else:
        masks = jnp.broadcast_to(mask.scores, (len(q), *mask.scores.shape[1:]))
        attend = functools.partial(_attend_at_once, pairs, soft_cap)
        result = _attend_in_groups(attend, (q, k, v, masks))
    result = jnp.swapaxes(result, 1, 2)[:, :length, :, :depth]
    has_keys = find_queries_with_keys(mask, queries, keys)
    if has_keys is None:
        return result
    mean = mean.astype(result.dtype)
    return jnp.where(has_keys[:, :length], result, mean)


def _pad(x: Array) -> jax.Array:
    """Pads the length and the depth with zeros to multiples of the lanes."""
    length, depth = (-n % LANES for n in (x.shape[1], x.shape[3]))
    return jnp.pad(x, [(0, 0), (0, length), (0, 0), (0, depth)])


def _round_up(size: int) -> int:
    return -(-size // LANES) * LANES


@functools.lru_cache(maxsize=64)
def _make_kernel(
    heads: int, shape: tuple[int, int], limits: Limits, soft_cap: float | None
) -> Any:
    """Makes a kernel for one row of the batch, with a mask known in advance."""
    _, masks = _import_splash()
    if limits == (None, None):
        mask = masks.FullMask(shape)
    else:
        mask = masks.LocalMask(shape, limits, offset=0)
        mask.mask_function = _compute_once(mask.mask_function, *limits)
    mask = masks.MultiHeadMask([mask] * heads)
    kernel = _make_splash(mask, *shape, soft_cap)
    # As arrays of JAX, these constants would belong to the current devices.
    return jax.tree.map(np.asarray, kernel)


def _compute_once(
    compute: Callable[..., Any], left: int | None, right: int | None
) -> Callable[..., Any]:
    """Wraps a mask's function so that equal blocks are computed once.

    A long mask has many blocks: 131,072 tokens have 65,536. Most are all true
    or all false.
    """

    @functools.cache
    def compute_block(distance: int, queries: int, keys: int) -> np.ndarray:
        return compute(
            np.arange(queries)[:, None], distance + np.arange(keys)[None]
        )

    def compute_mask(queries: Any, keys: Any) -> Any:
        if not isinstance(queries, np.ndarray):
            return compute(queries, keys)
        limits = [n for n in (right, left and -left) if n is not None]
        distance = int(keys[0, 0] - queries[0, 0])
        distance = min(distance, max(limits) + queries.shape[0])
        distance = max(distance, min(limits) - keys.shape[1])
        return compute_block(distance, queries.shape[0], keys.shape[1])

    return compute_mask


def _attend_in_groups(
    attend: Callable[[Sequence[jax.Array]], jax.Array],
    arrays: Sequence[jax.Array],
) -> jax.Array:
    """Computes attention with a mask that is only known to the running program.

    The rows are computed in groups, one after the other, because the tables of
    the mask's blocks may not fit into a core's memory for all rows at once. A
    single group is a loop, too, so that traces with other numbers of rows have
    the same operations.

    Args:
      attend: A function that computes some rows; see `_attend_at_once`.
      arrays: The query, the key, the value and the masks of all rows.
    """
    rows, heads, length, _ = arrays[0].shape
    at_once = count_rows_at_once(heads, length, arrays[1].shape[2])
    groups = -(-rows // at_once)
    size = -(-rows // groups)
    parts = [
        pad_rows(x, groups * size - rows).reshape(groups, size, *x.shape[1:])
        for x in arrays
    ]
    return _join_dims(jax.lax.map(attend, parts))[:rows]


def pad_rows(array: Array, count: int, mode: str = "constant") -> jax.Array:
    """Appends rows; of zeros, if the mode of `jnp.pad` is not another one."""
    return jnp.pad(array, [(0, count)] + [(0, 0)] * (array.ndim - 1), mode)


def _attend_at_once(
    pairs: int, soft_cap: float | None, part: Sequence[jax.Array]
) -> jax.Array:
    """Computes attention with one call of the kernel.

    The kernel has no dimension for the batch's rows. `vmap` would run it in a
    loop, so here the heads of all rows are the kernel's heads.

    Args:
      pairs: The number of pairs of a query and a key in one row and head.
      soft_cap: See `splash_attention`.
      part: Some rows of the query and of the key, of shape (rows, heads,
        length, depth), of the value and of the masks.
    """
    query, key, value, masks = part
    rows, heads, length, _ = query.shape
    kernel = _make_splash(_join_dims(masks), length, key.shape[2], soft_cap)

    def repeat(info: Any) -> Any:
        """Repeats a mask's blocks for the heads that share it."""
        names = ("data_next", "mask_next", "block_mask")
        shares = heads // masks.shape[1]
        repeated = {n: jnp.repeat(getattr(info, n), shares, 0) for n in names}
        # `make_splash_mha` (jax 0.10) turns this bool into a traced array.
        return info._replace(**repeated, is_dynamic_mask=True)

    for name in ("fwd_mask_info", "dq_mask_info", "dkv_mask_info"):
        setattr(kernel, name, repeat(getattr(kernel, name)))
    with jax.named_scope(f"{KERNELS}{query.size // length * pairs}"):
        result = kernel(*map(_join_dims, (query, key, value)))
    return result.reshape(rows, heads, length, -1)


def _join_dims(x: Array) -> jax.Array:
    """Joins the first two dimensions."""
    return x.reshape(-1, *x.shape[2:])


def _make_segments(query: Array, key: Array, mask: AttentionMask) -> Any:
    """Returns segment ids that differ for excluded queries and keys."""
    if all(array is None for array in mask.arrays):
        return None
    queries, keys = mask.query_segments, mask.key_segments
    if queries is None or keys is None:
        queries, keys = (jnp.ones(x.shape[:2], "int32") for x in (query, key))
    # The ids of excluded queries and keys are those of no others.
    largest = jnp.maximum(queries.max(1), keys.max(1))[:, None]
    if mask.queries is not None:
        queries = jnp.where(mask.queries, queries, largest + 1)
    if mask.keys is not None:
        keys = jnp.where(mask.keys, keys, largest + 2)
    return _import_splash()[0].SegmentIds(queries, keys)


def _make_splash(
    mask: Any, queries: int, keys: int, soft_cap: float | None
) -> Any:
    """Makes a kernel with the largest blocks that divide the lengths."""
    kernels, _ = _import_splash()
    sizes = dict.fromkeys(_QUERY_BLOCKS, _find_block(queries))
    sizes |= dict.fromkeys(_KEY_BLOCKS, _find_block(keys))
    return kernels.make_splash_mha(
        mask,
        head_shards=1,
        q_seq_shards=1,
        block_sizes=kernels.BlockSizes(**sizes),
        attn_logits_soft_cap=soft_cap,
    )


def _find_block(length: int) -> int:
    return next(size for size in _BLOCKS if length % size == 0)


def _import_splash() -> tuple[Any, Any]:
    """Imports JAX's modules of the kernel and of its masks when needed."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    return splash_attention_kernel, splash_attention_mask
