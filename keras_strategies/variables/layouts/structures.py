"""Recognizes a transformer's layers, and chooses axes for their variables."""

from collections.abc import Iterable, Mapping, Sequence

import keras

from keras_strategies.variables.layouts.attention import find_attention
from keras_strategies.variables.layouts.projections import (
    MODEL,
    Axes,
    Projection,
    find_projections,
    is_convolution,
    select_by_name,
)

LARGE = 0.005
"""The share of a model's bytes from which other kernels are sharded, too."""


def choose_axes(
    model: keras.Model, cores: int, shares: Mapping[int, float]
) -> dict[int, Axes]:
    """Returns the axes of a transformer's variables, by variable id.

    Args:
      model: The model.
      cores: The number of cores that share its variables.
      shares: By variable id, the share of the model's bytes that the variable
        holds together with the same variables of equal layers.

    Returns:
      The axes. Attention projections whose heads the cores cannot share have
      axes of None. Variables that belong to no structure have no entry.

    Raises:
      ValueError: if the model has no attention.
    """
    by_id: dict[int, Axes] = {}
    others: list[Projection] = []
    has_attention = False
    for parent in model._flatten_layers():
        if isinstance(parent, keras.layers.Embedding):
            by_id |= _find_table(parent, cores, shares)
        children = list(
            parent._flatten_layers(include_self=False, recursive=False)
        )
        if not children:
            by_id |= _find_experts(parent, cores)
        projections = list(find_projections(parent, children))
        of_attention = find_attention(parent, projections, cores)
        has_attention |= bool(of_attention)
        by_id |= of_attention
        rest = [p for p in projections if id(p.kernel) not in of_attention]
        by_id |= _find_pairs(rest)
        others += rest
    if not has_attention:
        raise ValueError(
            "A transformer must have layers with projections of queries and "
            f"values. Received: the model {model.name!r}, in which no layer "
            "has dense sublayers named 'query' and 'value' ('q' and 'v', or "
            "'qkv'). Name the sublayers of user-defined attention 'query', "
            "'key', 'value' and 'attention_output', or write a `layout_map` "
            "for the model."
        )
    # A layer may be held by several parents, one of which knows its structure.
    alone = [p for p in others if id(p.kernel) not in by_id]
    return by_id | _find_large(alone, cores, shares)


def _find_pairs(siblings: Sequence[Projection]) -> dict[int, Axes]:
    """Returns the axes of pairs of dense layers of the same parent layer.

    The second layer of a pair has the input and output sizes of the first in
    reverse. One of them widens its input, and the other narrows it.
    """
    dense = [p for p in siblings if not is_convolution(p.layer)]
    sizes = {p.sizes for p in dense}
    by_id: dict[int, Axes] = {}
    for projection in dense:
        size_in, size_out = projection.sizes
        if size_in != size_out and (size_out, size_in) in sizes:
            by_id |= projection.make_axes(over_columns=size_out > size_in)
    return by_id


def _find_large(
    projections: Iterable[Projection],
    cores: int,
    shares: Mapping[int, float],
) -> dict[int, Axes]:
    """Returns the axes of large kernels that belong to no other structure.

    A kernel that widens its input is sharded along its columns, and one that
    narrows it along its rows, like the layers of a pair.
    """
    by_id: dict[int, Axes] = {}
    for projection in projections:
        size_in, size_out = projection.sizes
        # Heads, routers and the kernels of patches are narrow.
        is_narrow = min(size_in, size_out) < 4 * cores
        if is_narrow or shares[id(projection.kernel)] < LARGE:
            continue
        is_wide = size_out >= size_in or is_convolution(projection.layer)
        for over_columns in (is_wide, not is_wide):
            dims = projection.columns if over_columns else projection.rows
            if projection.kernel.shape[dims[0]] % cores == 0:
                by_id |= projection.make_axes(over_columns=over_columns)
                break
    return by_id


def _find_table(
    layer: keras.layers.Embedding, cores: int, shares: Mapping[int, float]
) -> dict[int, Axes]:
    """Returns the axes of a table: its rows, or the width of a large table."""
    axes: Axes = (MODEL, None)
    is_large = any(shares.get(id(v), 0) >= LARGE for v in layer.variables)
    if layer.input_dim % cores and is_large and not layer.output_dim % cores:
        axes = (None, MODEL)
    return select_by_name(
        layer,
        {
            "embeddings": axes,
            "lora_embeddings_a": (axes[0], None),
            "lora_embeddings_b": (None, axes[1]),
            "reverse_embeddings": axes[::-1],
        },
    )


def _find_experts(layer: keras.Layer, cores: int) -> dict[int, Axes]:
    """Returns the axes of stacked kernels of shape (experts, rows, columns).

    The wide dimension is sharded. If one kernel holds two kernels side by side
    (of gates and values), the experts are sharded.
    """
    stacked = [v for v in layer.variables if len(v.shape) == 3]
    sizes = {tuple(v.shape) for v in stacked}
    by_id: dict[int, Axes] = {}
    for variable in stacked:
        experts, rows, columns = variable.shape
        if rows != columns and (experts, columns, rows) in sizes:
            over = (MODEL, None) if rows > columns else (None, MODEL)
            by_id[id(variable)] = (None, *over)
        elif experts % cores == 0 and (
            columns % 2 == 0
            and (experts, columns // 2, rows) in sizes
            or (experts, columns, 2 * rows) in sizes
        ):
            by_id |= {
                id(v): (MODEL, *(None,) * (len(v.shape) - 1))
                for v in layer.variables
                if v.shape and v.shape[0] == experts
            }
    return by_id
