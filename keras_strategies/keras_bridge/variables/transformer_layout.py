"""A layout map for transformers: which dimension of what the cores divide.

Heads of attention, and columns and then rows of two dense layers, are
computed apart and meet once, in an all-reduce behind the second layer.

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
"""What a layout map holds: axes, or a function of a shape that gives them."""

_MODEL = "model"
_OF = r"(_?(dense|proj|projector|projection))?"
_INTO_HEADS = re.compile(rf"(query|key|value|gate|q|k|v){_OF}")
_ALL_INTO_HEADS = re.compile(rf"(query_key_value|qkv){_OF}")
_OUT_OF_HEADS = re.compile(rf"(attention_output|attn_output|output|out|o){_OF}")


@dataclasses.dataclass(frozen=True)
class ByShape:
    """Axes of variables that one pattern matches, and that differ in shape.

    Attributes:
      wider: Axes of those whose last dimension is not less than the first.
      narrower: Axes of the others.
      cores: A variable stays whole where this does not divide its dimension.
    """

    wider: Axes
    narrower: Axes
    cores: int

    def __call__(self, shape: Sequence[int]) -> Axes:
        """The axes of a variable's dimensions."""
        axes = self.wider if shape[-1] >= shape[0] else self.narrower
        return axes if _fits(axes, shape, self.cores) else (None,) * len(shape)


def transformer_layout(model: keras.Model, cores: int) -> dict[str, Layout]:
    """A `layout_map` that divides a transformer over a replica's cores.

    Divided are the heads of attention (of the projections of queries, keys
    and values, and of the one behind them), the columns of dense layers that
    widen and the rows of those that narrow again, beside each other in one
    layer (so, too, of experts whose kernels are stacked), and the rows of
    tables of `keras.layers.Embedding`. Biases and LoRA weights follow their
    kernels. Whole on every core are norms, positions,
    scales of quantized kernels, and whatever `cores` does not divide, such as
    the projections of fewer heads of keys and values.

    Attention is known by the names of its layers: those of Keras's
    `MultiHeadAttention` and `GroupQueryAttention`, and of keras-hub's models.

    Args:
      model: A built model, such as one made outside of the strategy's scope;
        it is only looked at. Its paths become patterns in which numbers are
        left open, so they hold for another model of its architecture, and of
        other sizes: that of a small one for a large one.
      cores: How many cores a replica has; of an assignment
        `num_cores_per_replica`.

    Returns:
      For `layout_map` of `TPUStrategy`: for each pattern None or "model" for
      each dimension, or a function of the shape that returns them, where
      layers of one name are divided in different ways.

    Raises:
      TypeError: no model, or no number of cores.
      ValueError: the model is not built, has no attention, or nothing that
        the cores divide.

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
    wanted = _wanted_axes(model)
    groups: dict[str, list[tuple[Axes, keras.Variable]]] = {}
    for variable in model.variables:
        axes = wanted.get(id(variable), (None,) * len(variable.shape))
        groups.setdefault(_pattern(variable.path), []).append((axes, variable))
    layouts = {p: _layout(group, cores) for p, group in groups.items()}
    layouts = {p: layout for p, layout in layouts.items() if layout is not None}
    if not layouts:
        raise ValueError(
            "The cores of a replica divide what is a multiple of them. "
            f"Received: cores={cores} for the model {model.name!r}, of which "
            "no heads, no width of dense layers and no vocabulary is one. "
            "Choose cores that divide its heads."
        )
    return _anywhere(layouts, [v.path for v in model.variables])


def _check_model(model: object) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            "A transformer's layout is that of a model. Received: an object "
            f"of type {type(model).__name__}. Pass a `keras.Model`."
        )
    if not model.built or not model.variables:
        raise ValueError(
            "A transformer's layout is that of a built model. Received: the "
            f"model {model.name!r} without variables. Call it on one batch "
            "first, or begin it with `keras.Input`."
        )


def _wanted_axes(model: keras.Model) -> dict[int, Axes]:
    """The axes of variables that would be divided, by their ids.

    Raises:
      ValueError: there is no attention.
    """
    found: dict[int, Axes] = {}
    has_attention = False
    for parent in model._flatten_layers():
        if isinstance(parent, keras.layers.Embedding):
            found |= _of_table(parent)
        children = list(
            parent._flatten_layers(include_self=False, recursive=False)
        )
        if not children:
            found |= _of_experts(parent)
        projections = list(_projections(children))
        in_attention = _attention_of(projections)
        has_attention |= bool(in_attention)
        for projection in projections:
            if id(projection) in in_attention:
                is_first = in_attention[id(projection)]
            else:
                is_first = _is_first_of_two(projection, projections)
            if is_first is not None:
                found |= projection.axes(over_columns=is_first)
    if not has_attention:
        raise ValueError(
            "A transformer has layers with projections of queries and values. "
            f"Received: the model {model.name!r}, in which no layer has a "
            "`query` and a `value`. Name those of attention of your own "
            "'query', 'key', 'value' and 'attention_output', or write "
            "`layout_map` for the model."
        )
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class _Projection:
    """A dense layer: its kernel, and which dimensions it adds and sums over.

    Attributes:
      layer: A `Dense` or `EinsumDense`.
      kernel: Its kernel.
      columns: The kernel's dimensions that the output has, in its order.
      rows: Those that are summed over, in the input's order.
    """

    layer: Any
    kernel: keras.Variable
    columns: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def name(self) -> str:
        """The layer's name without its number."""
        return _without_number(self.layer.name)

    @property
    def sizes(self) -> tuple[int, int]:
        """The sizes of the input and of the output, all dimensions each."""
        shape = self.kernel.shape
        size_in, size_out = (
            math.prod(shape[dim] for dim in dims)
            for dims in (self.rows, self.columns)
        )
        return size_in, size_out

    def axes(self, *, over_columns: bool) -> dict[int, Axes]:
        """Axes of the layer's variables, of divided columns or rows."""
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
            # Of the output's last dimensions; the columns are among them.
            num_others = len(bias.shape) - len(self.columns)
            if num_others >= 0:
                by_name["bias"] = (
                    *[None] * num_others,
                    *(of_kernel[column] for column in self.columns),
                )
        return _by_name(self.layer, by_name)


