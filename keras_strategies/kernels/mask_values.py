"""Values in an unfinished trace, followed back to positions in a mask.

A tracer of JAX refers to the equation that computes it, and so to the equations
before. JAX has no public name for that (`parent`, `in_tracers`; a contract test
holds them).
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr, Literal
from keras.src.backend.common.tensor_attributes import get_tensor_attr

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

# An attribute of an argument of a rematerialized layer: the caller's array.
SOURCE = "_ks_source"
_SAME = names_in(
    "copy copy_p name optimization_barrier pbroadcast pcast pvary reshard",
    "sharding_constraint",
)
"""Primitives that return their operand."""
BY_ENTRY = names_in(
    "abs add and convert_element_type div eq floor ge gt integer_pow le lt max",
    "min mul ne neg not or rem select_n sign sub xor",
)
"""Primitives that compute each entry from the same entries of the operands."""
_MAX_VALUES = 5000


class NotRecognized(Exception):
    """Raised if an array is no mask whose parts are known."""


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
    def of(
        cls,
        atom: Any,
        dims: Dims,
        sizes: tuple[int, ...],
        call: _Call | None = None,
        budget: list[None] | None = None,
    ) -> "Value":
        """Returns the value of an array, with the equation that computes it.

        The equation may be in a function that the trace calls.
        """
        budget = [] if budget is None else budget
        budget.append(None)
        if len(budget) > _MAX_VALUES:
            raise NotRecognized
        while True:
            equation: Any = None
            if call is None:
                atom = _lower(atom)
                if (source := get_tensor_attr(atom, SOURCE)) is not None:
                    atom = source
                    continue
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
        return self.of(operand, dims, self.sizes, self.call, self.budget)

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
        """The operands of a primitive of `BY_ENTRY`."""
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
        value = self.skip_moves()
        dims = {dim for dim in value.dims if dim is not None}
        if not {QUERIES, KEYS} <= dims:
            return dims
        if value.name == "iota":
            return {value.dims[value.equation.params["dimension"]]} - {None}
        if value.name == "cumsum":
            operand = value._make(value.equation.invars[0], value.dims)
            axis = value.dims[value.equation.params["axis"]]
            return (operand.find_dims() | {axis}) - {None}
        if value.name in BY_ENTRY:
            return set[int]().union(*(v.find_dims() for v in value.operands))
        return dims

    def sample(self, places: Mapping[Any, np.ndarray]) -> np.ndarray | None:
        """Returns entries of a value that is known when the step is traced.

        Args:
          places: Positions along dimensions of the mask.

        Returns:
          An array of the shape of the positions; None if the value is unknown,
          or if it changes along other dimensions.
        """
        value = self.skip_moves()
        if value.find_dims() - places.keys():
            return None
        if value.constant is not None:
            index = tuple(places.get(dim, 0) for dim in value.dims)
            return np.asarray(np.asarray(value.constant, value.dtype)[index])
        if value.name in ("iota", "cumsum"):
            params, number = value.equation.params, np.array(1)
            dim = value.dims[params.get("dimension", params.get("axis"))]
            place = places.get(dim, np.array(0))
            if value.name == "cumsum":
                operand = value._make(value.equation.invars[0], value.dims)
                number, place = operand.sample({}), place + 1
            if number is None or params.get("reverse"):
                return None
            return np.asarray(place * number.astype(int), value.dtype)
        if value.name not in BY_ENTRY:
            return None
        entries = [v.sample(places) for v in value.operands]
        is_known = not any(x is None for x in entries)
        return compute_entries(value, entries) if is_known else None

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


def compute_entries(value: Value, operands: Iterable[Any]) -> np.ndarray:
    """Computes a value of `BY_ENTRY` from arrays that broadcast."""
    arrays = np.broadcast_arrays(*operands)
    with jax.ensure_compile_time_eval():
        bind = value.equation.primitive.bind
        return np.asarray(
            bind(*map(jnp.asarray, arrays), **value.equation.params)
        )
