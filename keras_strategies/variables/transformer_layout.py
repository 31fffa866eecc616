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
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import keras

from keras_strategies.cluster.checks import check_number
from keras_strategies.variables.transformer_structures import (
    MODEL,
    Axes,
    choose_axes,
    strip_number,
)

Layout = Any
"""A value of a layout map: axes, or a function from a shape to axes."""

_Group = list[tuple[Axes, keras.Variable]]
"""The variables that a pattern matches: pairs of a variable's axes and it."""

_WARNED_SHARE = 0.05
_WARNED_SIZE = 2**14


@dataclasses.dataclass(frozen=True)
class ByShape:
    """A layout that chooses a variable's axes by the variable's shape.

    Attributes:
      wider: The axes of a variable whose last dimension is at least as large as
        the first.
      narrower: The axes of all other variables.
      cores: The number of cores. A variable is replicated if the dimension to
        shard is not a multiple of this number.
    """

    wider: Axes
    narrower: Axes
    cores: int

    def __call__(self, shape: Sequence[int]) -> Axes:
        """Returns the mesh axis, or None, for each dimension of a variable."""
        axes = self.wider if shape[-1] >= shape[0] else self.narrower
        return axes if _fits(axes, shape, self.cores) else (None,) * len(shape)


@dataclasses.dataclass(frozen=True)
class ByExactShape:
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
    0.5 percent of the bytes are sharded along their wide dimension. Warns about
    variables with at least 5 percent of the bytes that belong to no recognized
    layer and could be sharded.

    Args:
      model: A built model, for example one created outside of the strategy's
        scope. It is not changed. The keys of the map are patterns that ignore
        the numbers in layer names, so the map of a small model also fits a
        large model of the same architecture.
      cores: The number of cores of a replica: `num_cores_per_replica` of a
        device assignment.

    Returns:
      A mapping to pass as `layout_map` of `TPUStrategy`. For each pattern it
      contains a tuple with None or "model" for each dimension. If layers with
      the same name are sharded differently, it contains a function from a shape
      to such a tuple instead.

    Raises:
      TypeError: if `model` is not a model, or `cores` is not an integer.
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
    _check_model(model)
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
        axes = [chosen.get(id(v), (None,) * len(v.shape)) for v in variables]
        group = list(zip(axes, variables, strict=True))
        layout = _make_layout(group, cores)
        if layout is not None:
            layouts[pattern] = layout
    if not layouts:
        raise ValueError(
            "`cores` must divide the number of heads, the width of dense "
            f"layers or the size of the vocabulary. Received: cores={cores}, "
            f"which divides none of them in the model {model.name!r}. Pass a "
            "divisor of the number of heads."
        )
    for pattern, variables in by_pattern.items():
        whole = [
            v
            for v in variables
            # Heads that the cores cannot share are replicated.
            if any(chosen.get(id(v), "?"))
            and not any(_apply(layouts.get(pattern), v))
        ]
        _warn_of_whole(pattern, whole, shares, cores)
    return _match_nested(layouts, [v.path for v in model.variables])


def _check_model(model: object) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`transformer_layout` expects a `keras.Model`. Received: an object "
            f"of type {type(model).__name__}. Pass a model."
        )
    if not model.built or not model.variables:
        raise ValueError(
            "`transformer_layout` expects a built model. Received: the model "
            f"{model.name!r} without variables. Call it on one batch first, or "
            "start it with a `keras.Input`."
        )


def _measure_shares(
    by_pattern: Mapping[str, Sequence[keras.Variable]],
) -> dict[int, float]:
    """Returns the share of the model's bytes of each variable's pattern."""
    sizes = {
        pattern: sum(
            math.prod(v.shape) * jnp.dtype(v.dtype).itemsize for v in variables
        )
        for pattern, variables in by_pattern.items()
    }
    total = sum(sizes.values())
    return {
        id(v): sizes[pattern] / total
        for pattern, variables in by_pattern.items()
        for v in variables
    }


