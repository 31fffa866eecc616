"""Lookups in tables whose columns are sharded over the replicas.

A replica that looks up rows of such a table does not gather it. The replicas
that share the table exchange ids: each gathers the ids of all, looks up the
rows of all in its columns, and sends each replica that replica's rows. The
gradient takes the same way back: each replica receives its columns of all rows,
and adds them up in its shard of the gradient.

If the rows are cast, the columns are cast before they are sent. If the rows'
gradient was cast to a wider dtype, it is sent in the narrower one.

References:
  - Naumov et al., Deep Learning Recommendation Model (2019), on tables that are
    exchanged by all-to-all: https://arxiv.org/abs/1906.00091
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var

from keras_strategies._types import Array, Equation
from keras_strategies.passes.specs import Exchange, Sharded
from keras_strategies.passes.stages import names_in, variables
from keras_strategies.passes.weight_gradients import adds_rows, casts

_ID_BYTES = 4
_LANES, _VECTOR_MEMORY = 128, 2**27
_KEEP_ZEROS = ("broadcast_in_dim", "convert_element_type")
# The dimensions of rows that are those of a slice; those of the table that ids
# index, and that slices do not have.
_LOOKED_UP = names_in("offset_dims start_index_map collapsed_slice_dims")
_ADDED = names_in(
    "update_window_dims scatter_dims_to_operand_dims inserted_window_dims"
)


def sends_less(ids: int, row_bytes: int, table_bytes: int, shards: int) -> bool:
    """Returns whether a lookup sends less if it exchanges ids and rows.

    Otherwise it gathers the table. A replica receives the ids of all replicas
    and its rows, or the table. The same holds for the gradient.

    Args:
      ids: Number of rows that a replica looks up.
      row_bytes: Bytes of a row.
      table_bytes: Bytes of the table.
      shards: Number of replicas that share the table.
    """
    return ids * (shards * _ID_BYTES + row_bytes) < table_bytes


def find_columns(equation: Equation, spec: Sharded) -> int | None:
    """Returns the dimension of rows that contains their columns.

    The rows are those that an equation looks up in a table, or adds to one.

    Args:
      equation: An equation of a trace.
      spec: The spec of the table.

    Returns:
      None if the equation is neither, if a row does not have all columns, or if
      it sends less if the table is gathered.
    """
    if equation.primitive.name == "gather":
        (rows,), names = equation.outvars, _LOOKED_UP
    elif adds_rows(equation):
        rows, names = equation.invars[2], _ADDED
    else:
        return None
    numbers = equation.params["dimension_numbers"]
    window, indexed, skipped = (getattr(numbers, name) for name in names)
    table, indices, *_ = (v.aval for v in equation.invars)
    kept = [d for d in range(table.ndim) if d not in skipped]
    is_whole = spec.dim in kept and spec.dim not in indexed
    if not is_whole or numbers.operand_batching_dims:
        return None
    dim = window[kept.index(spec.dim)]
    ids = math.prod(indices.shape[:-1])
    item = table.dtype.itemsize
    row_bytes = rows.aval.size // max(ids, 1) * item
    here = -(-ids // spec.token_parts)
    is_less = sends_less(here, row_bytes, table.size * item, spec.count)
    is_less &= rows.aval.shape[dim] == table.shape[spec.dim]
    return dim if is_less else None


def sums_rows(
    equation: Equation, makers: dict[Var, Any], spec: Sharded
) -> bool:
    """Returns whether an equation is the gradient of a lookup in columns.

    Args:
      equation: An equation that adds rows to a table.
      makers: The equations of the trace, by their results.
      spec: The spec with which the equation's result is scattered.
    """
    value = equation.invars[0]
    while not isinstance(value, Literal):
        maker = makers.get(value)
        if maker is None or maker.primitive.name not in _KEEP_ZEROS:
            return False
        value = maker.invars[0]
    return value.val == 0 and find_columns(equation, spec) is not None


class Lookups:
    """The lookups in columns, and their gradients, of one function.

    Args:
      equations: The function's equations.
      exchange: The collectives.
      read_full: A function that returns the full value of a variable.
    """

    def __init__(
        self,
        equations: Iterable[Any],
        exchange: Exchange,
        read_full: Callable[[Any], Array],
    ) -> None:
        self._exchange, self._read_full = exchange, read_full
        # The columns of the rows that were looked up for all replicas, and the
        # dimension of the rows that contains the columns.
        self._columns: dict[Var, tuple[Array, int]] = {}
        # Ids of all replicas, by the variable of this replica's.
        self._ids: dict[Var, Array] = {}
        widening = filter(_widens, equations)
        self._narrow = {e.outvars[0]: e.invars[0] for e in widening}

    def look_up(self, equation: Equation, shard: Array, dim: int) -> None:
        """Computes a lookup of all replicas in this replica's columns.

        Args:
          equation: The lookup.
          shard: This replica's columns of the table, before casts of the table.
          dim: The dimension of the rows that contains the columns.
        """
        (_, ids), (result,) = equation.invars, equation.outvars
        params, numbers = equation.params, equation.params["dimension_numbers"]
        offset_dims = tuple(d + 1 for d in numbers.offset_dims)
        columns = jax.lax.gather(
            shard,
            self._gather_ids(ids),
            numbers._replace(offset_dims=offset_dims),
            tuple(map(min, params["slice_sizes"], shard.shape)),
            mode=params["mode"],
            fill_value=params["fill_value"],
        )
        self._columns[result] = columns.astype(result.aval.dtype), dim

    def __contains__(self, variable: Var) -> bool:
        return variable in self._columns

    def join(self, variable: Any) -> Array:
        """Returns the rows of this replica that were looked up."""
        columns, dim = self._columns[variable]
        rows = self._exchange.swap(columns, 0, dim)
        return rows.reshape(variable.aval.shape)

    def cast(self, equation: Equation) -> bool:
        """Casts columns to a narrower float dtype; returns whether it did."""
        found = next(map(self._columns.get, variables(equation.invars)), None)
        is_narrow = casts(equation) and not _widens(equation)
        if found is None or not (is_narrow and is_float(equation.outvars[0])):
            return False
        cast = found[0].astype(equation.params["new_dtype"])
        self._columns[equation.outvars[0]] = cast, found[1]
        return True

    def sum(self, equation: Equation, spec: Sharded) -> Array:
        """Returns this replica's shard of the sum of all replicas' rows.

        Args:
          equation: The sum of this replica's rows (see `sums_rows`).
          spec: The spec of the sum.
        """
        (table,) = equation.outvars
        params, (_, ids, added) = equation.params, equation.invars
        numbers = params["dimension_numbers"]
        dim: Any = find_columns(equation, spec)
        rows = jnp.asarray(self._read_full(self._narrow.get(added, added)))
        devices: Any = spec.sharding.mesh.devices
        shape, total = list(rows.shape), list(table.aval.shape)
        total[spec.dim] //= spec.count
        shape[dim : dim + 1] = spec.count, total[spec.dim]
        parts = rows.reshape(shape).astype(spec.sum_dtype or rows.dtype)
        shard = _add_rows(
            jnp.zeros(total, spec.sum_dtype or table.aval.dtype),
            self._gather_ids(ids),
            self._exchange.swap(parts, dim, 0),
            numbers,
            params["mode"],
            is_tpu=devices.flat[0].platform == "tpu",
        )
        shard = self._exchange.sum_shards(shard, spec)
        return shard.astype(table.aval.dtype)

    def _gather_ids(self, ids: Var) -> Array:
        if ids not in self._ids:
            self._ids[ids] = self._exchange.gather_ids(self._read_full(ids))
        return self._ids[ids]


def _add_rows(
    zeros: Array,
    ids: Array,
    rows: Array,
    numbers: jax.lax.ScatterDimensionNumbers,
    mode: Any,
    is_tpu: bool,
) -> Array:
    """Returns the sum of all replicas' rows at their ids.

    The rows of the replicas are added one replica after the other, so that
    those of only one are stored in the sum's dtype.

    Args:
      zeros: Zeros of the sum's shape and dtype.
      ids: The ids, of shape (replicas, ...).
      rows: The rows, of shape (replicas, ...).
      numbers: The dimension numbers of one replica's `scatter_add`.
      mode: Its mode.
      is_tpu: Whether TPUs compute the sum.
    """
    words, columns = zeros.shape[0], zeros.shape[-1]
    count = _count_parts(zeros, rows, numbers) if is_tpu else 1
    height = -(-words // count)
    ids = ids.astype(jnp.promote_types(ids.dtype, "int32"))
    if count > 1 and mode == jax.lax.GatherScatterMode.CLIP:
        ids = jnp.clip(ids, 0, words - 1)

    def add(total: Array, sent: tuple[Array, Array]) -> tuple[Array, None]:
        ids, rows = sent
        rows = rows.astype(total.dtype)
        if count > 1:
            is_here = jnp.arange(count * columns) // columns == ids // height
            rows = jnp.where(is_here, jnp.tile(rows, count), 0)
            ids = ids % height
        return jax.lax.scatter_add(total, ids, rows, numbers, mode=mode), None

    if count > 1:
        zeros = jnp.zeros((height, count * columns), zeros.dtype)
    total, _ = jax.lax.scan(add, zeros, (ids, rows))
    return jnp.concatenate(jnp.split(total, count, axis=-1))[:words]


def _count_parts(
    zeros: Array, rows: Array, numbers: jax.lax.ScatterDimensionNumbers
) -> int:
    """Returns how many parts of a sum a TPU adds up side by side.

    XLA pads the columns of a sum to a TPU's lanes, if it then fits into a
    core's vector memory. Parts side by side fill the lanes.
    """
    is_table = zeros.ndim == 2 and numbers.inserted_window_dims == (0,)
    is_table &= numbers.update_window_dims == (rows.ndim - 2,)
    padded = zeros.shape[0] * _LANES * zeros.dtype.itemsize
    if not is_table or padded > _VECTOR_MEMORY:
        return 1
    return max(_LANES // zeros.shape[1], 1)


def is_float(variable: Any) -> bool:
    """Returns whether a variable's dtype is a float dtype."""
    return jnp.issubdtype(variable.aval.dtype, jnp.floating)


def _widens(equation: Equation) -> bool:
    if not casts(equation):
        return False
    (before,), (after,) = equation.invars, equation.outvars
    return before.aval.dtype.itemsize < after.aval.dtype.itemsize
