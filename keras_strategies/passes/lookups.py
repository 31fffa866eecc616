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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var

from keras_strategies._types import Array, Equation
from keras_strategies.passes.specs import Exchange, Sharded
from keras_strategies.passes.stages import variables
from keras_strategies.passes.weight_gradients import adds_rows

_ID_BYTES = 4
_LANES, _VECTOR_MEMORY = 128, 2**27
_KEEP_ZEROS = ("broadcast_in_dim", "convert_element_type")


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


def find_lookup(equation: Equation, spec: Sharded) -> int | None:
    """Returns the dimension of looked-up rows that contains their columns.

    Args:
      equation: An equation of a trace.
      spec: The spec of its first operand.

    Returns:
      None if the equation is no lookup in the columns of its first operand, or
      if it sends less if the operand is gathered.
    """
    if equation.primitive.name != "gather":
        return None
    numbers = equation.params["dimension_numbers"]
    if equation.params["slice_sizes"][spec.dim] != _size(equation, spec):
        return None
    skipped = numbers.collapsed_slice_dims, numbers.operand_batching_dims
    (rows,) = equation.outvars
    dims = numbers.offset_dims, numbers.start_index_map, *skipped
    return _find_columns(equation, rows, spec, dims)


def find_row_sum(
    equation: Equation, makers: dict[Var, Any], spec: Sharded
) -> int | None:
    """Returns the dimension of added rows that contains their columns.

    Args:
      equation: An equation of a trace.
      makers: The equations of the trace, by their results.
      spec: The spec with which the equation's result is scattered.

    Returns:
      None if the equation is no gradient of a lookup in columns (see
      `find_lookup`).
    """
    if not adds_rows(equation):
        return None
    zeros, _, rows = equation.invars
    if not _is_zero(zeros, makers):
        return None
    numbers = equation.params["dimension_numbers"]
    skipped = numbers.inserted_window_dims, numbers.operand_batching_dims
    indexed = numbers.scatter_dims_to_operand_dims
    dims = numbers.update_window_dims, indexed, *skipped
    dim = _find_columns(equation, rows, spec, dims)
    is_whole = dim is not None and rows.aval.shape[dim] == _size(equation, spec)
    return dim if is_whole else None


def _is_zero(value: Any, makers: dict[Var, Any]) -> bool:
    """Returns whether a value is a zero that is cast and broadcast."""
    while not isinstance(value, Literal):
        maker = makers.get(value)
        if maker is None or maker.primitive.name not in _KEEP_ZEROS:
            return False
        value = maker.invars[0]
    return value.val == 0


def _size(equation: Equation, spec: Sharded) -> int:
    return equation.invars[0].aval.shape[spec.dim]


