"""`Strategy.describe`: the processes of a mesh, and a table of variables."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import keras
import rich.box
from jax.sharding import NamedSharding, Sharding
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.variables.abstract_variables import (
    is_abstract,
)
from keras_strategies.variables.partitioners import Partitioner
from keras_strategies.variables.shardings import (
    get_placement,
    get_sharding,
    is_on_host,
    is_updated_replicated,
)

# The limits of the output.
MAX_PROCESSES = 8
MAX_ROWS = 40

BYTES_PER_MB = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableRow:
    """One row of the table: a variable, or several equal ones.

    Attributes:
      array: The dtype and the global shape, as JAX writes them.
      sharding: The sharding, as text for the table.
      num_entries: The number of entries; 0 if the shape is not known yet.
      num_bytes: The bytes on each device that stores a shard or a copy of the
        variable; or on the host for this device.
      is_on_host: Whether the variable is in the memory of the host.
      remark: Why the variable is not sharded: a short remark for the table, and
        a sentence for the legend. None if no remark is needed.
    """

    array: str
    sharding: str
    num_entries: int
    num_bytes: int
    is_on_host: bool
    remark: tuple[str, str] | None


Rows = Mapping[VariableRow, Sequence[str]]
"""The rows of a table, with the paths of the variables of each."""


def describe_table(
    mesh: ReplicaMesh,
    variables: Sequence[keras.Variable],
    partitioner: Partitioner | None = None,
) -> Group:
    """Lists the processes of a mesh, and variables.

    Args:
      mesh: The mesh of the replicas.
      variables: The variables; duplicates are listed once.
      partitioner: The partitioner that shards variables, if any.

    Returns:
      A renderable for a `rich.console.Console`. Its length is bounded, however
      many devices and variables there are. If all variables are replicated, it
      has a line about them, and no table.
    """
    rows = group_variables(variables, mesh, partitioner)
    parts: list[RenderableType] = list(map(Text, list_processes(mesh)))
    parts.append(Text(summarize(rows)))
    if partitioner is not None or not _are_all_replicated(rows):
        parts.append(tabulate(rows))
    remarks = dict.fromkeys(row.remark for row in rows if row.remark)
    return Group(*parts, *(Text(f"  {word}: {why}") for word, why in remarks))


def list_processes(mesh: ReplicaMesh) -> list[str]:
    """Returns lines with the replicas and the devices of each process."""
    kinds = sorted({device.device_kind for device in mesh.devices})
    cores = mesh.cores_per_replica
    text = f"Mesh: {format_count(mesh.num_replicas, 'replica')}"
    text += f" on axis {mesh.axis!r}"
    if cores > 1:
        text += f", each of {cores} cores on axis {mesh.model_axis!r}"
        text += ", which share sequences" * mesh.context_parallel
    text += f", {', '.join(kinds)}"
    if mesh.num_processes > 1:
        text += f", {mesh.num_processes} processes"
    lines = [text]
    each = mesh.num_replicas // mesh.num_readers
    for i, processes in enumerate(mesh.readers[:MAX_PROCESSES]):
        devices = mesh.devices[i * each * cores : (i + 1) * each * cores]
        lines.append(
            f"process {', '.join(map(str, processes))}: "
            f"replicas {i * each} to {(i + 1) * each - 1}, devices "
            f"{format_device(devices[0])} to {format_device(devices[-1])}"
        )
    return lines + ["..."] * (mesh.num_readers > MAX_PROCESSES)


def group_variables(
    variables: Sequence[keras.Variable],
    mesh: ReplicaMesh,
    partitioner: Partitioner | None = None,
) -> dict[VariableRow, list[str]]:
    """Groups variables that have equal rows in the table.

    Args:
      variables: The variables; duplicates are listed once.
      mesh: The mesh of the replicas.
      partitioner: The partitioner that shards variables, if any.

    Returns:
      For each row, the paths of its variables.
    """
    groups: dict[VariableRow, list[str]] = {}
    for variable in {id(v): v for v in variables}.values():
        row = describe_variable(variable, mesh, partitioner)
        groups.setdefault(row, []).append(variable.path)
    return groups


def summarize(rows: Rows) -> str:
    """Returns a line of text on all variables."""
    counts = [(row, len(paths)) for row, paths in rows.items()]
    size = sum(row.num_bytes * n for row, n in counts if not row.is_on_host)
    on_host = sum(row.num_bytes * n for row, n in counts if row.is_on_host)
    parts = [
        format_count(sum(count for _, count in counts), "variable"),
        format_count(
            sum(row.num_entries * count for row, count in counts), "parameter"
        ),
        f"{_format_mb(size)} MB on each device",
    ]
    if on_host:
        parts.append(f"{_format_mb(on_host)} MB on the host for each device")
    if _are_all_replicated(rows):
        parts.append("all replicated")
    return ", ".join(parts)


def _are_all_replicated(rows: Rows) -> bool:
    return {row.sharding for row in rows} == {"replicated"}


def tabulate(rows: Rows) -> Table:
    """Lists variables with their shardings and memory in a table.

    Args:
      rows: The result of `group_variables`.

    Returns:
      A table of at most 40 rows: those that take the most memory on a device.
    """
    table = Table("variable", box=rich.box.SIMPLE_HEAD)
    for name in ("array", "sharding", "MB a device"):
        table.add_column(name, no_wrap=True)
    sizes = {row: row.num_bytes * len(paths) for row, paths in rows.items()}
    by_size = sorted(rows, key=sizes.__getitem__, reverse=True)
    for row in by_size[:MAX_ROWS]:
        first, *others = rows[row]
        cells = (
            first + (f" + {len(others)}" if others else ""),
            row.array,
            row.sharding + (f" ({row.remark[0]})" if row.remark else ""),
            _format_mb(sizes[row]),
        )
        # `Text`, because a path may contain rich's markup.
        table.add_row(*map(Text, cells))
    if len(rows) > MAX_ROWS:
        table.add_row(f"... and {len(rows) - MAX_ROWS} more rows")
    return table


def describe_variable(
    variable: keras.Variable,
    mesh: ReplicaMesh,
    partitioner: Partitioner | None = None,
) -> VariableRow:
    """Returns the row of a variable for the table.

    Args:
      variable: A variable, built or not.
      mesh: The mesh of the replicas. If its devices are absent, or if the
        variable is abstract, the row shows the sharding that the variable would
        have.
      partitioner: The partitioner that shards variables, if any.

    Returns:
      The row. If the variable has no value yet, its sharding is "not built" and
      it has 0 bytes.
    """
    # Not `variable.value`, which would initialize a variable without a value.
    array = getattr(variable, "_value", None)
    shape = () if variable.shape is None else tuple(variable.shape)
    is_known = variable.shape is not None and None not in shape
    dtype = keras.backend.standardize_dtype(variable.dtype)
    sharding, num_bytes = "not built", 0
    placed = None if array is None else array.sharding
    if is_abstract(variable) or (array is not None and mesh.is_abstract):
        placed = get_sharding(variable, mesh)
    if placed is not None and is_known:
        sharding = describe_sharding(placed, mesh.devices)
        size = jax.dtypes.canonicalize_dtype(dtype).itemsize
        num_bytes = math.prod(placed.shard_shape(shape)) * size
    return VariableRow(
        array=f"{dtype}[{','.join(map(str, shape))}]",
        sharding=sharding + (" on the host" if is_on_host(variable) else ""),
        num_entries=math.prod(shape) if is_known else 0,
        num_bytes=num_bytes,
        is_on_host=is_on_host(variable),
        remark=partitioner and _find_remark(variable, partitioner),
    )


def _find_remark(
    variable: keras.Variable, partitioner: Partitioner
) -> tuple[str, str] | None:
    if variable.shape is None or variable.synchronization == "on_read":
        return None
    if is_updated_replicated(variable):
        return "replicated update", (
            "Its optimizer is called inside of a branch or a loop, or by "
            "replicas that run different code, so each replica gathers the "
            "full variable to update it."
        )
    placement = get_placement(variable)
    axes = () if placement is None else tuple(placement.sharding.spec)
    if placement is not None and placement.mesh.axis in axes:
        return None
    return partitioner.explain_replicated(tuple(variable.shape), axes)


def describe_sharding(sharding: Sharding, devices: Sequence[jax.Device]) -> str:
    """Describes an array's sharding as text.

    Args:
      sharding: The array's sharding.
      devices: The devices of the mesh.

    Returns:
      "replicated" if each of `devices` has a full copy. Otherwise the partition
      spec, or the devices that store copies of the array.
    """
    holders = sharding.device_set
    if not sharding.is_fully_replicated:
        is_named = isinstance(sharding, NamedSharding)
        return str(sharding.spec) if is_named else type(sharding).__name__
    if holders == set(devices):
        return "replicated"
    return f"on {', '.join(sorted(map(format_device, holders)))}"


def format_device(device: jax.Device) -> str:
    """Returns a device's name, such as "tpu:0"."""
    return f"{device.platform}:{device.id}"


def format_count(number: int, noun: str) -> str:
    """Returns a number with its noun, such as "1 row" or "1,024 rows"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _format_mb(num_bytes: int) -> str:
    return f"{num_bytes / BYTES_PER_MB:,.3f}"
