"""The cross-entropy over many words, whose logits are never stored whole."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from keras_strategies._types import Array
from keras_strategies.cluster.checks import check_number
from keras_strategies.passes.specs import join_blocks, split_blocks

BLOCK_SIZE = 8_192
_LANES = 128
_LOWEST = -1e30


class Options(NamedTuple):
    """The options of the losses; see `linear_cross_entropy`."""

    words_axis: int = 1
    soft_cap: float | None = None
    smoothing: float = 0.0
    block_size: int = BLOCK_SIZE


def linear_cross_entropy(
    hidden: Array,
    kernel: Array,
    labels: Array,
    *,
    bias: Array | None = None,
    words_first: bool = False,
    soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    ignore_label: int | None = None,
    block_size: int = BLOCK_SIZE,
) -> jax.Array:
    """Returns the cross-entropy of each label without storing all logits.

    The losses are those of Keras's `sparse_categorical_crossentropy` with
    `from_logits=True`, for the logits `hidden @ kernel + bias`. The logits of
    one block of words are computed at a time, and again for the derivatives.
    So a step stores one block instead of all logits, and computes their product
    once more. Products and the softmax add up in float32. Not collective; a
    step that averages the losses stays mapped.

    Args:
      hidden: An array of shape (..., features), such as the results of a
        model's last block. The kernel is cast to its dtype.
      kernel: An array of shape (features, words).
      labels: Integers of shape (...). A label that is not in [0, words) has
        the loss 0, as in Keras.
      bias: An array of shape (words,), or None.
      words_first: Whether the kernel's shape is (words, features), as that of
        an embedding.
      soft_cap: If given, a logit z becomes `soft_cap * tanh(z / soft_cap)`.
      label_smoothing: The share of each label that is divided over all words,
        from 0 to 1.
      ignore_label: A label whose loss is 0, such as the id of padding.
      block_size: Number of words in a block, rounded up to a multiple of 128.

    Returns:
      The losses in float32, of the shape of `labels`.

    Raises:
      ValueError: if shapes do not match, or a number is out of range.
      TypeError: if the labels are not integers.

    Example:
      ```python
      class LanguageModel(keras.Model):
          def compute_loss(self, x, y, y_pred, *args, **kwargs):
              losses = ks.experimental.linear_cross_entropy(
                  y_pred, self.head.kernel, y
              )
              return keras.ops.mean(losses)
      ```

    References:
      `ks.experimental.blocked_head` uses it in a model as it is.
    """
    hidden, kernel, labels = map(jnp.asarray, (hidden, kernel, labels))
    features, words = kernel.shape[::-1] if words_first else kernel.shape
    if hidden.shape != (*labels.shape, features):
        raise ValueError(
            "`hidden` must have the labels' shape and the kernel's features as "
            f"the last dimension. Received: shapes {hidden.shape} of `hidden`, "
            f"{labels.shape} of `labels`, and a kernel of {features} features "
            f"and {words} words. See `words_first`."
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"`labels` must be integers. Received: {labels.dtype}. Pass the "
            "ids of words."
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(
            "`label_smoothing` must be from 0 to 1. Received: "
            f"label_smoothing={label_smoothing}. Omit it for plain labels."
        )
    fix = "Omit it for the default."
    check_number("`soft_cap`", soft_cap, fix, above=0, is_whole=False)
    check_number("`block_size`", block_size, fix, above=0)
    labels = labels.astype(int)
    if ignore_label is not None:
        labels = jnp.where(labels == ignore_label, -1, labels)
    axis = int(not words_first)
    options = Options(axis, soft_cap, label_smoothing, block_size)
    return compute_losses(hidden, kernel, bias, labels, options)[0]


def compute_losses(
    hidden: Array,
    kernel: Array,
    bias: Array | None,
    labels: Array,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """Returns the loss of each label, and the word with the largest logit."""
    words = kernel.shape[options.words_axis]
    bias = jnp.zeros(words) if bias is None else jnp.asarray(bias)
    size = -(-words // -(-words // options.block_size))
    size = min(-(-size // _LANES) * _LANES, words)
    options = options._replace(block_size=size)
    return _compute(options, hidden, kernel, bias, labels)


def _scan_blocks(
    options: Options, add_block: Callable[..., Any], start: Any, *arrays: Any
) -> Any:
    """Calls `add_block` for each block of words, as the body of a loop.

    Its arguments are the carry, and the words (those of the last block may not
    exist), the kernel's block, the logits of shape (..., words), and the
    derivative of the cap. A kernel that is sharded is gathered a block at a
    time (see `passes/specs.py`).
    """
    hidden, kernel, bias = arrays
    axis, size = options.words_axis, options.block_size

    def iterate(carry: Any, parts: Any) -> Any:
        k, part, bias = parts
        part = part.astype(hidden.dtype)
        logits = _multiply(hidden, part, [hidden.ndim - 1], [1 - axis])
        logits += bias.astype(jnp.float32)
        slope: jax.Array | float = 1.0
        if options.soft_cap is not None:
            ratio = jnp.tanh(logits / options.soft_cap)
            logits, slope = options.soft_cap * ratio, 1.0 - ratio * ratio
        words = k * size + jnp.arange(size)
        return add_block(carry, (words, part, logits, slope))

    blocks = split_blocks(kernel, axis, size), split_blocks(bias, 0, size)
    return lax.scan(iterate, start, (jnp.arange(len(blocks[1])), *blocks))


def _multiply(
    one: Any, two: Any, of_one: Sequence[int], of_two: Sequence[int]
) -> jax.Array:
    """Returns a product over dimensions of both arrays, summed in float32."""
    dims = ((of_one, of_two), ((), ()))
    return lax.dot_general(one, two, dims, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _compute(options: Options, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    return _forward(options, *arrays)[0]


def _forward(options: Options, *arrays: Any) -> Any:
    hidden, kernel, bias, labels = arrays
    words = kernel.shape[options.words_axis]

    def add_block(carry: Any, block: Any) -> Any:
        word, _, logits, _ = block
        largest, best, total, of_label, of_all = carry
        is_label = labels[..., None] == word
        of_label += jnp.where(is_label, logits, 0.0).sum(axis=-1)
        of_all += jnp.where(word < words, logits, 0.0).sum(axis=-1)
        logits = jnp.where(word < words, logits, _LOWEST)
        here = logits.max(axis=-1)
        word = word[0] + jnp.argmax(logits, axis=-1)
        best = jnp.where(here > largest, word, best)
        new = jnp.maximum(largest, here)
        added = jnp.exp(logits - new[..., None]).sum(axis=-1)
        total = total * jnp.exp(largest - new) + added
        return (new, best, total, of_label, of_all), None

    zeros = jnp.zeros(labels.shape, jnp.float32)
    start = (zeros + _LOWEST, jnp.zeros(labels.shape, int), zeros, zeros, zeros)
    (largest, best, total, of_label, of_all), _ = _scan_blocks(
        options, add_block, start, hidden, kernel, bias
    )
    normalizer = largest + jnp.log(total)
    smoothing = options.smoothing
    of_label = (1.0 - smoothing) * of_label + smoothing / words * of_all
    is_word = (labels >= 0) & (labels < words)
    losses = jnp.where(is_word, normalizer - of_label, 0.0)
    return (losses, best), (hidden, kernel, bias, labels, normalizer)


def _backward(options: Options, residuals: Any, gradients: Any) -> Any:
    hidden, kernel, bias, labels, normalizer = residuals
    axis, smoothing = options.words_axis, options.smoothing
    words = kernel.shape[axis]
    is_word = (labels >= 0) & (labels < words)
    factor = jnp.where(is_word, gradients[0], 0.0)[..., None]
    rows = tuple(range(labels.ndim))

    def add_block(of_hidden: Any, block: Any) -> Any:
        word, part, logits, slope = block
        is_label = labels[..., None] == word
        error = jnp.exp(logits - normalizer[..., None])
        error -= (1.0 - smoothing) * is_label + smoothing / words
        error = jnp.where(word < words, factor * error * slope, 0.0)
        cast = error.astype(hidden.dtype)
        of_hidden += _multiply(cast, part, [labels.ndim], [axis])
        pair = (cast, hidden) if axis == 0 else (hidden, cast)
        of_kernel = _multiply(*pair, rows, rows).astype(kernel.dtype)
        return of_hidden, (of_kernel, error.sum(axis=rows))

    start = jnp.zeros(hidden.shape, jnp.float32)
    of_hidden, (of_kernel, of_bias) = _scan_blocks(
        options, add_block, start, hidden, kernel, bias
    )
    return (
        of_hidden.astype(hidden.dtype),
        join_blocks(of_kernel, axis, words),
        join_blocks(of_bias, 0, words).astype(bias.dtype),
        np.zeros(labels.shape, jax.dtypes.float0),
    )


_compute.defvjp(_forward, _backward)
