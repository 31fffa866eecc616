"""`Strategy.describe`: the mesh drawn, and a table of variables."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import keras
import rich.box
from jax.sharding import NamedSharding, Sharding
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.keras_bridge.variables.abstract_variables import (
    is_abstract,
)
from keras_strategies.keras_bridge.variables.partitioners import Partitioner
from keras_strategies.keras_bridge.variables.shardings import (
    is_updated_replicated,
    placement_of,
    sharding_of,
)

# Above these, the middle of a sequence is left out.
MAX_DEVICES = 16
MAX_DEVICES_OF_PROCESS = 4
MAX_PROCESSES = 4
MAX_CORES = 8
MAX_VARIABLES = 40
MAX_WIDTH = 20

BYTES_PER_MB = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableRow:
    """One variable, as the table shows it.

    Attributes:
      path: Its name with those of its layers.
      shape: Its global shape, of any rank; None if it is not known yet.
      dtype: Its type.
      sharding: Where it lies, in words.
      num_bytes: Bytes on each device that holds a part of it.
      remark: A word on where it lies, and the line that explains it.
    """

    path: str
    shape: tuple[int | None, ...] | None
    dtype: str
    sharding: str
    num_bytes: int
    remark: tuple[str, str] | None = None


def describe_table(
    mesh: ReplicaMesh,
    variables: Sequence[keras.Variable],
    partitioner: Partitioner | None = None,
) -> Group:
    """Draws a mesh and lists variables.

    Args:
      mesh: The replicas.
      variables: The variables; one given twice is listed once.
      partitioner: Which of them the replicas divide among them.

    Returns:
      Something a `rich.console.Console` prints, in lines that the number of
      devices and of variables does not let grow without bound.
    """
    drawing = draw_mesh(mesh)
    table = tabulate_variables(variables, mesh, partitioner)
    if partitioner is None:
        return Group(drawing, table)
    return Group(
        drawing,
        Text(divided_by(partitioner, mesh.num_replicas)),
        table,
        *_legend(variables, partitioner),
    )


def divided_by(partitioner: Partitioner, num_replicas: int) -> str:
    """Who divides the variables, in a line."""
    shards = partitioner.shards
    groups = num_replicas // shards
    text = f"{partitioner.name} divides variables over {shards} replicas"
    if groups > 1:
        text += f", in each of {groups} groups"
    return text


def _legend(
    variables: Sequence[keras.Variable], partitioner: Partitioner
) -> list[Text]:
    remarks = (_remark(v, partitioner) for v in variables)
    return [
        Text(f"  {word}: {line}")
        for word, line in dict.fromkeys(r for r in remarks if r is not None)
    ]


def _remark(
    variable: keras.Variable, partitioner: Partitioner
) -> tuple[str, str] | None:
    if variable.shape is None or variable.synchronization == "on_read":
        return None
    if is_updated_replicated(variable):
        return "updated whole", (
            "Its optimizer is called inside of a branch or a loop, or by "
            "replicas that do different things: each gathers it to update it."
        )
    held = placement_of(variable)
    axes = () if held is None else tuple(held.sharding.spec)
    if held is not None and held.mesh.axis in axes:
        return None
    return partitioner.why_replicated(tuple(variable.shape), axes)


def draw_mesh(mesh: ReplicaMesh) -> Group:
    """Draws a box for each replica, with a heading for each process.

    Args:
      mesh: The replicas.

    Returns:
      A heading and the boxes; beyond 16 replicas or 4 processes the first
      few, "..." and the last.
    """
    groups = _by_process(mesh)
    num_shown, num_processes = mesh.num_replicas, mesh.num_processes
    is_many = num_shown > MAX_DEVICES
    if is_many:
        # One process has the whole drawing to itself.
        num_shown = MAX_DEVICES_OF_PROCESS * (2 if len(groups) == 1 else 1)
    parts: list[RenderableType] = [_heading(mesh)]
    for group in abbreviate(groups, MAX_PROCESSES if is_many else len(groups)):
        if group is None:
            parts.append(Text("..."))
            continue
        process_ids, items = group
        if num_processes > 1:
            count = counted(len(items), "replica")
            name = "process" if len(process_ids) == 1 else "processes"
            ids = ", ".join(map(str, process_ids))
            parts.append(Text(f"{name} {ids}: {count}"))
        boxes = [_box(item) for item in abbreviate(items, num_shown)]
        parts.append(Columns(boxes, padding=(0, 0)))
    return Group(*parts)


def tabulate_variables(
    variables: Sequence[keras.Variable],
    mesh: ReplicaMesh,
    partitioner: Partitioner | None = None,
) -> Table:
    """Lists variables with where they lie and what they cost.

    Args:
      variables: The variables; one given twice is listed once.
      mesh: The replicas.
      partitioner: Which of them the replicas divide among them.

    Returns:
      A table with totals in its footer; beyond 40 variables it has the 40
      that take most memory on a device.
    """
    distinct = {id(variable): variable for variable in variables}.values()
    rows = [describe_variable(v, mesh, partitioner) for v in distinct]
    shown = rows
    if len(rows) > MAX_VARIABLES:
        shown = sorted(rows, key=lambda row: -row.num_bytes)[:MAX_VARIABLES]
    elements = sum(_num_elements(row) for row in rows)
    footers = (
        counted(len(rows), "variable"),
        f"{elements:,}",
        "",
        "",
        _megabytes(sum(row.num_bytes for row in rows)),
    )
    headers = ("variable", "shape", "dtype", "sharding", "MB per device")
    cells = [
        (
            row.path,
            "?" if row.shape is None else str(row.shape),
            row.dtype,
            row.sharding + (f" ({row.remark[0]})" if row.remark else ""),
            _megabytes(row.num_bytes),
        )
        for row in shown
    ]
    table = _table_of(cells, headers, footers)
    if len(rows) > len(shown):
        table.add_row(f"... and {len(rows) - len(shown)} more")
    return table


def _table_of(
    cells: list[tuple[str, ...]],
    headers: tuple[str, ...],
    footers: tuple[str, ...],
) -> Table:
    table = Table(box=rich.box.SIMPLE_HEAD, show_footer=True)
    for i, (header, footer) in enumerate(zip(headers, footers, strict=True)):
        widest = max(map(len, (header, footer, *(c[i] for c in cells))))
        table.add_column(
            header,
            footer,
            justify="right" if header == "MB per device" else "left",
            # A narrow terminal cuts the paths, which are the longest.
            no_wrap=i > 0,
            overflow="ellipsis",
            min_width=min(widest, MAX_WIDTH) if i else None,
        )
    for row in cells:
        # Text, as a path may hold what rich takes for markup.
        path = Text(row[0], no_wrap=True, overflow="ellipsis")
        table.add_row(path, *map(Text, row[1:]))
    return table


def describe_variable(
    variable: keras.Variable,
    mesh: ReplicaMesh,
    partitioner: Partitioner | None = None,
) -> VariableRow:
    """The facts of one variable.

    Args:
      variable: A variable, built or not.
      mesh: The replicas. Where they are only compiled for, or the variable has
        no value, its row says where it would lie.
      partitioner: Which variables the replicas divide among them.

    Returns:
      Its row; "not built", with no bytes, if it has no value yet.
    """
    # `variable.value` would draw a value for one that has none.
    array = getattr(variable, "_value", None)
    shape = None if variable.shape is None else tuple(variable.shape)
    dtype = keras.backend.standardize_dtype(variable.dtype)
    sharding, num_bytes = "not built", 0
    held = None if array is None else array.sharding
    if is_abstract(variable) or (array is not None and mesh.is_abstract):
        held = sharding_of(variable, mesh)
    if held is not None and shape is not None:
        sharding = describe_sharding(held, mesh.devices)
        size = jax.dtypes.canonicalize_dtype(dtype).itemsize
        num_bytes = math.prod(held.shard_shape(shape)) * size
    return VariableRow(
        path=variable.path,
        shape=shape,
        dtype=dtype,
        sharding=sharding,
        num_bytes=num_bytes,
        remark=None if partitioner is None else _remark(variable, partitioner),
    )


def describe_sharding(sharding: Sharding, devices: Sequence[jax.Device]) -> str:
    """Where an array lies, in words.

    Args:
      sharding: The array's sharding.
      devices: The devices of the mesh.

    Returns:
      "replicated" if each of `devices` holds it whole; otherwise the
      partition spec, or the devices it is on.
    """
    held = sharding.device_set
    if sharding.is_fully_replicated:
        if held == set(devices):
            return "replicated"
        if len(held) == 1:
            return f"on {device_name(*held)}"
        return f"replicated on {len(held)} devices"
    if isinstance(sharding, NamedSharding):
        return str(sharding.spec)
    return type(sharding).__name__


def abbreviate(items: Sequence[Any], num_shown: int) -> list[Any]:
    """The first items, None for those left out, and the last one."""
    if len(items) <= num_shown:
        return list(items)
    return [*items[: num_shown - 2], None, items[-1]]


def device_name(device: jax.Device) -> str:
    """A device in a word: "tpu:0"."""
    return f"{device.platform}:{device.id}"


def counted(number: int, noun: str) -> str:
    """A number of things in words: "1 row", "1,024 rows"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _heading(mesh: ReplicaMesh) -> Text:
    kinds = sorted({device.device_kind for device in mesh.devices})
    cores = mesh.cores_per_replica
    text = (
        f"Mesh: {counted(mesh.num_replicas, 'replica')} on axis {mesh.axis!r}"
    )
    if cores > 1:
        text += f", each of {cores} cores on axis {mesh.model_axis!r}"
    text += f", {', '.join(kinds)}"
    if mesh.num_processes > 1:
        text += f", {mesh.num_processes} processes"
    return Text(text)


def _by_process(
    mesh: ReplicaMesh,
) -> list[tuple[tuple[int, ...], list[tuple[int, Sequence[jax.Device]]]]]:
    """Neighbours of the same processes: [(processes, [(replica, cores)])]."""
    cores = mesh.cores_per_replica
    starts = range(0, len(mesh.devices), cores)
    grouped = itertools.groupby(
        enumerate(mesh.devices[start : start + cores] for start in starts),
        key=lambda item: tuple(sorted({d.process_index for d in item[1]})),
    )
    return [(process_ids, list(items)) for process_ids, items in grouped]


def _box(item: tuple[int, Sequence[jax.Device]] | None) -> RenderableType:
    if item is None:
        return Text("\n ... ")
    replica_id, cores = item
    names = [device_name(device) for device in cores[:MAX_CORES]]
    names += ["..."] * (len(cores) > MAX_CORES)
    label = Text("\n".join([str(replica_id), *names]), justify="center")
    return Panel(label, expand=False)


def _num_elements(row: VariableRow) -> int:
    sizes = row.shape
    if sizes is None or any(size is None for size in sizes):
        return 0
    return math.prod(size for size in sizes if size is not None)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / BYTES_PER_MB:,.3f}"
