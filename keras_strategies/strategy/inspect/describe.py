"""`Strategy.describe`: the processes of a mesh, and a table of variables."""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

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

# The limits of the output: of longer sequences, only both ends are shown.
MAX_DEVICES = 16
MAX_DEVICES_OF_PROCESS = 4
MAX_PROCESSES = 4
MAX_ROWS = 40
MAX_PATH = 28
MAX_WIDTH = 20

SLOTS = "slots"
"""What the table has in the column of arrays for a row of slots."""

BYTES_PER_MB = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableRow:
    """One row of the table: a variable, or several equal ones.

    Attributes:
      shape: The global shape, of any rank, or None if it is not known yet.
      dtype: The dtype.
      sharding: The sharding, as text for the table.
      num_bytes: The bytes on each device that stores a shard or a copy of the
        variable; or on the host for this device.
      is_on_host: Whether the variable is in the memory of the host.
      remark: Why the variable is not sharded: a short remark for the table, and
        a sentence for the legend. None if no remark is needed.
    """

    shape: tuple[int | None, ...] | None
    dtype: str
    sharding: str
    num_bytes: int
    is_on_host: bool = False
    remark: tuple[str, str] | None = None

    @property
    def array(self) -> str:
        """The dtype and the shape, as JAX writes them."""
        shape = "?" if self.shape is None else ",".join(map(str, self.shape))
        return f"{self.dtype}[{shape}]"

    @property
    def num_entries(self) -> int:
        """The number of entries; 0 if the shape is not known yet."""
        sizes = (None,) if self.shape is None else self.shape
        known = [size for size in sizes if size is not None]
        return math.prod(known) if len(known) == len(sizes) else 0


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
    groups = group_variables(variables, mesh, partitioner)
    parts: list[RenderableType] = [list_processes(mesh)]
    if partitioner is not None:
        text = describe_partitioner(partitioner, mesh.num_replicas)
        parts.append(Text(text))
    parts.append(Text(summarize(groups)))
    if partitioner is not None or not _are_all_replicated(groups):
        parts.append(tabulate(groups, {slot.path for slot in slots}))
    remarks = dict.fromkeys(row.remark for row in groups if row.remark)
    return Group(*parts, *(Text(f"  {word}: {why}") for word, why in remarks))


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


def list_processes(mesh: ReplicaMesh) -> Group:
    """Lists the replicas and the devices of each process, below a heading.

    Args:
      mesh: The mesh of the replicas.

    Returns:
      The heading and a table. With more than 16 replicas, it has only the first
      processes and devices, and the last ones.
    """
    groups = list(_group_by_process(mesh).items())
    is_many = mesh.num_replicas > MAX_DEVICES
    num_devices = MAX_DEVICES_OF_PROCESS if is_many else len(mesh.devices)
    table = Table.grid(padding=(0, 2))
    for group in abbreviate(groups, MAX_PROCESSES if is_many else len(groups)):
        if group is None:
            table.add_row("...")
            continue
        processes, replicas = group
        name = "process" if len(processes) == 1 else "processes"
        names = map(format_device, _list_devices(mesh, replicas))
        table.add_row(
            *[f"{name} {_join(processes)}"] * (mesh.num_processes > 1),
            f"replica {replicas[0]}"
            if len(replicas) == 1
            else f"replicas {replicas[0]} to {replicas[-1]}",
            _join(abbreviate(list(names), num_devices)),
        )
    return Group(_make_heading(mesh), table)


def _join(items: Iterable[object]) -> str:
    return ", ".join("..." if item is None else str(item) for item in items)


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


