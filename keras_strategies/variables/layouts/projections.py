"""Dense layers, seen as matrices of rows and columns."""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import keras

Axes = tuple[str | None, ...]

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
        size_in, size_out = (
            math.prod(shape[dim] for dim in dims)
            for dims in (self.rows, self.columns)
        )
        return size_in, size_out

    def make_axes(self, *, over_columns: bool) -> dict[int, Axes]:
        """Returns axes that shard the variables along columns or rows."""
        dim = (self.columns if over_columns else self.rows)[0]
        rank = len(self.kernel.shape)
        of_kernel = tuple(MODEL if d == dim else None for d in range(rank))
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
        return select_by_name(self.layer, by_name)

    def keep_whole(self) -> dict[int, Axes]:
        """Returns axes that replicate the kernel."""
        return {id(self.kernel): (None,) * len(self.kernel.shape)}


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
