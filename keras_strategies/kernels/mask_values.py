"""Values in an unfinished trace, followed back to positions in a mask.

A tracer of JAX refers to the equation that computes it, and so to the equations
before. JAX has no public name for that (`parent`, `in_tracers`; a contract test
holds them).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr, Literal

from keras_strategies._types import Array
from keras_strategies.passes.collective_cut import find_called_jaxpr
from keras_strategies.passes.stages import (
    compute_equations,
    names_in,
    needed_equations,
)

ROWS, HEADS, QUERIES, KEYS = range(4)
"""The dimensions of a mask."""

Dims = tuple[int | None, ...]
"""For each dimension of a value, the mask's dimension along which it is read;
None if only its first entry is read."""

_SAME = names_in(
    "copy copy_p name optimization_barrier pbroadcast pcast pvary reshard",
    "sharding_constraint",
)
"""Primitives that return their operand."""
_BY_ENTRY = names_in(
    "abs add and convert_element_type div eq floor ge gt integer_pow le lt max",
    "min mul ne neg not or rem select_n sign sub xor",
)
"""Primitives that compute each entry from the same entries of the operands."""
_MAX_VALUES = 5000


class NotRecognized(Exception):
    """Raised if an array is no mask whose parts are known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """Integers that grow by constant steps along the mask's dimensions.

    Attributes:
      steps: The step along each dimension; without those of 0.
      offset: The number at the first position of each dimension.
      is_absolute: Whether the numbers are the absolute ones of these.
    """

    steps: dict[int, int]
    offset: int
    is_absolute: bool = False

    def plus(self, other: "Line") -> "Line":
        """Returns the sum of two lines."""
        dims = self.steps.keys() | other.steps.keys()
        steps = {d: self.steps.get(d, 0) + other.steps.get(d, 0) for d in dims}
        return Line(
            steps={dim: step for dim, step in steps.items() if step},
            offset=self.offset + other.offset,
        )

    def times(self, factor: int) -> "Line":
        """Returns a multiple of the line."""
        steps = {d: factor * step for d, step in self.steps.items() if factor}
        return Line(steps=steps, offset=factor * self.offset)

    def find_largest(self, sizes: Sequence[int]) -> int:
        """Returns a bound of the absolute numbers."""
        ends = (abs(step) * sizes[dim] for dim, step in self.steps.items())
        return abs(self.offset) + sum(ends)


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A function that a trace calls: its jaxpr, and its inputs' values."""

    jaxpr: Jaxpr
    inputs: dict[Any, tuple[Any, "_Call | None"]]

    @functools.cached_property
    def makers(self) -> dict[Any, Any]:
        """The equation that computes each variable."""
        return {v: e for e in self.jaxpr.eqns for v in e.outvars}


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A value in a trace, as a mask reads it.

    Attributes:
      atom: A tracer or an array; in a function that the trace calls, a variable
        or a literal.
      call: That function, or None.
      dims: See `Dims`.
      sizes: The shape of the mask: rows, heads, queries and keys.
      budget: A list with an entry for each value that was followed.
      equation: The equation that computes the value; None if it is an input or
        a constant.
    """

    atom: Any
    call: _Call | None
    dims: Dims
    sizes: tuple[int, ...]
    budget: list[None]
    equation: Any

    @classmethod
    def of(cls, array: Array, dims: Dims, sizes: tuple[int, ...]) -> "Value":
        """Returns the value of a mask's array."""
        return cls._follow(array, None, dims, sizes, [])

    @classmethod
    def _follow(
        cls,
        atom: Any,
        call: _Call | None,
        dims: Dims,
        sizes: tuple[int, ...],
        budget: list[None],
    ) -> "Value":
        """Finds a value's equation, in the functions that the trace calls."""
        budget.append(None)
        if len(budget) > _MAX_VALUES:
            raise NotRecognized
        while True:
            equation: Any = None
            if call is None:
                atom = _lower(atom)
                equation = getattr(atom, "parent", None)
                variable = getattr(atom, "val", None)
                operands = [(x, None) for x in getattr(equation, "invars", ())]
            elif isinstance(atom, Literal):
                atom, call = atom.val, None
                break
            elif atom in call.inputs:
                atom, call = call.inputs[atom]
                continue
            else:
                equation, variable = call.makers[atom], atom
                operands = [(v, call) for v in equation.invars]
            inner = None if equation is None else find_called_jaxpr(equation)
            if inner is None:
                break
            jaxpr, consts = inner
            operands += [(const, None) for const in consts]
            names = [*jaxpr.invars, *jaxpr.constvars]
            inputs: dict[Any, Any] = dict(zip(names, operands, strict=True))
            outputs: list[Any] = list(getattr(equation, "outvars", ()))
            atom = jaxpr.outvars[outputs.index(variable)]
            call = _Call(jaxpr, inputs)
        return cls(atom, call, dims, sizes, budget, equation)

    def _make(self, operand: Any, dims: Dims) -> "Value":
        return self._follow(operand, self.call, dims, self.sizes, self.budget)

    @property
    def name(self) -> str:
        """The name of the primitive that computes the value, or ""."""
        return "" if self.equation is None else self.equation.primitive.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The value's shape."""
        return np.shape(getattr(self.atom, "aval", self.atom))

    @property
    def dtype(self) -> Any:
        """The value's dtype."""
        return np.dtype(jnp.result_type(getattr(self.atom, "aval", self.atom)))

    @property
    def constant(self) -> Any:
        """The value if it is known when the step is traced, else None."""
        is_known = self.call is None and not isinstance(self.atom, Tracer)
        return self.atom if is_known else None

    @property
    def operands(self) -> list["Value"]:
        """The operands of a primitive of `_BY_ENTRY`."""
        found = []
        for operand in self.equation.invars:
            # Sizes of 1 are broadcast, and so are scalars.
            shape = np.shape(getattr(operand, "aval", operand))
            pairs = zip(self.dims, shape, strict=False)
            dims = tuple(dim if n > 1 else None for dim, n in pairs)
            found.append(self._make(operand, dims))
        return found

    def skip_moves(self) -> "Value":
        """Returns the value from which this one is only moved or broadcast."""
        value = self
        while (dims := value._find_source_dims()) is not None:
            value = value._make(value.equation.invars[0], dims)
        return value

    def _find_source_dims(self) -> Dims | None:
        """Returns the dims of the operand; None if more than moves is done."""
        if self.equation is None or not self.equation.invars:
            return None
        params, operands = self.equation.params, self.equation.invars
        before = np.shape(getattr(operands[0], "aval", operands[0]))
        pairs = list(zip(self.dims, self.shape, strict=True))
        if self.name in _SAME:
            return self.dims if len(operands) == 1 else None
        if self.name == "broadcast_in_dim":
            places = params["broadcast_dimensions"]
            return tuple(
                self.dims[place] if n > 1 else None
                for n, place in zip(before, places, strict=True)
            )
        if self.name == "transpose":
            places = params["permutation"]
            return tuple(self.dims[places.index(k)] for k in range(len(before)))
        if self.name in ("reshape", "squeeze"):
            kept = [(dim, n) for dim, n in pairs if n > 1]
            if [n for _, n in kept] != [n for n in before if n > 1]:
                return None
            dims = iter([dim for dim, _ in kept])
            return tuple(next(dims) if n > 1 else None for n in before)
        is_first = self.name == "slice" and not any(params["start_indices"])
        is_first &= not params.get("strides")
        is_all = self.name == "dynamic_slice" and before == self.shape
        if is_first or is_all:
            return tuple(dim if n > 1 else None for dim, n in pairs)
        return None

    def find_dims(self) -> set[int]:
        """Returns the mask's dimensions along which the value may change."""
        dims = {dim for dim in self.dims if dim is not None}
        if not {QUERIES, KEYS} <= dims:
            return dims
        value = self.skip_moves()
        dims = {dim for dim in value.dims if dim is not None}
        if not {QUERIES, KEYS} <= dims:
            return dims
        if value.name in _BY_ENTRY:
            return set[int]().union(*(v.find_dims() for v in value.operands))
        line = read_line(value)
        return dims if line is None else set(line.steps)

    def with_dims(self, array: Any, dims: Sequence[int]) -> Any:
        """Returns an array like the value with the given dims of the mask.

        Args:
          array: An array of the value's shape.
          dims: Dimensions of the mask; those that the value lacks have size 1.
        """
        places = [k for k, dim in enumerate(self.dims) if dim in dims]
        index = tuple(
            slice(None) if k in places else 0 for k in range(array.ndim)
        )
        array = array[index]
        held = [self.dims[k] for k in places]
        array = array.transpose([held.index(d) for d in dims if d in held])
        shape = iter(array.shape)
        array = array.reshape([next(shape) if d in held else 1 for d in dims])
        return array[tuple(slice(self.sizes[d]) for d in dims)]

    def compute_rows(self, dim: int) -> Array:
        """Computes a value that changes along the rows and a dimension only.

        Returns:
          An array of shape (batch, size of the dimension).

        Raises:
          NotRecognized: if it also changes along others.
        """
        if self.find_dims() - {ROWS, dim}:
            raise NotRecognized
        array = jnp.asarray(_compute(self.atom, self.call))
        shape = self.sizes[ROWS], self.sizes[dim]
        return jnp.broadcast_to(self.with_dims(array, (ROWS, dim)), shape)


