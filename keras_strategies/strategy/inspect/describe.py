"""`Strategy.describe`: a drawing of the mesh, and a table of variables."""

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

from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.variables.abstract_variables import (
    is_abstract,
)
from keras_strategies.variables.partitioners import Partitioner
from keras_strategies.variables.shardings import (
    is_updated_replicated,
    placement_of,
    sharding_of,
)

# The limits of the output: of longer sequences, only both ends are shown.
MAX_DEVICES = 16
MAX_DEVICES_OF_PROCESS = 4
MAX_PROCESSES = 4
MAX_CORES = 8
MAX_VARIABLES = 40
MAX_WIDTH = 20

BYTES_PER_MB = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableRow:
    """One row of the table of variables.

    Attributes:
      path: The variable's path, with the names of its layers.
      shape: The global shape, of any rank, or None if it is not known yet.
      dtype: The dtype.
      sharding: The sharding, as text for the table.
      num_bytes: The bytes on each device that stores a shard or a copy of the
        variable.
      remark: Why the variable is not sharded: a short remark for the table, and
        a sentence for the legend. None if no remark is needed.
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
      mesh: The mesh of the replicas.
      variables: The variables; duplicates are listed once.
      partitioner: The partitioner that shards variables, if any.

    Returns:
      A renderable for a `rich.console.Console`. Its length is bounded, however
      many devices and variables there are.
    """
    drawing = draw_mesh(mesh)
    table = tabulate_variables(variables, mesh, partitioner)
    if partitioner is None:
        return Group(drawing, table)
    return Group(
        drawing,
        Text(describe_partitioner(partitioner, mesh.num_replicas)),
        table,
        *_make_legend(variables, partitioner),
    )


def describe_partitioner(partitioner: Partitioner, num_replicas: int) -> str:
    """Returns a line of text on how many replicas shard the variables."""
    shards = partitioner.shards
    groups = num_replicas // shards
    text = f"{partitioner.name} shards variables over {shards} replicas"
    if groups > 1:
        text += f", in each of {groups} groups"
    return text


def _make_legend(
    variables: Sequence[keras.Variable], partitioner: Partitioner
) -> list[Text]:
    remarks = (_find_remark(v, partitioner) for v in variables)
    return [
        Text(f"  {word}: {line}")
        for word, line in dict.fromkeys(r for r in remarks if r is not None)
    ]


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
    placement = placement_of(variable)
    axes = () if placement is None else tuple(placement.sharding.spec)
    if placement is not None and placement.mesh.axis in axes:
        return None
    return partitioner.explain_replicated(tuple(variable.shape), axes)


def draw_mesh(mesh: ReplicaMesh) -> Group:
    """Draws a box for each replica, with a heading for each process.

    Args:
      mesh: The mesh of the replicas.

    Returns:
      A heading and the boxes. With more than 16 replicas, only the first few
      boxes and processes, "..." and the last are drawn.
    """
    groups = _group_by_process(mesh)
    num_shown, num_processes = mesh.num_replicas, mesh.num_processes
    is_many = num_shown > MAX_DEVICES
    if is_many:
        # If all replicas are in one group, it is drawn with more boxes.
        num_shown = MAX_DEVICES_OF_PROCESS * (2 if len(groups) == 1 else 1)
    parts: list[RenderableType] = [_make_heading(mesh)]
    for group in abbreviate(groups, MAX_PROCESSES if is_many else len(groups)):
        if group is None:
            parts.append(Text("..."))
            continue
        process_ids, items = group
        if num_processes > 1:
            count = format_count(len(items), "replica")
            name = "process" if len(process_ids) == 1 else "processes"
            ids = ", ".join(map(str, process_ids))
            parts.append(Text(f"{name} {ids}: {count}"))
        boxes = [_draw_box(item) for item in abbreviate(items, num_shown)]
        parts.append(Columns(boxes, padding=(0, 0)))
    return Group(*parts)


