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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras

from keras_strategies.cluster.checks import check_number

Axes = tuple[str | None, ...]
Layout = Any
"""A value of a layout map: axes, or a function from a shape to axes."""

_MODEL = "model"
_OF = r"(_?(dense|proj|projector|projection))?"
_INTO_HEADS = re.compile(rf"(query|key|value|gate|q|k|v){_OF}")
_ALL_INTO_HEADS = re.compile(rf"(query_key_value|qkv){_OF}")
_OUT_OF_HEADS = re.compile(rf"(attention_output|attn_output|output|out|o){_OF}")


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

    Attention is recognized by layer names, as in Keras's `MultiHeadAttention`
    and `GroupQueryAttention` and in keras-hub models.

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
    cure = "Pass the number of cores of a replica."
    check_number("cores", cores, cure, least=1, is_optional=False)
    chosen = _choose_axes(model)
    groups: dict[str, list[tuple[Axes, keras.Variable]]] = {}
    for variable in model.variables:
        axes = chosen.get(id(variable), (None,) * len(variable.shape))
        pattern = _make_pattern(variable.path)
        groups.setdefault(pattern, []).append((axes, variable))
    layouts = {p: _make_layout(group, cores) for p, group in groups.items()}
    layouts = {p: layout for p, layout in layouts.items() if layout is not None}
    if not layouts:
        raise ValueError(
            "`cores` must divide the number of heads, the width of dense "
            f"layers or the size of the vocabulary. Received: cores={cores}, "
            f"which divides none of them in the model {model.name!r}. Pass a "
            "divisor of the number of heads."
        )
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


def _choose_axes(model: keras.Model) -> dict[int, Axes]:
    """Returns the axes of the variables to shard, by variable id.

    Raises:
      ValueError: if the model has no attention.
    """
    by_id: dict[int, Axes] = {}
    has_attention = False
    for parent in model._flatten_layers():
        if isinstance(parent, keras.layers.Embedding):
            by_id |= _find_table(parent)
        children = list(
            parent._flatten_layers(include_self=False, recursive=False)
        )
        if not children:
            by_id |= _find_experts(parent)
        projections = list(_find_projections(children))
        in_attention = _find_attention(projections)
        has_attention |= bool(in_attention)
        for projection in projections:
            if id(projection) in in_attention:
                is_first = in_attention[id(projection)]
            else:
                is_first = _is_first_of_two(projection, projections)
            if is_first is not None:
                by_id |= projection.make_axes(over_columns=is_first)
    if not has_attention:
        raise ValueError(
            "A transformer must have layers with projections of queries and "
            f"values. Received: the model {model.name!r}, in which no layer "
            "has sublayers named 'query' and 'value'. Name the sublayers of "
            "user-defined attention 'query', 'key', 'value' and "
            "'attention_output', or write a `layout_map` for the model."
        )
    return by_id


@dataclasses.dataclass(frozen=True, eq=False)
class _Projection:
    """A dense layer, and which of its kernel's dimensions are rows or columns.

    Attributes:
      layer: A `Dense` or `EinsumDense`.
      kernel: Its kernel.
      columns: The kernel's dimensions that are also dimensions of the output,
        in the order of the output.
      rows: The kernel's dimensions over which the layer sums, in the order of
        the input.
    """

    layer: Any
    kernel: keras.Variable
    columns: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def name(self) -> str:
        """The layer's name without its number."""
        return _strip_number(self.layer.name)

    @property
    def sizes(self) -> tuple[int, int]:
        """The kernel's input and output sizes, each a product of dimensions."""
        shape = self.kernel.shape
        size_in, size_out = (
            math.prod(shape[dim] for dim in dims)
            for dims in (self.rows, self.columns)
        )
        return size_in, size_out

    def make_axes(self, *, over_columns: bool) -> dict[int, Axes]:
        """Returns axes that shard the variables along columns or rows."""
        dim = (self.columns if over_columns else self.rows)[0]
        rank = len(self.kernel.shape)
        of_kernel = tuple(_MODEL if d == dim else None for d in range(rank))
        by_name: dict[str, Axes] = {
            "kernel": of_kernel,
            "lora_kernel_a": (*of_kernel[:-1], None),
            "lora_kernel_b": (None, of_kernel[-1]),
        }
        bias = getattr(self.layer, "bias", None)
        if bias is not None and over_columns:
            # A bias has the output's last dimensions, which include the
            # columns.
            num_others = len(bias.shape) - len(self.columns)
            if num_others >= 0:
                by_name["bias"] = (
                    *[None] * num_others,
                    *(of_kernel[column] for column in self.columns),
                )
        return _select_by_name(self.layer, by_name)