def _lower(atom: Any) -> Any:
    """Returns the tracer, or array, that a tracer only stands for."""
    return atom.full_lower() if hasattr(atom, "full_lower") else atom


def _compute(atom: Any, call: _Call | None) -> Any:
    """Computes a value of a called function in the trace that calls it."""
    if call is None or isinstance(atom, Literal):
        return getattr(atom, "val", atom) if call is not None else atom
    if atom in call.inputs:
        return _compute(*call.inputs[atom])
    equations = needed_equations(call.jaxpr.eqns, [atom], lambda e: False)
    (result,) = compute_equations(
        call.jaxpr, equations, [atom], lambda v: _compute(*call.inputs[v])
    )
    return result


def read_line(value: Value) -> Line | None:
    """Returns a value as a line, or None if it is not known to be one."""
    value = value.skip_moves()
    line = _read_constant(value) if value.equation is None else _read(value)
    if line is None:
        return None
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    limit = (
        2 ** (jnp.finfo(value.dtype).nmant + 1)
        if is_float
        else 1
        if value.dtype == jnp.bool_
        else jnp.iinfo(value.dtype).max
    )
    # Beyond it, numbers are rounded, or wrap around.
    return line if line.find_largest(value.sizes) <= limit else None


def _read(value: Value) -> Line | None:
    name, params = value.name, value.equation.params
    if name == "iota":
        dim = value.dims[params["dimension"]]
        return Line(steps={} if dim is None else {dim: 1}, offset=0)
    if name == "cumsum":
        ones = read_line(value._make(value.equation.invars[0], value.dims))
        if ones is None or ones.steps or params["reverse"]:
            return None
        dim, step = value.dims[params["axis"]], ones.offset
        return Line(
            steps={dim: step} if dim is not None and step else {}, offset=step
        )
    if name not in ("add", "sub", "mul", "neg", "abs", "convert_element_type"):
        return None
    lines = list(map(read_line, value.operands))
    known = [line for line in lines if line and not line.is_absolute]
    if len(known) < len(lines):
        return None
    one, two = known[0], known[-1]
    if name == "abs":
        return dataclasses.replace(one, is_absolute=True)
    if name == "neg":
        return one.times(-1)
    if name in ("add", "sub"):
        return one.plus(two.times(-1 if name == "sub" else 1))
    if name == "mul":
        if two.steps:
            one, two = two, one
        return None if two.steps else one.times(two.offset)
    return one


def _read_constant(value: Value) -> Line | None:
    """Reads a number, or numbers with equal steps along one dimension."""
    dims = [dim for dim in value.dims if dim is not None]
    if value.constant is None or len(dims) > 1:
        return None
    array = np.asarray(value.constant)
    if array.dtype.kind not in "biu" and not np.array_equal(
        array, np.trunc(array)
    ):
        return None
    numbers = value.with_dims(array, dims).reshape(-1).astype(int)
    steps = set(np.diff(numbers).tolist()) or {0}
    if len(steps) > 1:
        return None
    line = Line(steps=dict.fromkeys(dims, 1), offset=0).times(steps.pop())
    return line.plus(Line(steps={}, offset=int(numbers[0])))