def tabulate_variables(
    variables: Sequence[keras.Variable],
    mesh: ReplicaMesh,
    partitioner: Partitioner | None = None,
) -> Table:
    """Lists variables with their shardings and their memory in a table.

    Args:
      variables: The variables; duplicates are listed once.
      mesh: The mesh of the replicas.
      partitioner: The partitioner that shards variables, if any.

    Returns:
      A table with totals in its footer. If there are more than 40 variables,
      only the 40 that take the most memory on a device are listed.
    """
    distinct = {id(variable): variable for variable in variables}.values()
    rows = [describe_variable(v, mesh, partitioner) for v in distinct]
    shown = rows
    if len(rows) > MAX_VARIABLES:
        shown = sorted(rows, key=lambda row: -row.num_bytes)[:MAX_VARIABLES]
    elements = sum(_count_elements(row) for row in rows)
    footers = (
        format_count(len(rows), "variable"),
        f"{elements:,}",
        "",
        "",
        _format_megabytes(sum(row.num_bytes for row in rows)),
    )
    headers = ("variable", "shape", "dtype", "sharding", "MB per device")
    cells = [
        (
            row.path,
            "?" if row.shape is None else str(row.shape),
            row.dtype,
            row.sharding + (f" ({row.remark[0]})" if row.remark else ""),
            _format_megabytes(row.num_bytes),
        )
        for row in shown
    ]
    table = _make_table(cells, headers, footers)
    if len(rows) > len(shown):
        table.add_row(f"... and {len(rows) - len(shown)} more")
    return table


def _make_table(
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
            # In a narrow terminal only the paths are cut, because they are the
            # longest texts.
            no_wrap=i > 0,
            overflow="ellipsis",
            min_width=min(widest, MAX_WIDTH) if i else None,
        )
    for row in cells:
        # `Text`, because a path may contain rich's markup.
        path = Text(row[0], no_wrap=True, overflow="ellipsis")
        table.add_row(path, *map(Text, row[1:]))
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
    shape = None if variable.shape is None else tuple(variable.shape)
    dtype = keras.backend.standardize_dtype(variable.dtype)
    sharding, num_bytes = "not built", 0
    placed = None if array is None else array.sharding
    if is_abstract(variable) or (array is not None and mesh.is_abstract):
        placed = sharding_of(variable, mesh)
    if placed is not None and shape is not None:
        sharding = describe_sharding(placed, mesh.devices)
        size = jax.dtypes.canonicalize_dtype(dtype).itemsize
        num_bytes = math.prod(placed.shard_shape(shape)) * size
    return VariableRow(
        path=variable.path,
        shape=shape,
        dtype=dtype,
        sharding=sharding,
        num_bytes=num_bytes,
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
    text += f", {', '.join(kinds)}"
    if mesh.num_processes > 1:
        text += f", {mesh.num_processes} processes"
    return Text(text)


def _group_by_process(
    mesh: ReplicaMesh,
) -> list[tuple[tuple[int, ...], list[tuple[int, Sequence[jax.Device]]]]]:
    """Groups adjacent replicas that belong to the same processes.

    Returns:
      A list of (processes, [(replica id, cores)]).
    """
    cores = mesh.cores_per_replica
    starts = range(0, len(mesh.devices), cores)
    grouped = itertools.groupby(
        enumerate(mesh.devices[start : start + cores] for start in starts),
        key=lambda item: tuple(sorted({d.process_index for d in item[1]})),
    )
    return [(process_ids, list(items)) for process_ids, items in grouped]


def _draw_box(item: tuple[int, Sequence[jax.Device]] | None) -> RenderableType:
    if item is None:
        return Text("\n ... ")
    replica_id, cores = item
    names = [format_device(device) for device in cores[:MAX_CORES]]
    names += ["..."] * (len(cores) > MAX_CORES)
    label = Text("\n".join([str(replica_id), *names]), justify="center")
    return Panel(label, expand=False)


def _count_elements(row: VariableRow) -> int:
    sizes = row.shape
    if sizes is None or any(size is None for size in sizes):
        return 0
    return math.prod(size for size in sizes if size is not None)


def _format_megabytes(num_bytes: int) -> str:
    return f"{num_bytes / BYTES_PER_MB:,.3f}"
