"""`Strategy.describe`: the processes of a mesh, and a table of variables."""

import dataclasses
import math
from collections.abc import Collection, Sequence

import jax
import keras
import rich.box
from jax.sharding import NamedSharding, Sharding
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from keras_strategies.cluster.addresses import join_few, name_processes
from keras_strategies.spmd.compiled import BYTES_PER_MB
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.variables.abstract_variables import is_abstract
from keras_strategies.variables.partitioners import Partitioner
from keras_strategies.variables.shardings import (
    get_placement,
    get_sharding,
    is_on_host,
)

MAX_PROCESSES = 4
MAX_ROWS = 40
MAX_PATH = 28
"""The limits of the output; the rest is left out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableRow:
    """A variable in the table.

    Attributes:
      path: The variable's path.
      array: The dtype and the shape, as JAX writes them; "?" for an unknown
        shape.
      sharding: The sharding, as text for the table.
      num_entries: The number of entries; 0 if the shape is not known yet.
      num_bytes: The bytes on each device that stores a shard or a copy of the
        variable; or on the host for this device.
      is_on_host: Whether the variable is in the memory of the host.
      remark: Why the variable is not sharded, in one or two words. None if no
        remark is needed.
    """

    path: str
    array: str
    sharding: str
    num_entries: int
    num_bytes: int
    is_on_host: bool = False
    remark: str | None = None


def describe_table(
    mesh: ReplicaMesh,
    variables: Sequence[keras.Variable],
    partitioner: Partitioner | None = None,
    slots: Sequence[keras.Variable] = (),
) -> Group:
    """Lists the processes of a mesh, and variables.

    Args:
      mesh: The mesh of the replicas.
      variables: The variables; duplicates are listed once.
      partitioner: The partitioner that shards variables, if any.
      slots: The variables that an optimizer created. In the table, slots with
        the same sharding are one row.

    Returns:
      A renderable for a `rich.console.Console`. Its length is bounded, however
      many devices and variables there are. If all variables are replicated, it
      has a line about them, and no table.
    """
    by_id = {id(v): v for v in variables}
    rows = [describe_variable(v, mesh, partitioner) for v in by_id.values()]
    parts: list[RenderableType] = [list_processes(mesh)]
    if partitioner is not None:
        text = describe_partitioner(partitioner, mesh.num_replicas)
        parts.append(Text(text))
    parts.append(Text(summarize(rows)))
    if partitioner is not None or not _are_all_replicated(rows):
        parts.append(tabulate(rows, {slot.path for slot in slots}))
    return Group(*parts)


def describe_partitioner(partitioner: Partitioner, num_replicas: int) -> str:
    """Returns a line of text on how many replicas shard the variables."""
    if not partitioner.shards_any:
        return f"{partitioner.name} replicates variables"
    shards = partitioner.shards
    groups = num_replicas // shards
    text = f"{partitioner.name} shards variables over {shards} replicas"
    if groups > 1:
        text += f", in each of {groups} groups"
    return text


def _find_remark(
    variable: keras.Variable, partitioner: Partitioner | None
) -> str | None:
    is_local = variable.synchronization == "on_read"
    if partitioner is None or variable.shape is None or is_local:
        return None
    placement = get_placement(variable)
    axes = () if placement is None else tuple(placement.sharding.spec)
    if placement is not None and placement.mesh.axis in axes:
        return None
    return partitioner.explain_replicated(tuple(variable.shape), axes)


def list_processes(mesh: ReplicaMesh) -> Group:
    """Lists the replicas and the devices of each process, below a heading.

    Args:
      mesh: The mesh of the replicas.

    Returns:
      The heading and a table of the first processes and devices.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    cores = mesh.cores_per_replica
    for i in range(mesh.num_replicas):
        devices = mesh.devices[i * cores : (i + 1) * cores]
        processes = {device.process_index for device in devices}
        groups.setdefault(tuple(sorted(processes)), []).append(i)
    table = Table.grid(padding=(0, 2))
    for processes, replicas in [*groups.items()][:MAX_PROCESSES]:
        first, last = replicas[0], replicas[-1]
        devices = mesh.devices[first * cores : (last + 1) * cores]
        table.add_row(
            *[name_processes(processes)] * (mesh.num_processes > 1),
            f"replica {first}"
            if first == last
            else f"replicas {first} to {last}",
            join_few([format_device(device) for device in devices]),
        )
    if len(groups) > MAX_PROCESSES:
        table.add_row("...")
    return Group(_make_heading(mesh), table)