def _find_projections(layers: Iterable[Any]) -> Iterator[_Projection]:
    for layer in layers:
        kernels = [v for v in layer.variables if v.name == "kernel"]
        if isinstance(layer, keras.layers.Dense):
            columns, rows = (1,), (0,)
        elif isinstance(layer, keras.layers.EinsumDense):
            columns, rows = _parse_equation(layer.equation)
        else:
            continue
        if len(kernels) != 1 or not columns or not rows:
            continue
        # A packed kernel, such as a four-bit kernel, has other dimensions.
        if len(kernels[0].shape) == len(columns) + len(rows):
            yield _Projection(layer, kernels[0], columns, rows)


def _parse_equation(equation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the kernel's column dimensions and its row dimensions."""
    inputs, kernel, output = re.split(",|->", re.sub(r"[.\s]", "", equation))
    columns = [kernel.index(a) for a in output if a in kernel]
    rows = [kernel.index(a) for a in inputs if a in kernel and a not in output]
    return tuple(columns), tuple(rows)


def _find_attention(projections: Sequence[_Projection]) -> dict[int, bool]:
    """Finds the attention projections among the layers of a parent layer.

    Returns:
      A dict that maps a projection's id to whether the heads are in the columns
      of its kernel (otherwise they are in the rows). Empty if the layers do
      not form an attention layer.
    """
    first = [
        p
        for p in projections
        if _INTO_HEADS.fullmatch(p.name) or _ALL_INTO_HEADS.fullmatch(p.name)
    ]
    kinds = {p.name[0] for p in first}
    is_attention = {"q", "v"} <= kinds or any(
        _ALL_INTO_HEADS.fullmatch(p.name) for p in first
    )
    if not is_attention:
        return {}
    last = [p for p in projections if _OUT_OF_HEADS.fullmatch(p.name)]
    return {id(p): True for p in first} | {id(p): False for p in last}


def _is_first_of_two(
    projection: _Projection, siblings: Sequence[_Projection]
) -> bool | None:
    """Returns whether a dense layer is the widening layer of a pair.

    A pair is two dense layers of the same parent layer. The narrowing layer
    has the input and output sizes of the widening layer in reverse.

    Returns:
      True for the widening layer, False for the narrowing layer of a pair, and
      None if the layer is not in a pair.
    """
    size_in, size_out = projection.sizes
    if size_in == size_out:
        return None
    if not any(p.sizes == (size_out, size_in) for p in siblings):
        return None
    return size_out > size_in


def _find_table(layer: keras.layers.Embedding) -> dict[int, Axes]:
    return _select_by_name(
        layer,
        {
            "embeddings": (_MODEL, None),
            "lora_embeddings_a": (_MODEL, None),
            "reverse_embeddings": (None, _MODEL),
        },
    )


def _find_experts(layer: keras.Layer) -> dict[int, Axes]:
    """Returns the axes of stacked kernels of shape (experts, rows, columns)."""
    stacked = [v for v in layer.variables if len(v.shape) == 3]
    sizes = {tuple(v.shape) for v in stacked}
    by_id: dict[int, Axes] = {}
    for variable in stacked:
        experts, rows, columns = variable.shape
        if rows != columns and (experts, columns, rows) in sizes:
            over = (_MODEL, None) if rows > columns else (None, _MODEL)
            by_id[id(variable)] = (None, *over)
    return by_id


def _select_by_name(
    layer: keras.Layer, axes: dict[str, Axes]
) -> dict[int, Axes]:
    return {
        id(v): axes[v.name]
        for v in layer.variables
        if len(axes.get(v.name, ())) == len(v.shape) > 0
    }


def _make_layout(
    group: Sequence[tuple[Axes, keras.Variable]], cores: int
) -> Layout | None:
    """Makes the layout for the variables that a pattern matches.

    Args:
      group: The variables: pairs of a variable's axes and the variable.
      cores: See `ByShape`.

    Returns:
      The value for the layout map, or None if the variables are replicated.
    """
    kinds = {axes for axes, _ in group if any(axes)}
    fit = [_fits(axes, variable.shape, cores) for axes, variable in group]
    if not any(f for (axes, _), f in zip(group, fit, strict=True) if any(axes)):
        return None
    if len(kinds) == 1:
        (axes,) = kinds
        if all(fit) and all(a == axes for a, _ in group):
            return axes
        # Whether a vector should be sharded cannot be seen from its size.
        return ByShape(axes, axes, cores) if len(axes) > 1 else None
    if kinds == {(None, _MODEL), (_MODEL, None)}:
        return ByShape((None, _MODEL), (_MODEL, None), cores)
    return None


def _fits(axes: Axes, shape: Sequence[int], cores: int) -> bool:
    return len(axes) == len(shape) and all(
        axis is None or size % cores == 0
        for axis, size in zip(axes, shape, strict=True)
    )


def _make_pattern(path: str) -> str:
    """Makes a regular expression that ignores the layer numbers in a path."""
    *layers, name = path.split("/")
    parts = [re.escape(_strip_number(part)) + r"(_\d+)?" for part in layers]
    return "/".join([*parts, re.escape(name)])


def _strip_number(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


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
