"""Values in an unfinished trace, followed back to positions in a mask.

A tracer of JAX refers to the equation that computes it, and so to the equations
before. JAX has no public name for that (`parent`, `in_tracers`; a contract test
holds them).
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
_COUNTS = {"iota": "dimension", "cumsum": "axis"}
"""Primitives that count along a dimension, and its parameter."""
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
      budget: An iterator that counts the values that were followed.
      equation: The equation that computes the value; None if it is an input or
        a constant.
    """

    atom: Any
    call: _Call | None
    dims: Dims
    sizes: tuple[int, ...]
    budget: Iterator[int]
    equation: Any

    @classmethod
    def of(
        cls,
        atom: Any,
        call: _Call | None,
        dims: Dims,
        sizes: tuple[int, ...],
        budget: Iterator[int],
    ) -> "Value":
        """Returns the value of an array, with the equation that computes it.

        The equation may be in a function that the trace calls.

        Args:
          atom: See `Value`.
          call: See `Value`.
          dims: See `Dims`. Those along which the value has one entry are left
            out.
          sizes: See `Value`.
          budget: See `Value`.
        """
        equation = variable = None
        if call is None:
            # A tracer may only stand for another one, or for an array.
            atom = atom.full_lower() if hasattr(atom, "full_lower") else atom
            if (source := get_tensor_attr(atom, SOURCE)) is not None:
                return cls.of(source, None, dims, sizes, budget)
            equation = getattr(atom, "parent", None)
            variable = getattr(atom, "val", None)
        elif isinstance(atom, Literal):
            atom, call = atom.val, None
        elif atom in call.inputs:
            return cls.of(*call.inputs[atom], dims, sizes, budget)
        else:
            equation, variable = call.makers[atom], atom
        if next(budget) > _MAX_VALUES:
            raise NotRecognized
        inner = None if equation is None else find_called_jaxpr(equation)
        if equation is None or inner is None:
            pairs = zip(dims, _find_shape(atom), strict=False)
            dims = tuple(dim if n > 1 else None for dim, n in pairs)
            return cls(atom, call, dims, sizes, budget, equation)
        jaxpr, consts = inner
        operands = [(x, call) for x in equation.invars]
        operands += [(const, None) for const in consts]
        names = [*jaxpr.invars, *jaxpr.constvars]
        inner = _Call(jaxpr, dict(zip(names, operands, strict=True)))
        place = list(equation.outvars).index(variable)
        return cls.of(jaxpr.outvars[place], inner, dims, sizes, budget)

    @property
    def name(self) -> str:
        """The name of the primitive that computes the value, or ""."""
        return "" if self.equation is None else self.equation.primitive.name

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
        """The operands of a primitive of `BY_ENTRY`, or of a `cumsum`."""
        places = range(len(self.equation.invars))
        return [self._read(place, self.dims) for place in places]

    @property
    def _counted(self) -> int | None:
        """The dimension along which a primitive of `_COUNTS` counts."""
        return self.dims[self.equation.params[_COUNTS[self.name]]]

    def _read(self, place: int, dims: Dims) -> "Value":
        """Returns an operand."""
        operand = self.equation.invars[place]
        return self.of(operand, self.call, dims, self.sizes, self.budget)

    def skip_moves(self) -> "Value":
        """Returns the value from which this one is only moved or broadcast."""
        value = self
        while (dims := value._find_source_dims()) is not None:
            value = value._read(0, dims)
        return value

    def _find_source_dims(self) -> Dims | None:
        """Returns the dims of the operand; None if more than moves is done."""
        if self.equation is None or not self.equation.invars:
            return None
        params, operands = self.equation.params, self.equation.invars
        before, shape = map(_find_shape, (operands[0], self.atom))
        if self.name in _SAME:
            return self.dims if len(operands) == 1 else None
        if self.name == "broadcast_in_dim":
            return tuple(self.dims[k] for k in params["broadcast_dimensions"])
        if self.name == "transpose":
            places = params["permutation"]
            return tuple(self.dims[places.index(k)] for k in range(len(before)))
        if self.name in ("reshape", "squeeze"):
            if [n for n in shape if n > 1] != [n for n in before if n > 1]:
                return None
            pairs = zip(self.dims, shape, strict=True)
            dims = iter([dim for dim, n in pairs if n > 1])
            return tuple(next(dims) if n > 1 else None for n in before)
        is_first = self.name == "slice" and not any(params["start_indices"])
        is_first &= not params.get("strides")
        is_all = self.name == "dynamic_slice" and before == shape
        return self.dims if is_first or is_all else None

    def find_dims(self) -> set[int]:
        """Returns the mask's dimensions along which the value may change."""
        value = self.skip_moves()
        dims = {dim for dim in value.dims if dim is not None}
        is_known = value.name in (*BY_ENTRY, *_COUNTS)
        if not is_known or not {QUERIES, KEYS} <= dims:
            return dims
        found = dims & {value._counted} if value.name in _COUNTS else set[int]()
        return found.union(*(v.find_dims() for v in value.operands))

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
        is_count = value.name in _COUNTS
        if not is_count and value.name not in BY_ENTRY:
            return None
        # A `cumsum` is known if it adds up one number.
        inner = {} if is_count else places
        sampled = [v.sample(inner) for v in value.operands]
        entries = [x for x in sampled if x is not None]
        if len(entries) < len(sampled):
            return None
        if not is_count:
            return compute_entries(value, entries)
        found = places.get(value._counted, np.array(0)).astype("float64")
        for number in entries:
            found = (found + 1) * number.astype("float64")
        # A sum may be too large for the dtype.
        with np.errstate(all="ignore"):
            rounded = np.asarray(found, value.dtype)
        is_exact = not entries or (rounded.astype("float64") == found).all()
        is_exact &= not value.equation.params.get("reverse")
        return rounded if is_exact else None

    def with_dims(self, array: Any, dims: Sequence[int]) -> Any:
        """Returns an array like the value with the given dims of the mask.

        Args:
          array: An array of the value's shape.
          dims: Dimensions of the mask; those that the value lacks have size 1.
        """
        held = [dim for dim in self.dims if dim in dims]
        index = (slice(None) if dim in dims else 0 for dim in self.dims)
        array = array[tuple(index)]
        array = array.transpose([held.index(d) for d in dims if d in held])
        index = (slice(self.sizes[d]) if d in held else None for d in dims)
        return array[tuple(index)]

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


def _find_shape(atom: Any) -> tuple[int, ...]:
    return np.shape(getattr(atom, "aval", atom))


def _compute(atom: Any, call: _Call | None) -> Any:
    """Computes a value of a called function in the trace that calls it."""
    if call is None or isinstance(atom, Literal):
        return atom if call is None else atom.val
    if atom in call.inputs:
        return _compute(*call.inputs[atom])
    equations = needed_equations(call.jaxpr.eqns, [atom])
    (result,) = compute_equations(
        call.jaxpr, equations, [atom], lambda v: _compute(*call.inputs[v])
    )
    return result


def compute_entries(value: Value, operands: Iterable[Any]) -> np.ndarray:
    """Computes a value of `BY_ENTRY` from arrays that broadcast."""
    arrays = map(jnp.asarray, np.broadcast_arrays(*operands))
    with jax.ensure_compile_time_eval():
        bind = value.equation.primitive.bind
        return np.asarray(bind(*arrays, **value.equation.params))