def summarize(rows: Sequence[VariableRow]) -> str:
    """Returns a line of text on all variables."""
    num_entries = sum(row.num_entries for row in rows)
    parts = [
        format_count(len(rows), "variable"),
        format_count(num_entries, "parameter"),
    ]
    places = {False: "each device", True: "the host for each device"}
    for on_host, where in places.items():
        sizes = [row.num_bytes for row in rows if row.is_on_host == on_host]
        if sizes or not on_host:
            parts.append(f"{sum(sizes) / BYTES_PER_MB:,.3f} MB on {where}")
    if _are_all_replicated(rows):
        parts.append("all replicated")
    return ", ".join(parts)


def _are_all_replicated(rows: Sequence[VariableRow]) -> bool:
    return {row.sharding for row in rows} == {"replicated"}


def tabulate(rows: Sequence[VariableRow], slots: Collection[str] = ()) -> Table:
    """Lists variables with their shardings and memory in a table.

    Args:
      rows: The variables. Equal ones are one row.
      slots: The paths of variables that an optimizer created. Slots with the
        same sharding are one row.

    Returns:
      A table of at most 40 rows: those that take the most memory on a device.
    """
    groups: dict[tuple[str, str], list[VariableRow]] = {}
    for row in rows:
        array = "slots" if row.path in slots else row.array
        remark = f" ({row.remark})" if row.remark else ""
        groups.setdefault((array, row.sharding + remark), []).append(row)
    sizes = {
        key: sum(row.num_bytes for row in same) for key, same in groups.items()
    }
    table = Table(box=rich.box.SIMPLE_HEAD)
    # In a narrow terminal only the paths are cut.
    table.add_column("variable", overflow="fold")
    for name in ("", "array", "sharding", "MB a device"):
        side = "left" if name in ("array", "sharding") else "right"
        table.add_column(name, justify=side, no_wrap=True)
    for key in sorted(sizes, key=lambda key: -sizes[key])[:MAX_ROWS]:
        first, *others = groups[key]
        more = f"+ {len(others)}" if others else ""
        size = f"{sizes[key] / BYTES_PER_MB:,.3f}"
        # `Text`, because a path may contain rich's markup.
        table.add_row(*map(Text, (_cut(first.path), more, *key, size)))
    if len(groups) > MAX_ROWS:
        table.add_row(f"... and {len(groups) - MAX_ROWS} more rows")
    return table


def _cut(path: str) -> str:
    """Cuts a long path in its middle, because its end tells the most."""
    is_long = len(path) > MAX_PATH
    return f"{path[:5]}...{path[8 - MAX_PATH :]}" if is_long else path


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
    shape = None if variable.shape is None else tuple(variable.shape)
    dtype = keras.backend.standardize_dtype(variable.dtype)
    sharding, num_bytes = "not built", 0
    placed = None if array is None else array.sharding
    if is_abstract(variable) or (array is not None and mesh.is_abstract):
        placed = get_sharding(variable, mesh)
    if placed is not None and shape is not None:
        sharding = describe_sharding(placed, mesh.devices)
        size = jax.dtypes.canonicalize_dtype(dtype).itemsize
        num_bytes = math.prod(placed.shard_shape(shape)) * size
    num_entries, sizes = 0, "?"
    if shape is not None:
        num_entries = 0 if None in shape else math.prod(shape)
        sizes = ",".join(map(str, shape))
    return VariableRow(
        path=variable.path,
        array=f"{dtype}[{sizes}]",
        sharding=sharding + (" on the host" if is_on_host(variable) else ""),
        num_entries=num_entries,
        num_bytes=num_bytes,
        is_on_host=is_on_host(variable),
        remark=_find_remark(variable, partitioner),
    )


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
    if sharding.is_fully_replicated:
        if holders == set(devices):
            return "replicated"
        if len(holders) == 1:
            return f"on {format_device(*holders)}"
        return f"replicated on {len(holders)} devices"
    if isinstance(sharding, NamedSharding):
        return str(sharding.spec)
    return type(sharding).__name__


def format_device(device: jax.Device) -> str:
    """Returns a device's name, such as "tpu:0"."""
    return f"{device.platform}:{device.id}"


def format_count(number: int, noun: str) -> str:
    """Returns a number with its noun, such as "1 row" or "1,024 rows"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _make_heading(mesh: ReplicaMesh) -> Text:
    kinds = sorted({device.device_kind for device in mesh.devices})
    cores = mesh.cores_per_replica
    count = format_count(mesh.num_replicas, "replica")
    text = f"Mesh: {count} on axis {mesh.axis!r}"
    if cores > 1:
        text += f", each of {cores} cores on axis {mesh.model_axis!r}"
        text += ", which share sequences" * mesh.context_parallel
    text += f", {', '.join(kinds)}"
    if mesh.num_processes > 1:
        text += f", {mesh.num_processes} processes"
    return Text(text)
