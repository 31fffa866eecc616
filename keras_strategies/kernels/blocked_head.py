"""Losses of a model over blocks of words, without other code in the model.

While a step is traced, the marked layer's logits remember what they are
computed from. The loss and the most probable words are then computed from that,
and the compiler removes the logits, which nothing reads.
"""

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.tensor_attributes import (
    get_tensor_attr,
    set_tensor_attr,
)
from keras.src.metrics.reduction_metrics import MeanMetricWrapper

from keras_strategies._types import Array, Tree
from keras_strategies.cluster.checks import check_number
from keras_strategies.keras_bridge.patches import Patch, replacement
from keras_strategies.kernels.equal_blocks import get_graph
from keras_strategies.kernels.linear_cross_entropy import (
    BLOCK_SIZE,
    Options,
    compute_losses,
)
from keras_strategies.kernels.mapped_kernels import current_trace

_HEAD = "_ks_head"

_block_sizes: Any = weakref.WeakKeyDictionary()
"""The number of words in a block, by marked layer."""


def blocked_head(
    model: keras.Model, *, block_size: int = BLOCK_SIZE
) -> keras.Layer:
    """Makes steps compute a model's loss without storing all logits.

    The model must end in a `Dense` layer without an activation, or in a
    `ReversibleEmbedding`, as the `CausalLM` tasks of keras-hub do. In a
    strategy's `fit` and `evaluate`, the loss `SparseCategoricalCrossentropy`
    with `from_logits=True`, and the metric `SparseCategoricalAccuracy`, are
    computed by `ks.experimental.linear_cross_entropy`. Other losses and metrics
    read all logits, with a warning. Weights, checkpoints and `predict` are as
    before.

    Args:
      model: A functional or sequential model with one output.
      block_size: Number of words in a block, rounded up to a multiple of 128.

    Returns:
      The layer that computes the logits.

    Raises:
      ValueError: if the model does not end in such a layer, or the block size
        is not positive.

    Example:
      ```python
      with strategy.scope():
          words = keras.Input((None,), dtype="int32")
          embedding = keras.layers.ReversibleEmbedding(1000, 8)
          hidden = keras.layers.Dense(8, "gelu")(embedding(words))
          model = keras.Model(words, embedding(hidden, reverse=True))
          ks.experimental.blocked_head(model)
          loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
          model.compile("adam", loss)
      ```

    """
    layer, last = _find_head(model)
    if layer is None:
        raise ValueError(
            "The model must be functional or sequential, and end in a `Dense` "
            "layer without an activation or a `ReversibleEmbedding`, that is "
            f"not quantized. Received: {type(model).__name__} {model.name!r}, "
            f"which ends in {type(last).__name__}. Use "
            "`ks.experimental.linear_cross_entropy` in its `compute_loss`."
        )
    fix = "Omit it for the default."
    check_number("`block_size`", block_size, fix, above=0)
    _block_sizes[layer] = block_size
    return layer


def count_logit_bytes(model: keras.Model, labels: Tree) -> int:
    """Returns the bytes of logits that `blocked_head` would not store.

    These are the logits and their gradient. 0 if it cannot be used.

    Args:
      model: A compiled model.
      labels: The labels of a step, or their shape.
    """
    layer, _ = _find_head(model)
    config = _read_config(getattr(model, "loss", None))
    if layer is None or layer in _block_sizes or not config:
        return 0
    (logits,) = get_graph(model).outputs
    item = jnp.dtype(layer.compute_dtype).itemsize
    return 2 * labels.size * logits.shape[-1] * item


def _find_head(model: keras.Model) -> tuple[Any, Any]:
    """Returns the layer that computes logits, or None, and the last layer."""
    outputs = getattr(get_graph(model), "outputs", None) or [None]
    history = getattr(outputs[0], "_keras_history", None)
    layer = None if history is None else history.operation
    is_head = len(outputs) == 1 and _has_plain_logits(layer)
    return layer if is_head else None, layer


def _read_config(loss: object) -> dict[str, Any]:
    """Returns the configuration of a cross-entropy of logits; of others, {}."""
    if type(loss) is not keras.losses.SparseCategoricalCrossentropy:
        return {}
    config = loss.get_config()
    return config if config["from_logits"] else {}


def _has_plain_logits(layer: Any) -> bool:
    is_dense = isinstance(layer, keras.layers.Dense)
    is_plain = is_dense and layer.activation is keras.activations.linear
    is_tied = isinstance(layer, keras.layers.ReversibleEmbedding)
    return (is_plain or is_tied) and layer.quantization_mode is None


class _Head:
    """The head and the inputs of logits.

    Args:
      layer: The layer that computes them.
      hidden: The layer's inputs.

    Attributes:
      words: The most probable words, once the losses are computed.
    """

    def __init__(self, layer: Any, hidden: Array) -> None:
        self._layer = layer
        self._hidden = jnp.asarray(hidden, layer.compute_dtype)
        self.words: Array | None = None

    def compute_losses(self, labels: Array, smoothing: float) -> Array:
        """Returns the loss of each label."""
        layer, hidden, is_tied = self._layer, self._hidden, False
        if isinstance(layer, keras.layers.Dense):
            kernel, bias, cap = layer.kernel, layer.bias, None
        else:
            is_tied, bias, cap = layer.tie_weights, None, layer.logit_soft_cap
            kernel = layer.embeddings if is_tied else layer.reverse_embeddings
            hidden = hidden.astype(layer.reverse_dtype or hidden.dtype)
        options = Options(int(not is_tied), cap, smoothing, _block_sizes[layer])
        losses, self.words = compute_losses(
            hidden, jnp.asarray(kernel), bias, labels, options
        )
        return losses