def _find_columns(
    equation: Equation,
    rows: Any,
    spec: Sharded,
    dims: tuple[Sequence[int], ...],
) -> int | None:
    """Returns the columns' dimension of rows, or None.

    Args:
      equation: A gather, or a scatter of rows.
      rows: The rows.
      spec: The spec of the table.
      dims: The dimensions of the rows that are those of a slice; and the
        table's dimensions that ids index, that slices do not have, and that
        ids and table have in common.
    """
    offsets, indexed, collapsed, batching = dims
    table, indices, *_ = equation.invars
    if spec.dim in indexed or spec.dim in collapsed or batching:
        return None
    ids = math.prod(indices.aval.shape[:-1])
    here = -(-ids // spec.token_parts)
    item = table.aval.dtype.itemsize
    row_bytes = rows.aval.size // max(ids, 1) * item
    if not sends_less(here, row_bytes, table.aval.size * item, spec.count):
        return None
    return offsets[_list_slice_dims(table, collapsed).index(spec.dim)]


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
        # The columns of the rows that were looked up for all replicas, the
        # dimension of the rows that contains the columns, and whether each of
        # this replica's rows exists (None: all do, or are filled already).
        self._columns: dict[Var, tuple[Array, int, Array | None]] = {}
        # Ids of all replicas, by the variable of this replica's.
        self._ids: dict[Var, Array] = {}
        self._narrow = {
            e.outvars[0]: e.invars[0] for e in equations if _widens(e)
        }

    def look_up(self, equation: Equation, shard: Array, dim: int) -> None:
        """Computes a lookup of all replicas in this replica's columns.

        Args:
          equation: The lookup.
          shard: This replica's columns of the table, before casts of the table.
          dim: The dimension of the rows that contains the columns.
        """
        (_, ids), (result,) = equation.invars, equation.outvars
        params, numbers = equation.params, equation.params["dimension_numbers"]
        is_filled = _fills_rows(equation)
        columns = jax.lax.gather(
            shard,
            self._gather_ids(ids),
            numbers._replace(
                offset_dims=tuple(d + 1 for d in numbers.offset_dims)
            ),
            tuple(map(min, params["slice_sizes"], shard.shape)),
            mode="clip" if is_filled else params["mode"],
            fill_value=params["fill_value"],
        )
        columns = columns.astype(result.aval.dtype)
        is_found = self._find_rows(equation) if is_filled else None
        self._columns[result] = columns, dim, is_found

    def _find_rows(self, equation: Equation) -> Array:
        """Returns whether each row that this replica looks up exists."""
        table, ids = equation.invars
        numbers = equation.params["dimension_numbers"]
        (dim,) = numbers.start_index_map
        own = self._read_full(ids)[..., 0]
        is_found = (own >= 0) & (own < table.aval.shape[dim])
        return jnp.expand_dims(is_found, numbers.offset_dims)

    def __contains__(self, variable: Var) -> bool:
        return variable in self._columns

    def join(self, variable: Var) -> Array:
        """Returns the rows of this replica that were looked up."""
        columns, dim, is_found = self._columns[variable]
        rows = self._exchange.swap(columns, 0, dim)
        shape = list(rows.shape)
        shape[dim : dim + 2] = [shape[dim] * shape[dim + 1]]
        rows = rows.reshape(shape)
        return rows if is_found is None else jnp.where(is_found, rows, jnp.nan)

    def cast(self, equation: Equation) -> bool:
        """Casts columns to a narrower float dtype; returns whether it did."""
        columns = next(map(self._columns.get, variables(equation.invars)), None)
        is_narrow = _casts(equation) and not _widens(equation)
        if columns is None or not (is_narrow and is_float(equation.outvars[0])):
            return False
        value, dim, is_found = columns
        cast = value.astype(equation.params["new_dtype"])
        self._columns[equation.outvars[0]] = cast, dim, is_found
        return True

    def sum(self, equation: Equation, spec: Sharded) -> Array:
        """Returns this replica's shard of the sum of all replicas' rows.

        Args:
          equation: The sum of this replica's rows (see `find_row_sum`).
          spec: The spec of the sum.
        """
        (table,) = equation.outvars
        params, (_, ids, added) = equation.params, equation.invars
        numbers = params["dimension_numbers"]
        window = numbers.update_window_dims
        dim = window[
            _list_slice_dims(table, numbers.inserted_window_dims).index(
                spec.dim
            )
        ]
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


def _fills_rows(equation: Equation) -> bool:
    """Returns whether a lookup fills rows that do not exist with NaN.

    They are filled when the rows are received, which needs no copy.
    """
    params, (rows,) = equation.params, equation.outvars
    numbers, fill = params["dimension_numbers"], params["fill_value"]
    is_fill = params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    is_nan = isinstance(fill, float) and math.isnan(fill)
    is_row = len(numbers.start_index_map) == 1 and (
        numbers.start_index_map == numbers.collapsed_slice_dims
    )
    return is_fill and is_nan and is_row and is_float(rows)


def is_float(variable: Any) -> bool:
    """Returns whether a variable's dtype is a float dtype."""
    return jnp.issubdtype(variable.aval.dtype, jnp.floating)


def _list_slice_dims(table: Any, skipped: Sequence[int]) -> list[int]:
    """Returns the dimensions of a table that its slices have."""
    return [d for d in range(table.aval.ndim) if d not in skipped]


def _casts(equation: Equation) -> bool:
    return equation.primitive.name == "convert_element_type"


def _widens(equation: Equation) -> bool:
    if not _casts(equation):
        return False
    (before,), (after,) = equation.invars, equation.outvars
    return before.aval.dtype.itemsize < after.aval.dtype.itemsize
