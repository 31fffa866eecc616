"""`Strategy.explain_input`: which rows each process and replica reads."""

import dataclasses
import io
import os
import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import rich.box
from keras import tree
from keras.utils import PyDataset
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from keras_strategies._types import Dataset
from keras_strategies.data.distributed import DistributedDataset
from keras_strategies.data.options import (
    AutoShardPolicy,
    InputOptions,
    check_input_options,
)
from keras_strategies.data.source import Reading, Source, Summary
from keras_strategies.data.sources.files import Files
from keras_strategies.data.sources.torch_data import is_torch
from keras_strategies.data.tfdata.tf_data import TfDataSource
from keras_strategies.fit.inputs import choose_source, keras_sources
from keras_strategies.spmd import rows as rows_lib
from keras_strategies.spmd.batches import num_rows
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.strategy.inspect import describe

Counts = tuple[int, ...]
Shares = tuple[Counts, Counts]
"""Two tuples of each replica's number of rows: the first for `fit`, `evaluate`
and `predict`, the second for a distributed dataset."""
_Policy = AutoShardPolicy

_READING = {
    _Policy.FILE: "each process reads only its files",
    _Policy.HINT: "each process reads only its shard",
    _Policy.OFF: "each process reads all rows of its dataset",
}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class InputExplanation:
    """The rows that each replica reads; prints as a table or a picture.

    Attributes:
      facts: Descriptions of the dataset's properties, by name.
      devices: Names of the devices, in the order of replica ids.
      processes: For each reader, its process ids. A reader is one process, or
        several that share replicas and so read the same rows.
      is_process_local: Whether each process reads its own dataset, without an
        order of rows across processes.
      batch_size: The rows of a full global batch, or None if unknown.
      whole: Each replica's rows in a full batch, or None if unknown.
      last: Each replica's rows in an epoch's last batch, or None if unknown.
      files: For each process, its files, or None if this process does not know
        them; empty if no files are known.
    """

    facts: dict[str, str]
    devices: tuple[str, ...]
    processes: tuple[str, ...] = ("0",)
    is_process_local: bool = False
    batch_size: int | None = None
    whole: Shares | None = None
    last: Shares | None = None
    files: tuple[tuple[str, ...] | None, ...] = ()

    @property
    def columns(self) -> list[tuple[str, Counts]]:
        """The columns with row counts: each title and its count per replica."""
        columns: list[tuple[str, Counts]] = []
        last = None if self.last == self.whole else self.last
        for name, shares in (("full batch", self.whole), ("last batch", last)):
            names = [f"{name}, fit", f"{name}, distributed"]
            if shares is not None and shares[0] == shares[1]:
                names = [name]
            columns += zip(names, shares or (), strict=False)
        return columns

    def __rich__(self) -> RenderableType:
        facts = Table.grid(padding=(0, 2))
        for name, text in self.facts.items():
            facts.add_row(name, Text(text))
        table = Table("process", "replica", box=rich.box.SIMPLE_HEAD)
        for title, _ in self.columns:
            table.add_column(title.replace(", ", "\n"), justify="right")
        if self.files:
            table.add_column("files of the process")
        each = len(self.devices) // len(self.processes)
        shown = list_shown_replicas(len(self.devices), len(self.processes))
        for process, replicas in (group or (None, [None]) for group in shown):
            name = "..." if process is None else self.processes[process]
            for i in replicas:
                cells = [name, "..."]
                if i is not None:
                    cells[1:] = self._format_counts(i)
                if self.files and process is not None and i == process * each:
                    cells.append(_format_names(self.files[process]))
                table.add_row(*map(Text, cells))
        return Group(facts, table)

    def _format_counts(self, i: int) -> Iterator[str]:
        """Yields the cells of a replica: its device and its rows."""
        yield f"{i} ({self.devices[i]})"
        for _, counts in self.columns:
            start, count = sum(counts[:i]), counts[i]
            place = f" ({start}:{start + count})" * (not self.is_process_local)
            yield f"{count}{place}" if count else "none"

    def _print(self, width: int | None = None) -> Console:
        console = Console(
            file=io.StringIO(), record=True, width=width, force_jupyter=False
        )
        console.print(self)
        return console

    def __str__(self) -> str:
        lines = self._print().export_text().splitlines()
        return "\n".join(map(str.rstrip, lines))

    __repr__ = __str__

    def _repr_svg_(self) -> str:
        width = 46 + 17 * len(self.columns) + 32 * bool(self.files)
        svg = self._print(width).export_svg(title="explain_input")
        # Removes the fonts of rich, which would be fetched from the internet.
        return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def explain_input(
    dataset: Dataset,
    mesh: ReplicaMesh,
    batch_size: int | None,
    options: InputOptions | None,
) -> InputExplanation:
    """Implements `Strategy.explain_input`."""
    policy = _read_policy(dataset, batch_size, options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        source = _make_source(dataset, mesh, policy, batch_size)
        summary = source.summary()
        files = _list_files(summary, dataset, mesh, policy)
    notes = [str(w.message) for w in caught if w.category is UserWarning]
    notes += summary.notes
    size = source.batch_size
    if size is None:
        size, note = _guess_size(dataset, source, summary)
        notes += note
    whole, last = _compute_shares(source, summary, size, mesh)
    facts = {
        "data": source.kind,
        "policy": _describe_policy(summary, dataset, mesh, policy),
        "reading": _describe_reading(source, summary, mesh.num_processes),
        "batch": _format_known(size, "row"),
        "epoch": _format_known(source.num_batches, "step"),
        "last batch": _format_known(last and sum(last[0]), "row"),
    }
    if notes:
        facts["note"] = "\n".join(dict.fromkeys(notes))
    return InputExplanation(
        facts=facts,
        devices=_list_devices(mesh),
        processes=_list_readers(mesh),
        is_process_local=source.is_process_local,
        batch_size=size,
        whole=whole,
        last=last,
        files=files,
    )


def _guess_size(
    dataset: Dataset, source: Source, summary: Summary
) -> tuple[int | None, list[str]]:
    """Guesses a full batch's size; also returns remarks on that guess."""
    if source.is_process_local:
        note = (
            "The first batch of a process determines the number of rows in a "
            "full batch, whose rows are split over the processes."
        )
        return source.likely_size, [note]
    if source.num_batches == 0:
        return None, []
    size = summary.first_rows
    if isinstance(dataset, PyDataset):
        size = num_rows(keras_sources.to_host_batch(dataset[0]))
    return size, ["Later batches may have a different size."] * bool(size)


def _list_readers(mesh: ReplicaMesh) -> tuple[str, ...]:
    """Returns the process ids of each reader, as in `InputExplanation`."""
    index = mesh.processes.index
    return tuple(", ".join(map(str, map(index, g))) for g in mesh.readers)


def _list_devices(mesh: ReplicaMesh) -> tuple[str, ...]:
    """Returns each replica's device, or its first and last core, as text."""
    cores = mesh.cores_per_replica
    names = [describe.format_device(device) for device in mesh.devices]
    ends = zip(names[::cores], names[cores - 1 :: cores], strict=True)
    return tuple(a if a == b else f"{a}..{b}" for a, b in ends)


def compute_batch_shares(
    rows: int, batch_size: int, num_replicas: int
) -> Shares:
    """Returns each replica's row count in a batch that all processes see."""
    fixed = rows_lib.rows_of_replicas(rows, batch_size, num_replicas)
    return rows_lib.balanced_rows(rows, num_replicas), fixed


def compute_local_shares(
    batch_size: int, num_replicas: int, num_processes: int
) -> Shares:
    """Returns each replica's row count in the first process-local batch."""
    each = num_replicas // num_processes
    counts = rows_lib.rows_of_replicas(batch_size, batch_size, num_replicas)
    parts = rows_lib.rows_of_processes(counts, num_processes)
    maximum = -(-max(parts) // each)
    fit = (rows_lib.fill_in_order([maximum] * each, part) for part in parts)
    return sum(fit, ()), counts


def list_shown_replicas(num_replicas: int, num_processes: int) -> list[Any]:
    """Lists (process, replica ids) to show; None replaces omitted ones."""
    each = num_replicas // num_processes
    maximum, max_processes = num_replicas, num_processes
    if num_replicas > describe.MAX_DEVICES:
        maximum = describe.MAX_DEVICES_OF_PROCESS * (1 + (num_processes == 1))
        max_processes = describe.MAX_PROCESSES
    starts = range(0, num_replicas, each)
    ids = (describe.abbreviate(range(s, s + each), maximum) for s in starts)
    return describe.abbreviate(list(enumerate(ids)), max_processes)


def _read_policy(
    dataset: Dataset, size: int | None, options: InputOptions | None
) -> _Policy | None:
    """Returns the policy of `options`, or None if they choose none.

    Raises:
      ValueError: if `size` or `options` do not fit the dataset.
    """
    check_input_options(options)
    kind, is_arrays = type(dataset).__name__, bool(_list_arrays(dataset))
    takes_size = is_arrays or is_torch(dataset)
    is_size = takes_size and isinstance(size, int) and size > 0
    if size is not None and not is_size:
        raise ValueError(
            "`batch_size` must be a positive integer, and can be passed only "
            f"for arrays and torch datasets. Received: {size!r} for a {kind}. "
            "Omit it for other data."
        )
    if options is None or options.distribute is None:
        return None
    if is_arrays or isinstance(dataset, DistributedDataset):
        raise ValueError(
            "`options` must not be passed for arrays, which are always split "
            "by rows, or for a distributed dataset, which already has options. "
            f"Received: `options` for a {kind}. Omit `options`."
        )
    return options.distribute.policy


def _make_source(
    dataset: Dataset,
    mesh: ReplicaMesh,
    policy: _Policy | None,
    size: int | None,
) -> Source:
    """Makes this process's source, without contacting other processes."""
    if isinstance(dataset, DistributedDataset):
        return dataset.source
    if x := _list_arrays(dataset):
        if not all(map(np.shape, x)):
            num_rows(x)  # Raises if an array has no rows.
        return keras_sources.make_array_source(x, size or 32)
    if isinstance(dataset, Files) and dataset.count is True:
        # Counting the rows would read the files.
        dataset = dataclasses.replace(dataset, count=False)
    return choose_source.make_local_source(
        dataset, mesh, 0, policy=policy, batch_size=size
    )


def _list_arrays(dataset: Dataset) -> list[Any]:
    """Returns the arrays of a nest of arrays; [] for other data."""
    leaves = [leaf for leaf in tree.flatten(dataset) if leaf is not None]
    return leaves if keras_sources.are_arrays(leaves) else []


def _list_files(
    summary: Summary,
    dataset: Dataset,
    mesh: ReplicaMesh,
    policy: _Policy | None,
) -> tuple[tuple[str, ...] | None, ...]:
    """Returns each process's files; None where they are unknown."""
    files, count = dict(summary.files), mesh.num_readers
    if isinstance(dataset, Files):
        is_drawn = dataset.window and dataset.seed is None
        if is_drawn and summary.applied is _Policy.FILE:
            return (None,) * count  # A seed is drawn when reading begins.
    elif files and not isinstance(dataset, DistributedDataset):
        place: Any = {"num_processes": count, "seed": 0, "policy": policy}
        groups = list_shown_replicas(mesh.num_replicas, count)
        for process, _ in filter(None, groups):
            if process not in files:
                other = TfDataSource(dataset, process_index=process, **place)
                files |= other.summary().files
    return tuple(map(files.get, range(count))) if files else ()


def _format_names(paths: tuple[str, ...] | None) -> str:
    if paths is None:
        return "unknown"
    names = [os.path.basename(path) for path in paths[:3]]
    names += ["..."] * (len(paths) > len(names))
    return f"{len(paths)}: {', '.join(names)}"


def _compute_shares(
    source: Source, summary: Summary, size: int | None, mesh: ReplicaMesh
) -> tuple[Shares | None, Shares | None]:
    """Returns each replica's rows in a full batch and in the last one."""
    if not size:
        return None, None
    if source.is_process_local:
        return compute_local_shares(
            size, mesh.num_replicas, mesh.num_readers
        ), None
    whole = compute_batch_shares(size, size, mesh.num_replicas)
    rows, count = summary.num_rows, source.num_batches
    last = min(rows - (count - 1) * size, size) if rows and count else None
    if not last:
        return whole, None
    if source.batch_size is None and mesh.num_processes > 1:
        size = last  # `Steps` does the same.
    return whole, compute_batch_shares(last, size, mesh.num_replicas)


def _describe_policy(
    summary: Summary,
    dataset: Dataset,
    mesh: ReplicaMesh,
    policy: _Policy | None,
) -> str:
    """Returns text that names the applied policy and its reason."""
    asked, applied, reason = summary.asked, summary.applied, summary.reason
    if asked is None:
        if mesh.num_processes == 1:
            applied = policy or _Policy.DATA
            reason = "one process reads the whole dataset"
        if policy is applied:
            reason = "the policy was chosen"
        # A distributed dataset does not keep its original options.
        is_distributed = isinstance(dataset, DistributedDataset)
        asked = applied if is_distributed else policy or _Policy.AUTO
    words = f"{applied.name}, because {reason}"
    return words if asked is applied else f"{asked.name}, applied as {words}"


def _describe_reading(
    source: Source, summary: Summary, num_processes: int
) -> str:
    """Returns text on which rows each process reads."""
    is_of_process = summary.reading is not Reading.REPLICAS
    if num_processes == 1 and is_of_process:
        return "the only process reads all rows"
    if source.is_process_local and is_of_process:
        return _READING[summary.applied]
    return summary.reading.value


def _format_known(number: int | None, noun: str) -> str:
    unknown = "unknown without reading the data"
    return unknown if number is None else describe.format_count(number, noun)
