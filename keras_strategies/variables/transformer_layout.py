"""A layout map that shards a transformer's variables over cores.

Each core computes different attention heads. For two consecutive dense layers,
each core computes with different columns of the first kernel and the matching
rows of the second kernel. One all-reduce after the second layer combines the
results of the cores.

References:
  - Shoeybi et al., Megatron-LM (2019): https://arxiv.org/abs/1909.08053
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import keras

from keras_strategies.cluster.checks import check_number
from keras_strategies.variables.layout_map import Axes, fits
from keras_strategies.variables.transformer_structures import (
    MODEL,
    choose_axes,
    strip_number,
)

Layout = Any
"""A value of a layout map: axes, or a function from a shape to axes."""


@dataclasses.dataclass(frozen=True)
class ByShape:
    """A layout that knows the axes of some shapes, and replicates others.

    Attributes:
      axes_of_shapes: Pairs of a shape and its axes.
    """

    axes_of_shapes: tuple[tuple[tuple[int, ...], Axes], ...]

    def __call__(self, shape: Sequence[int]) -> Axes:
        """Returns the mesh axis, or None, for each dimension of a variable."""
        return dict(self.axes_of_shapes).get(tuple(shape), (None,) * len(shape))


def transformer_layout(model: keras.Model, cores: int) -> dict[str, Layout]:
    """Makes a `layout_map` that shards a transformer over a replica's cores.

    The layout shards attention heads, in the projections of queries, keys and
    values and in the output projection. If one dense layer widens its input and
    another dense layer of the same parent layer narrows it again, the layout
    shards the columns of the first kernel and the rows of the second, also for
    experts with stacked kernels. It also shards the rows of
    `keras.layers.Embedding` tables. Biases and LoRA weights are sharded like
    their kernels. Norms, positions and scales of quantized kernels are
    replicated on every core. Dimensions that are not a multiple of `cores` are
    not sharded, for example if there are too few key and value heads.

    Attention is recognized by the names of its sublayers, or of the attributes
    that hold them, as in Keras's `MultiHeadAttention` and
    `GroupQueryAttention` and in keras-hub models. Tables with at least 0.5
    percent of the bytes, whose vocabulary is not a multiple of `cores`, are
    sharded along their width. Other dense layers and convolutions with at least
    0.5 percent of the bytes are sharded along their wide dimension.

    Args:
      model: A built model, for example one created outside of the strategy's
        scope. It is not changed. The keys of the map are patterns that ignore
        the numbers in layer names, so the map also fits a model with more
        layers.
      cores: The number of cores of a replica: `num_cores_per_replica` of a
        device assignment.

    Returns:
      A mapping to pass as `layout_map` of `TPUStrategy`. For each pattern it
      contains a tuple with None or "model" for each dimension. If layers with
      the same name are sharded differently, it contains a function from a shape
      to such a tuple instead.

    Raises:
      TypeError: if `cores` is not an integer.
      ValueError: if the model is not built, has no attention, or has no
        variable that can be sharded over `cores`.

    Example:
      ```python
      x = inputs = keras.Input((8, 16))
      x = x + keras.layers.MultiHeadAttention(4, 4)(x, x)
      x = x + keras.layers.Dense(16)(keras.layers.Dense(64, "gelu")(x))
      model = keras.Model(inputs, x)
      layout_map = ks.experimental.transformer_layout(model, cores=2)
      ```

    References:
      https://arxiv.org/abs/1909.08053 (Megatron-LM)
    """
    if not model.built or not model.variables:
        raise ValueError(
            "`transformer_layout` expects a built model. Received: the model "
            f"{model.name!r} without variables. Call it on one batch first, or "
            "start it with a `keras.Input`."
        )
    fix = "Pass the number of cores of a replica."
    check_number("cores", cores, fix, minimum=1, is_optional=False)
    by_pattern: dict[str, list[keras.Variable]] = {}
    for variable in model.variables:
        pattern = _make_pattern(variable.path)
        by_pattern.setdefault(pattern, []).append(variable)
    shares = _measure_shares(by_pattern)
    chosen = choose_axes(model, cores, shares)
    layouts: dict[str, Layout] = {}
    for pattern, variables in by_pattern.items():
        layout = _make_layout(variables, chosen, cores)
        if layout is not None:
            layouts[pattern] = layout
    if not layouts:
        raise ValueError(
            "`cores` must divide the number of heads, the width of dense "
            f"layers or the size of the vocabulary. Received: cores={cores}, "
            f"which divides none of them in the model {model.name!r}. Pass a "
            "divisor of the number of heads."
        )
    return layouts


def _measure_shares(
    by_pattern: Mapping[str, Sequence[keras.Variable]],
) -> dict[int, float]:
    """Returns the share of the model's bytes of each variable's pattern."""
    sizes: dict[int, int] = {}
    for variables in by_pattern.values():
        size = sum(map(_count_bytes, variables))
        sizes |= {id(v): size for v in variables}
    total = sum(_count_bytes(v) for vs in by_pattern.values() for v in vs)
    return {key: size / total for key, size in sizes.items()}


def _count_bytes(variable: keras.Variable) -> int:
    return math.prod(variable.shape) * jnp.dtype(variable.dtype).itemsize


def _make_layout(
    variables: Sequence[keras.Variable], chosen: Mapping[int, Axes], cores: int
) -> Layout | None:
    """Makes the layout for the variables that a pattern matches.

    Args:
      variables: The variables.
      chosen: The axes of variables, by their ids.
      cores: The number of cores. A variable is replicated if the dimension to
        shard is not a multiple of this number.

    Returns:
      The value for the layout map, or None if the variables are replicated.
    """
    by_shape: dict[tuple[int, ...], set[Axes]] = {}
    for variable in variables:
        shape = tuple(variable.shape)
        replicated = (None,) * len(shape)
        axes = chosen.get(id(variable), replicated)
        fit = axes if fits(axes, shape, cores) else replicated
        by_shape.setdefault(shape, set()).add(fit)
    unified: dict[tuple[int, ...], Any] = {
        shape: _unify(shape, axes) for shape, axes in by_shape.items()
    }
    kinds = {*unified.values()}
    sharded = [axes for axes in kinds if axes and any(axes)]
    if sharded and len(kinds) == 1:
        return sharded[0]
    # Whether a vector should be sharded cannot be seen from its size.
    is_vector = any(len(axes) < 2 for axes in sharded)
    if None in kinds or not sharded or is_vector:
        return None
    return ByShape(tuple(sorted(unified.items())))


def _unify(shape: tuple[int, ...], axes: set[Axes]) -> Axes | None:
    """Returns the axes of variables of one shape; None if they differ.

    Matrices that are all to be sharded get the same axes. Neither their names
    nor their shapes tell the layers into heads from those out of them.
    """
    if len(axes) == 1:
        return next(iter(axes))
    if len(shape) != 2 or not all(map(any, axes)):
        return None
    return (None, MODEL) if shape[-1] >= shape[0] else (MODEL, None)


def _make_pattern(path: str) -> str:
    """Makes a regular expression that ignores the layer numbers in a path."""
    *layers, name = path.split("/")
    parts = [re.escape(strip_number(part)) + r"(_\d+)?" for part in layers]
    return "/".join([*parts, re.escape(name)])