def _projections(layers: Iterable[Any]) -> Iterator[_Projection]:
    for layer in layers:
        kernels = [v for v in layer.variables if v.name == "kernel"]
        if isinstance(layer, keras.layers.Dense):
            columns, rows = (1,), (0,)
        elif isinstance(layer, keras.layers.EinsumDense):
            columns, rows = _dims_of(layer.equation)
        else:
            continue
        if len(kernels) != 1 or not columns or not rows:
            continue
        # One that is packed, as of four bits, has other dimensions.
        if len(kernels[0].shape) == len(columns) + len(rows):
            yield _Projection(layer, kernels[0], columns, rows)


def _dims_of(equation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which of a kernel's dimensions are columns, and which rows."""
    inputs, kernel, output = re.split(",|->", re.sub(r"[.\s]", "", equation))
    columns = [kernel.index(a) for a in output if a in kernel]
    rows = [kernel.index(a) for a in inputs if a in kernel and a not in output]
    return tuple(columns), tuple(rows)


def _attention_of(projections: Sequence[_Projection]) -> dict[int, bool]:
    """Those of attention among a layer's, by id: whether heads are columns."""
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
    projection: _Projection, beside: Sequence[_Projection]
) -> bool | None:
    """Whether a dense layer widens what another narrows again; or does it.

    None: it has no such other one.
    """
    size_in, size_out = projection.sizes
    if size_in == size_out:
        return None
    if not any(p.sizes == (size_out, size_in) for p in beside):
        return None
    return size_out > size_in


def _of_table(layer: keras.layers.Embedding) -> dict[int, Axes]:
    return _by_name(
        layer,
        {
            "embeddings": (_MODEL, None),
            "lora_embeddings_a": (_MODEL, None),
            "reverse_embeddings": (None, _MODEL),
        },
    )


def _of_experts(layer: keras.Layer) -> dict[int, Axes]:
    """Of kernels that are stacked: (experts, rows, columns)."""
    stacked = [v for v in layer.variables if len(v.shape) == 3]
    sizes = {tuple(v.shape) for v in stacked}
    found: dict[int, Axes] = {}
    for variable in stacked:
        experts, rows, columns = variable.shape
        if rows != columns and (experts, columns, rows) in sizes:
            over = (_MODEL, None) if rows > columns else (None, _MODEL)
            found[id(variable)] = (None, *over)
    return found


def _by_name(layer: keras.Layer, axes: dict[str, Axes]) -> dict[int, Axes]:
    return {
        id(v): axes[v.name]
        for v in layer.variables
        if len(axes.get(v.name, ())) == len(v.shape) > 0
    }


def _layout(
    group: Sequence[tuple[Axes, keras.Variable]], cores: int
) -> Layout | None:
    """What a layout map says of the variables that one pattern matches.

    Args:
      group: Each with the axes that are wanted for it.
      cores: See `ByShape`.

    Returns:
      None: nothing, they stay whole.
    """
    kinds = {axes for axes, _ in group if any(axes)}
    fit = [_fits(axes, variable.shape, cores) for axes, variable in group]
    if not any(f for (axes, _), f in zip(group, fit, strict=True) if any(axes)):
        return None
    if len(kinds) == 1:
        (axes,) = kinds
        if all(fit) and all(a == axes for a, _ in group):
            return axes
        # One dimension says too little.
        return ByShape(axes, axes, cores) if len(axes) > 1 else None
    if kinds == {(None, _MODEL), (_MODEL, None)}:
        return ByShape((None, _MODEL), (_MODEL, None), cores)
    return None


def _fits(axes: Axes, shape: Sequence[int], cores: int) -> bool:
    return len(axes) == len(shape) and all(
        axis is None or size % cores == 0
        for axis, size in zip(axes, shape, strict=True)
    )


def _pattern(path: str) -> str:
    """A regular expression for a path, whatever its layers' numbers are."""
    *layers, name = path.split("/")
    parts = [re.escape(_without_number(part)) + r"(_\d+)?" for part in layers]
    return "/".join([*parts, re.escape(name)])


def _without_number(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _anywhere(
    layouts: dict[str, Layout], paths: Sequence[str]
) -> dict[str, Layout]:
    """Patterns that match inside of other layers, too, if no other one does."""
    found = {}
    for pattern, layout in layouts.items():
        own = {path for path in paths if re.fullmatch(pattern, path)}
        inner = rf"(.*/)?{pattern}"
        is_clear = own == {p for p in paths if re.fullmatch(inner, p)}
        found[inner if is_clear else pattern] = layout
    return found