def find_head_patches() -> Iterator[Patch]:
    """Yields the patches by which steps use marked layers, if there are any."""
    if _block_sizes:
        yield keras.Layer, "__call__", _call_layer
        yield keras.losses.Loss, "__call__", _call_loss
        yield MeanMetricWrapper, "update_state", _update_accuracy
        yield keras.Model, "compute_loss_and_updates", _compute_loss_and_updates


@replacement
def _call_layer(
    original: Callable[..., Any], layer: Any, *args: Tree, **kwargs: Tree
) -> Any:
    logits = original(layer, *args, **kwargs)
    if current_trace() is None or layer not in _block_sizes:
        return logits
    is_table = isinstance(layer, keras.layers.Embedding)
    is_lookup = is_table and not kwargs.get("reverse")
    # The layer may have been quantized since it was marked.
    if args and not is_lookup and _has_plain_logits(layer):
        set_tensor_attr(logits, _HEAD, _Head(layer, args[0]))
    return logits


@replacement
def _call_loss(
    original: Callable[..., Any],
    loss: Any,
    y_true: Tree,
    y_pred: Tree,
    sample_weight: Tree = None,
) -> Any:
    head = get_tensor_attr(y_pred, _HEAD)
    if head is None or current_trace() is None:
        return original(loss, y_true, y_pred, sample_weight)
    if not (config := _read_config(loss)):
        _warn(f"The loss {type(loss).__name__!r} reads")
        return original(loss, y_true, y_pred, sample_weight)
    labels = jnp.asarray(y_true).astype(int).reshape(y_pred.shape[:-1])
    # Keras 3.15 has no label smoothing.
    losses = head.compute_losses(labels, config.get("label_smoothing", 0.0))
    set_keras_mask(losses, get_keras_mask(y_pred))
    loss = _Losses(loss, config["ignore_class"])
    return original(loss, labels, losses, sample_weight)


class _Losses(keras.losses.Loss):
    """The reduction of another loss, whose values are known."""

    def __init__(self, loss: Any, ignored: int | None) -> None:
        super().__init__(loss.name, loss.reduction, loss.dtype)
        self._ignored = ignored

    def call(self, y_true: Any, y_pred: Any) -> Any:
        if self._ignored is not None:
            is_used = y_true != self._ignored
            y_pred = jnp.where(is_used, y_pred, 0.0)
            set_keras_mask(y_pred, is_used)
        return y_pred


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Words:
    """The most probable words, in place of the logits, for the accuracy.

    Attributes:
      words: Their ids, of the labels' shape.
      mask: The mask of the logits, or None.
    """

    words: Array
    mask: Array | None


@replacement
def _compute_loss_and_updates(
    original: Callable[..., Any], model: Any, *args: Tree, **kwargs: Tree
) -> Any:
    loss, (unscaled, y_pred, *state) = original(model, *args, **kwargs)
    head = get_tensor_attr(y_pred, _HEAD)
    words = None if head is None else head.words
    if words is not None and not _has_own_steps(type(model)):
        # Keras computes the metrics where neither the head nor its inputs
        # can be read.
        compiled = model._compile_metrics
        accuracy = keras.metrics.SparseCategoricalAccuracy
        metrics = [] if compiled is None else compiled.metrics
        others = [metric for metric in metrics if type(metric) is not accuracy]
        for metric in others:
            _warn(f"The metric {metric.name!r} reads")
        if not others:
            y_pred = _Words(words, get_keras_mask(y_pred))
    return loss, (unscaled, y_pred, *state)


def _has_own_steps(cls: type) -> bool:
    """Returns whether a model's own code may read its predictions."""
    names = ("train_step", "test_step", "compute_metrics")
    return any(getattr(cls, n) is not getattr(keras.Model, n) for n in names)


@replacement
def _update_accuracy(
    original: Callable[..., Any],
    metric: Any,
    y_true: Tree,
    y_pred: Tree,
    sample_weight: Tree = None,
) -> object:
    if not isinstance(y_pred, _Words):
        return original(metric, y_true, y_pred, sample_weight)
    labels = jnp.reshape(y_true, y_pred.words.shape)
    # Of two words, the first one is right where the most probable one is.
    is_right = (y_pred.words == labels).astype("float32")
    logits = jnp.stack([is_right, 1.0 - is_right], axis=-1)
    set_keras_mask(logits, y_pred.mask)
    return original(metric, jnp.zeros_like(labels), logits, sample_weight)


def _warn(reader: str) -> None:
    warnings.warn(
        f"{reader} all logits, so the step stores them in spite of "
        "`ks.experimental.blocked_head`. Use "
        "`SparseCategoricalCrossentropy(from_logits=True)` and "
        "`SparseCategoricalAccuracy()`.",
        stacklevel=2,
    )
