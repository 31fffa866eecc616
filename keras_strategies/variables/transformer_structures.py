"""Recognizes a transformer's layers, and chooses axes for their variables."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras

from keras_strategies.variables.layout_map import Axes

MODEL = "model"


@dataclasses.dataclass(frozen=True, eq=False)
class Projection:
    """A dense layer, and which of its kernel's dimensions are rows or columns.

    Attributes:
      layer: A `Dense` or `EinsumDense`, or a convolution.
      kernel: Its kernel.
      columns: The kernel's dimensions that are also dimensions of the output,
        in the order of the output.
      rows: The kernel's dimensions over which the layer sums, in the order of
        the input.
      names: The layer's name without its number, and the names of the parent
        layer's attributes that hold the layer.
    """

    layer: Any
    kernel: keras.Variable
    columns: tuple[int, ...]
    rows: tuple[int, ...]
    names: tuple[str, ...] = ()

    @property
    def sizes(self) -> tuple[int, int]:
        """The kernel's input and output sizes, each a product of dimensions."""
        shape = self.kernel.shape
        size_in = math.prod(shape[dim] for dim in self.rows)
        return size_in, math.prod(shape[dim] for dim in self.columns)

    def make_axes(self, *, over_columns: bool) -> dict[int, Axes]:
        """Returns axes that shard the variables along columns or rows."""
        dim = (self.columns if over_columns else self.rows)[0]
        rank = len(self.kernel.shape)
        kernel_axes = tuple(MODEL if d == dim else None for d in range(rank))
        by_name: dict[str, Axes] = {
            "kernel": kernel_axes,
            "lora_kernel_a": (*kernel_axes[:-1], None),
            "lora_kernel_b": (None, kernel_axes[-1]),
        }
        bias = getattr(self.layer, "bias", None)
        if bias is not None and over_columns:
            # A bias has the output's last dimensions, which include the
            # columns.
            num_others = len(bias.shape) - len(self.columns)
            if num_others >= 0:
                columns = (kernel_axes[column] for column in self.columns)
                by_name["bias"] = (*[None] * num_others, *columns)
        return select_by_name(self.layer, by_name)


def find_projections(
    parent: keras.Layer, children: Sequence[keras.Layer]
) -> Iterator[Projection]:
    """Yields the dense layers and convolutions among a layer's sublayers."""
    held = {id(child): [strip_number(child.name)] for child in children}
    for name, value in vars(parent).items():
        if id(value) in held:
            held[id(value)].append(strip_number(name.lstrip("_")))
    for layer in children:
        kernels = [v for v in layer.variables if v.name == "kernel"]
        columns, rows = _find_dimensions(layer)
        if len(kernels) != 1 or not columns or not rows:
            continue
        # A packed kernel, such as a four-bit kernel, has other dimensions.
        num_others = layer.rank if is_convolution(layer) else 0
        rank = num_others + len(columns) + len(rows)
        if len(kernels[0].shape) == rank:
            names = tuple(held[id(layer)])
            yield Projection(layer, kernels[0], columns, rows, names)


def is_convolution(layer: Any) -> bool:
    """Returns whether a layer is a convolution without groups."""
    kinds = keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D
    # Depthwise and transposed convolutions have other dimensions.
    return isinstance(layer, kinds) and layer.groups == 1


def select_by_name(
    layer: keras.Layer, axes: dict[str, Axes]
) -> dict[int, Axes]:
    """Returns axes by variable id, from axes by the variables' names."""
    return {
        id(v): axes[v.name]
        for v in layer.variables
        if len(axes.get(v.name, ())) == len(v.shape) > 0
    }


def strip_number(name: str) -> str:
    """Returns a layer's name without the number that Keras appends."""
    return re.sub(r"_\d+$", "", name)


def _find_dimensions(layer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the column dimensions and row dimensions of a layer's kernel."""
    if isinstance(layer, keras.layers.Dense):
        return (1,), (0,)
    if isinstance(layer, keras.layers.EinsumDense):
        return _parse_equation(layer.equation)
    if is_convolution(layer):
        return (layer.rank + 1,), (layer.rank,)
    return (), ()


def _parse_equation(equation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    inputs, kernel, output = re.split(",|->", re.sub(r"[.\s]", "", equation))
    columns = [kernel.index(a) for a in output if a in kernel]
    rows = [kernel.index(a) for a in inputs if a in kernel and a not in output]
    return tuple(columns), tuple(rows)


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
        attention_layout = find_attention(parent, projections, cores)
        has_attention |= bool(attention_layout)
        by_id |= attention_layout
        rest = [p for p in projections if id(p.kernel) not in attention_layout]
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
    projections: Iterable[Projection], cores: int, shares: Mapping[int, float]
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
        dims = p.columns if into_heads else p.rows
        is_shared = p.kernel.shape[dims[0]] % cores == 0
        if len(p.kernel.shape) == 2:
            is_shared = is_shared and _has_heads(parent, kind, cores)
        if is_shared:
            by_id |= p.make_axes(over_columns=into_heads)
        else:
            by_id[id(p.kernel)] = (None,) * len(p.kernel.shape)
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
    key_counts = [n for name, n in counts.items() if _OF_KEYS.fullmatch(name)]
    others = [n for name, n in counts.items() if not _OF_KEYS.fullmatch(name)]
    if kind == "all":
        chosen = [*key_counts, *others]
    elif kind in ("k", "v"):
        chosen = key_counts or others
    else:
        chosen = others or key_counts
    return all(count % cores == 0 for count in chosen)
