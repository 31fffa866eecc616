"""`Strategy.explain_input`: who reads which rows of a dataset."""

import dataclasses
import io
import os
import re
import warnings
from typing import Any

import numpy as np
import rich.box
from keras import tree
from keras.utils import PyDataset
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from keras_strategies._core import rows as rows_lib
from keras_strategies._core.batches import num_rows
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._types import Dataset
from keras_strategies.data.distributed import DistributedDataset
from keras_strategies.data.options import (
    AutoShardPolicy,
    InputOptions,
    check_input_options,
)
from keras_strategies.data.source import Source
from keras_strategies.data.source_summary import Reading, Summary
from keras_strategies.data.sources.files import Files
from keras_strategies.data.sources.torch_data import is_torch
from keras_strategies.data.tfdata.tf_data import TfDataSource
from keras_strategies.keras_bridge.inputs import choose_source, keras_sources
from keras_strategies.strategy.inspect import describe

Counts = tuple[int, ...]
Shares = tuple[Counts, Counts]
"""Rows of each replica: in `fit` and its like; from a distributed dataset."""
_Policy = AutoShardPolicy

_READING = {
    _Policy.FILE: "each process reads its own files only",
    _Policy.HINT: "each process reads its own shard only",
    _Policy.OFF: "each process reads all of its own dataset",
}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class InputExplanation:
    """Who reads which rows: a table where printed, a picture in notebooks.

    Attributes:
      facts: What is known of the dataset as a whole, in words.
      devices: Names of the devices, in the order of the replica ids.
      processes: Who reads rows of their own, each for equally many of them:
        a process, or those that have cores of the same replicas.
      is_process_local: Whether each process has rows of its own, in no common
        order.
      batch_size: Rows of a whole batch of all processes, if known.
      whole: How a whole batch is divided, if its size is known.
      last: How an epoch's last batch is divided, if that is known.
      files: The files of each process, None for one not known here; empty
        where no files are known.
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
        """The batches that are shown: titles, and rows of the replicas."""
        columns: list[tuple[str, Counts]] = []
        last = None if self.last == self.whole else self.last
        for name, shares in (("whole batch", self.whole), ("last batch", last)):
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
        for group in shown_replicas(len(self.devices), len(self.processes)):
            process, replicas = group or (None, [None])
            for i in replicas:
                table.add_row(*map(Text, self._cells(process, i)))
        return Group(facts, table)

    def _cells(self, process: int | None, i: int | None) -> list[str]:
        """A replica's row; None stands for those that are left out."""
        if process is None or i is None:
            return [
                "..." if process is None else self.processes[process],
                "...",
            ]
        cells = [self.processes[process], f"{i} ({self.devices[i]})"]
        for _, counts in self.columns:
            start, count = sum(counts[:i]), counts[i]
            place = f" ({start}:{start + count})"
            cells.append(f"{count}{place * (not self.is_process_local)}")
            if not count:
                cells[-1] = "none"
        is_first = not i % (len(self.devices) // len(self.processes))
        if self.files and is_first:
            cells.append(_names(self.files[process]))
        return cells

    def _printed(self, width: int | None = None) -> Console:
        console = Console(
            file=io.StringIO(), record=True, width=width, force_jupyter=False
        )
        console.print(self)
        return console

    def __str__(self) -> str:
        lines = self._printed().export_text().splitlines()
        return "\n".join(map(str.rstrip, lines))

    __repr__ = __str__

    def _repr_svg_(self) -> str:
        width = 46 + 17 * len(self.columns) + 32 * bool(self.files)
        svg = self._printed(width).export_svg(title="explain_input")
        # Without rich's fonts, which would be fetched from the internet.
        return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def explain_input(
    dataset: Dataset,
    mesh: ReplicaMesh,
    batch_size: int | None,
    options: InputOptions | None,
) -> InputExplanation:
    """Explains how replicas share a dataset; see `Strategy.explain_input`."""
    policy = _policy_of(dataset, batch_size, options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        source = _source(dataset, mesh, policy, batch_size)
        summary = source.summary()
        files = _files(summary, dataset, mesh, policy)
    notes = [str(w.message) for w in caught if w.category is UserWarning]
    notes += summary.notes
    size = source.batch_size
    if size is None:
        size, note = _likely_size(dataset, source, summary)
        notes += note
    whole, last = _shares(source, summary, size, mesh)
    facts = {
        "data": source.kind,
        "policy": _policies(summary, dataset, mesh, policy),
        "reading": _reading(source, summary, mesh.num_processes),
        "batch": _known(size, "row"),
        "epoch": _known(source.num_batches, "step"),
        "last batch": _known(last and sum(last[0]), "row"),
    }
    if notes:
        facts["note"] = "\n".join(dict.fromkeys(notes))
    return InputExplanation(
        facts=facts,
        devices=_places(mesh),
        processes=_readers(mesh),
        is_process_local=source.is_process_local,
        batch_size=size,
        whole=whole,
        last=last,
        files=files,
    )


def _likely_size(
    dataset: Dataset, source: Source, summary: Summary
) -> tuple[int | None, list[str]]:
    """Returns the rows of a whole batch by the first one, and a note on it."""
    if source.is_process_local:
        note = (
            "Whole batches have as many rows as the first batch of a process, "
            "whose rows the processes share."
        )
        return source.likely_size, [note]
    if source.num_batches == 0:
        return None, []
    size = summary.first_rows
    if isinstance(dataset, PyDataset):
        size = num_rows(keras_sources.host_batch(dataset[0]))
    return size, ["Batches may have other sizes than the first."] * bool(size)


def _readers(mesh: ReplicaMesh) -> tuple[str, ...]:
    """The processes by their places; together, who read the same rows."""
    if not mesh.spans_processes:
        return tuple(map(str, range(mesh.num_processes)))
    places = {process: i for i, process in enumerate(mesh.processes)}
    return tuple(
        ", ".join(str(places[process]) for process in group)
        for group in mesh.readers
    )


def _places(mesh: ReplicaMesh) -> tuple[str, ...]:
    """Each replica's device; of several cores the first and the last."""
    cores = mesh.cores_per_replica
    names = [describe.device_name(device) for device in mesh.devices]
    if cores == 1:
        return tuple(names)
    ends = zip(names[::cores], names[cores - 1 :: cores], strict=True)
    return tuple(f"{first}..{last}" for first, last in ends)


def shares_of_batch(rows: int, batch_size: int, num_replicas: int) -> Shares:
    """The shares of a batch that all processes see whole."""
    fixed = rows_lib.rows_of_replicas(rows, batch_size, num_replicas)
    return rows_lib.balanced_rows(rows, num_replicas), fixed


def shares_of_own(
    batch_size: int, num_replicas: int, num_processes: int
) -> Shares:
    """The shares of a first batch, of rows that are each process's own."""
    each = num_replicas // num_processes
    counts = rows_lib.rows_of_replicas(batch_size, batch_size, num_replicas)
    parts = rows_lib.rows_of_processes(counts, num_processes)
    most = -(-max(parts) // each)
    fit = (rows_lib.in_order([most] * each, part) for part in parts)
    return sum(fit, ()), counts


def shown_replicas(num_replicas: int, num_processes: int) -> list[Any]:
    """Processes and their replicas; None for those that are left out."""
    each = num_replicas // num_processes
    most, most_processes = num_replicas, num_processes
    if num_replicas > describe.MAX_DEVICES:
        most = describe.MAX_DEVICES_OF_PROCESS * (1 + (num_processes == 1))
        most_processes = describe.MAX_PROCESSES
    groups = [
        (p, describe.abbreviate(range(p * each, (p + 1) * each), most))
        for p in range(num_processes)
    ]
    return describe.abbreviate(groups, most_processes)


def _policy_of(
    dataset: Dataset, size: int | None, options: InputOptions | None
) -> _Policy | None:
    """The policy of `options`; raises for what does not go together."""
    check_input_options(options)
    kind, is_arrays = type(dataset).__name__, bool(_arrays(dataset))
    takes_size = is_arrays or is_torch(dataset)
    is_size = takes_size and isinstance(size, int) and size > 0
    if size is not None and not is_size:
        raise ValueError(
            "`batch_size` is for arrays and torch datasets, and positive. "
            f"Received: {size!r} beside a {kind}. Leave it out otherwise."
        )
    if options is None or options.distribute is None:
        return None
    if is_arrays or isinstance(dataset, DistributedDataset):
        raise ValueError(
            "Arrays are always divided by rows, a distributed dataset is "
            f"divided. Received: `options` beside a {kind}. Leave them out."
        )
    return options.distribute.policy


def _source(
    dataset: Dataset,
    mesh: ReplicaMesh,
    policy: _Policy | None,
    size: int | None,
) -> Source:
    """What this process would read, made without asking the others."""
    if isinstance(dataset, DistributedDataset):
        return dataset.source
    if x := _arrays(dataset):
        if not all(map(np.shape, x)):
            num_rows(x)  # Raises that an array has no rows.
        return keras_sources.source_of_arrays(x, size or 32)
    if isinstance(dataset, Files) and dataset.count is True:
        # It would read the files to count their rows.
        dataset = dataclasses.replace(dataset, count=False)
    return choose_source.local_source(
        dataset, mesh, 0, policy=policy, batch_size=size
    )


def _arrays(dataset: Dataset) -> list[Any]:
    """The arrays of a nest of them; none of anything else."""
    leaves = [leaf for leaf in tree.flatten(dataset) if leaf is not None]
    return leaves if keras_sources.are_arrays(leaves) else []


def _files(
    summary: Summary,
    dataset: Dataset,
    mesh: ReplicaMesh,
    policy: _Policy | None,
) -> tuple[tuple[str, ...] | None, ...]:
    """The files of each process; None for those not known here."""
    files, count = dict(summary.files), mesh.num_readers
    if isinstance(dataset, Files):
        is_drawn = dataset.window and dataset.seed is None
        if is_drawn and summary.applied is _Policy.FILE:
            return (None,) * count  # A seed is drawn when reading begins.
    elif files and not isinstance(dataset, DistributedDataset):
        place: Any = {"num_processes": count, "seed": 0, "policy": policy}
        groups = shown_replicas(mesh.num_replicas, count)
        for process, _ in filter(None, groups):
            if process not in files:
                other = TfDataSource(dataset, process_index=process, **place)
                files |= other.summary().files
    return tuple(map(files.get, range(count))) if files else ()


def _names(paths: tuple[str, ...] | None) -> str:
    if paths is None:
        return "unknown"
    names = [os.path.basename(path) for path in paths[:3]]
    names += ["..."] * (len(paths) > len(names))
    return f"{len(paths)}: {', '.join(names)}"


def _shares(
    source: Source, summary: Summary, size: int | None, mesh: ReplicaMesh
) -> tuple[Shares | None, Shares | None]:
    """How a whole batch is divided, and the last one, where that is known."""
    if not size:
        return None, None
    if source.is_process_local:
        return shares_of_own(size, mesh.num_replicas, mesh.num_readers), None
    whole = shares_of_batch(size, size, mesh.num_replicas)
    rows, count = summary.num_rows, source.num_batches
    last = min(rows - (count - 1) * size, size) if rows and count else None
    if not last:
        return whole, None
    if source.batch_size is None and mesh.num_processes > 1:
        size = last  # As in `Steps`.
    return whole, shares_of_batch(last, size, mesh.num_replicas)


def _policies(
    summary: Summary,
    dataset: Dataset,
    mesh: ReplicaMesh,
    policy: _Policy | None,
) -> str:
    """Words for the policy that is followed, with the reason."""
    asked, applied, reason = summary.asked, summary.applied, summary.reason
    if asked is None:
        if mesh.num_processes == 1:
            applied = policy or _Policy.DATA
            reason = "one process reads the whole dataset"
        if policy is applied:
            reason = "the policy was chosen"
        # What a distributed dataset was made with is not known any more.
        is_distributed = isinstance(dataset, DistributedDataset)
        asked = applied if is_distributed else policy or _Policy.AUTO
    words = f"{applied.name}, because {reason}"
    return words if asked is applied else f"{asked.name}, applied as {words}"


def _reading(source: Source, summary: Summary, num_processes: int) -> str:
    """What each process reads."""
    is_of_process = summary.reading is not Reading.REPLICAS
    if num_processes == 1 and is_of_process:
        return "the only process reads all rows"
    if source.is_process_local and is_of_process:
        return _READING[summary.applied]
    return summary.reading.value


def _known(number: int | None, noun: str) -> str:
    unknown = "unknown: not looked at ahead"
    return unknown if number is None else describe.counted(number, noun)