def _make_layout(group: _Group, cores: int) -> Layout | None:
    """Makes the layout for the variables that a pattern matches.

    Args:
      group: The variables.
      cores: See `ByShape`.

    Returns:
      The value for the layout map, or None if the variables are replicated.
    """
    fitting = _unify(
        [
            (axes if _fits(axes, v.shape, cores) else (None,) * len(axes), v)
            for axes, v in group
        ],
        cores,
    )
    kinds = {axes for axes, _ in fitting if any(axes)}
    candidates: list[Layout] = []
    if len(kinds) == 1:
        (axes,) = kinds
        candidates += [axes, ByShape(axes, axes, cores)]
    elif kinds == {(None, MODEL), (MODEL, None)}:
        candidates += [ByShape((None, MODEL), (MODEL, None), cores)]
    # Whether a vector should be sharded cannot be seen from its size.
    if kinds and all(len(axes) > 1 for axes in kinds):
        by_shape = {tuple(v.shape): axes for axes, v in fitting}
        candidates += [ByExactShape(tuple(sorted(by_shape.items())))]
    for layout in candidates:
        is_vector = isinstance(layout, ByShape) and len(layout.wider) == 1
        if not is_vector and all(_apply(layout, v) == a for a, v in fitting):
            return layout
    return None


def _unify(group: _Group, cores: int) -> _Group:
    """Gives matrices of one shape the same axes, if all are to be sharded.

    Neither their names nor their shapes tell the layers into heads from those
    out of them.
    """
    by_width = ByShape((None, MODEL), (MODEL, None), cores)
    wanted: dict[tuple[int, ...], set[Axes]] = {}
    for axes, variable in group:
        wanted.setdefault(tuple(variable.shape), set()).add(axes)
    mixed = {
        shape
        for shape, axes in wanted.items()
        if len(shape) == 2 and len(axes) > 1 and all(map(any, axes))
    }
    return [
        (by_width(v.shape) if tuple(v.shape) in mixed else axes, v)
        for axes, v in group
    ]


def _apply(layout: Layout, variable: keras.Variable) -> Axes:
    """Returns the axes that a layout gives a variable."""
    if layout is None:
        return (None,) * len(variable.shape)
    axes: Any = layout(variable.shape) if callable(layout) else layout
    return axes


def _warn_of_whole(
    pattern: str,
    variables: Sequence[keras.Variable],
    shares: Mapping[int, float],
    cores: int,
) -> None:
    """Warns if large variables are replicated that could be sharded.

    Args:
      pattern: The pattern that matches the variables.
      variables: Variables that belong to no known structure.
      shares: See `choose_axes`.
      cores: See `ByShape`.
    """
    able = [
        v
        for v in variables
        if len(v.shape) > 1 and any(n % cores == 0 for n in v.shape)
    ]
    size = sum(math.prod(v.shape) for v in able)
    if size < _WARNED_SIZE or shares[id(able[0])] < _WARNED_SHARE:
        return
    shape = tuple(able[0].shape)
    dim = max(
        range(len(shape)), key=lambda d: (shape[d] % cores == 0, shape[d])
    )
    axes = tuple(MODEL if d == dim else None for d in range(len(shape)))
    warnings.warn(
        "`transformer_layout` must recognize a layer to shard its variables. "
        f"Received: {able[0].path!r} of shape {shape}, one of {len(able)} such "
        f"variables with {shares[id(able[0])]:.0%} of the weights' bytes. They "
        "are replicated on every core. Name the layer's sublayers as "
        "in `keras.layers.MultiHeadAttention`, or add the variables to the "
        f"map: layout_map[{pattern!r}] = {axes}.",
        stacklevel=3,
    )


def _fits(axes: Axes, shape: Sequence[int], cores: int) -> bool:
    return len(axes) == len(shape) and all(
        axis is None or size % cores == 0
        for axis, size in zip(axes, shape, strict=True)
    )


def _make_pattern(path: str) -> str:
    """Makes a regular expression that ignores the layer numbers in a path."""
    *layers, name = path.split("/")
    parts = [re.escape(strip_number(part)) + r"(_\d+)?" for part in layers]
    return "/".join([*parts, re.escape(name)])


def _match_nested(
    layouts: dict[str, Layout], paths: Sequence[str]
) -> dict[str, Layout]:
    """Makes patterns also match paths that are nested in other layers.

    Returns:
      The layouts by their new patterns. A pattern stays unchanged if its nested
      version would match other paths of the model.
    """
    nested = {}
    for pattern, layout in layouts.items():
        matched = {path for path in paths if re.fullmatch(pattern, path)}
        inner = rf"(.*/)?{pattern}"
        is_clear = matched == {p for p in paths if re.fullmatch(inner, p)}
        nested[inner if is_clear else pattern] = layout
    return nested