def summarize(groups: Mapping[VariableRow, Sequence[str]]) -> str:
    """Returns a line of text on all variables."""
    counts = [(row, len(paths)) for row, paths in groups.items()]
    num_bytes, host_bytes = (
        sum(row.num_bytes * n for row, n in counts if row.is_on_host == on_host)
        for on_host in (False, True)
    )
    parts = [
        format_count(sum(count for _, count in counts), "variable"),
        format_count(
            sum(row.num_entries * count for row, count in counts), "parameter"
        ),
        f"{num_bytes / BYTES_PER_MB:,.3f} MB on each device",
    ]
    if host_bytes:
        size = f"{host_bytes / BYTES_PER_MB:,.3f}"
        parts.append(f"{size} MB on the host for each device")
    if _are_all_replicated(groups):
        parts.append("all replicated")
    return ", ".join(parts)


def _are_all_replicated(groups: Mapping[VariableRow, Any]) -> bool:
    return {row.sharding for row in groups} == {"replicated"}


def tabulate(
    groups: Mapping[VariableRow, Sequence[str]],
    slots: Collection[str] = (),
) -> Table:
    """Lists groups of variables with their shardings and memory in a table.

    Args:
      groups: The result of `group_variables`.
      slots: The paths of variables that an optimizer created. Slots with the
        same sharding are one row.

    Returns:
      A table of at most 40 rows: those that take the most memory on a device.
    """
    table = Table(box=rich.box.SIMPLE_HEAD)
    rows: dict[tuple[str, str], tuple[list[str], int]] = {}
    for row, paths in groups.items():
        sharding = row.sharding + (f" ({row.remark[0]})" if row.remark else "")
        for array in (row.array, SLOTS):
            found = [p for p in paths if (p in slots) == (array == SLOTS)]
            if found:
                listed, num_bytes = rows.get((array, sharding), ([], 0))
                num_bytes += row.num_bytes * len(found)
                rows[array, sharding] = [*listed, *found], num_bytes
    by_size = sorted(rows.items(), key=lambda item: item[1][1], reverse=True)
    cells = [("variable", "", "array", "sharding", "MB a device")]
    cells += [
        (
            _cut(first),
            f"+ {len(others)}" if others else "",
            array,
            sharding,
            f"{num_bytes / BYTES_PER_MB:,.3f}",
        )
        for (array, sharding), ((first, *others), num_bytes) in by_size[
            :MAX_ROWS
        ]
    ]
    for i, column in enumerate(zip(*cells, strict=True)):
        is_number = column[0] in ("", "MB a device")
        table.add_column(
            column[0],
            justify="right" if is_number else "left",
            # In a narrow terminal only the paths are cut.
            min_width=min(max(map(len, column)), MAX_WIDTH) if i else None,
            overflow="ellipsis" if i else "fold",
        )
    for texts in cells[1:]:
        # `Text`, because a path may contain rich's markup.
        table.add_row(*map(Text, texts))
    if len(rows) > MAX_ROWS:
        table.add_row(f"... and {len(rows) - MAX_ROWS} more rows")
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
    return VariableRow(
        shape=shape,
        dtype=dtype,
        sharding=sharding + (" on the host" if is_on_host(variable) else ""),
        num_bytes=num_bytes,
        is_on_host=is_on_host(variable),
        remark=None
        if partitioner is None
        else _find_remark(variable, partitioner),
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


def abbreviate(items: Sequence[Any], num_shown: int) -> list[Any]:
    """Returns the first items, None in place of omitted items, and the last."""
    if len(items) <= num_shown:
        return list(items)
    return [*items[: num_shown - 2], None, items[-1]]


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


def _group_by_process(mesh: ReplicaMesh) -> dict[tuple[int, ...], list[int]]:
    """Returns the ids of replicas by the processes that they belong to."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i in range(mesh.num_replicas):
        devices = _list_devices(mesh, [i])
        processes = {device.process_index for device in devices}
        groups.setdefault(tuple(sorted(processes)), []).append(i)
    return groups


def _list_devices(
    mesh: ReplicaMesh, replicas: Sequence[int]
) -> list[jax.Device]:
    cores = mesh.cores_per_replica
    return list(mesh.devices[replicas[0] * cores : (replicas[-1] + 1) * cores])
