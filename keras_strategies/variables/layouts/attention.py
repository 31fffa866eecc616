"""Recognizes the projections of attention, and how many heads they have."""

import re
from collections.abc import Sequence

import keras

from keras_strategies.variables.layouts.projections import (
    Axes,
    Projection,
    is_convolution,
)

_OF = r"(_?(dense|proj|projector|projection|layer))*\d*"
_INTO_HEADS = re.compile(rf"(query|key|value|gate|q|k|v){_OF}")
_ALL_INTO_HEADS = re.compile(rf"(\w+_)?(query_key_value|qkv){_OF}")
_OUT_OF_HEADS = re.compile(
    rf"(attention_|attn_)?(output|out|o|proj|projection){_OF}"
)
_HEADS = re.compile(r"(\w*_)?heads")
_OF_KEYS = re.compile(r"(\w*_)?(key|kv|k|v|value)_(\w*_)?heads")


def find_attention(
    parent: keras.Layer, siblings: Sequence[Projection], cores: int
) -> dict[int, Axes]:
    """Returns the axes of the attention projections among a layer's sublayers.

    A projection whose number of heads is not a multiple of `cores` has axes
    that replicate its kernel.

    Args:
      parent: The layer.
      siblings: The projections among its sublayers.
      cores: The number of cores that share the heads.

    Returns:
      A dict from a variable's id to its axes. Empty if the layer is not
      attention.
    """
    projections = [p for p in siblings if not is_convolution(p.layer)]
    first = {id(p): kind for p in projections if (kind := _find_kind(p))}
    if not {"q", "v"} <= {*first.values()} and "all" not in first.values():
        return {}
    into = [p for p in projections if id(p) in first]
    shapes = {p.kernel.shape for p in into if len(p.columns) > 1}
    by_id: dict[int, Axes] = {}
    for p in projections:
        # Positions may be projected into the same heads.
        into_heads = id(p) in first or p.kernel.shape in shapes
        if not into_heads and not _is_out_of_heads(p, into, projections):
            continue
        kind = first.get(id(p), "q")
        if len(p.kernel.shape) == 2 and not _has_heads(parent, kind, cores):
            by_id |= p.keep_whole()
        elif _is_divisible(p, into_heads, cores):
            by_id |= p.make_axes(over_columns=into_heads)
        else:
            by_id |= p.keep_whole()
    return by_id


def _find_kind(projection: Projection) -> str:
    """Returns "q", "k", "v", "g" or "all" for a projection into heads."""
    for name in projection.names:
        if _ALL_INTO_HEADS.fullmatch(name):
            return "all"
        if _INTO_HEADS.fullmatch(name):
            return name[0]
    return ""


def _is_out_of_heads(
    projection: Projection,
    into: Sequence[Projection],
    siblings: Sequence[Projection],
) -> bool:
    if any(_OUT_OF_HEADS.fullmatch(name) for name in projection.names):
        return True
    # The only other projection, which leads back to the width of the input.
    size_in, size_out = projection.sizes
    is_only = len(siblings) == len(into) + 1
    return is_only and any(p.sizes == (size_out, size_in) for p in into)


def _has_heads(parent: keras.Layer, kind: str, cores: int) -> bool:
    """Returns whether cores can share the heads in a kernel of two dimensions.

    The kernel does not show the number of heads: an attribute of the layer
    does. Without such an attribute, the answer is True.
    """
    counts = {
        name: value
        for name, value in vars(parent).items()
        if _HEADS.fullmatch(name) and type(value) is int
    }
    of_keys = [n for name, n in counts.items() if _OF_KEYS.fullmatch(name)]
    others = [n for name, n in counts.items() if not _OF_KEYS.fullmatch(name)]
    if kind == "all":
        chosen = [*of_keys, *others]
    elif kind in ("k", "v"):
        chosen = of_keys or others
    else:
        chosen = others or of_keys
    return all(count % cores == 0 for count in chosen)


def _is_divisible(
    projection: Projection, over_columns: bool, cores: int
) -> bool:
    dims = projection.columns if over_columns else projection.rows
    return projection.kernel.shape[dims[0]] % cores == 0
