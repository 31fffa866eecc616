"""`Strategy.explain_input`: which rows each process and replica reads."""

import dataclasses
import io
import os
import warnings

import numpy as np
from keras import tree
from rich.console import Console, RenderableType
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
from keras_strategies.fit.inputs import choose_source, keras_sources
from keras_strategies.spmd import rows as rows_lib
from keras_strategies.spmd.batches import num_rows
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.strategy.inspect import describe

Shares = tuple[tuple[int, ...], tuple[int, ...]]
"""Two tuples of each replica's number of rows: the first for `fit`, `evaluate`
and `predict`, the second for a distributed dataset."""

_MAX_REPLICAS = 16
_MAX_FILES = 3
_UNKNOWN = "unknown without reading the data"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class InputExplanation:
    """The rows that each replica reads; prints as a table.

    Attributes:
      facts: Descriptions of the dataset's properties, by name.
      batch_size: The rows of a full global batch, or None if unknown.
      whole: Each replica's rows in a full batch, or None if unknown.
      last: Each replica's rows in an epoch's last batch, or None if unknown.
    """

    facts: dict[str, str]
    batch_size: int | None = None
    whole: Shares | None = None
    last: Shares | None = None

    def __rich__(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for name, text in self.facts.items():
            table.add_row(name, Text(text))
        return table

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), record=True, force_jupyter=False)
        console.print(self)
        lines = console.export_text().splitlines()
        return "\n".join(map(str.rstrip, lines))

    __repr__ = __str__


def explain_input(
    dataset: Dataset,
    mesh: ReplicaMesh,
    batch_size: int | None,
    options: InputOptions | None,
) -> InputExplanation:
    """Implements `Strategy.explain_input`."""
    check_input_options(options)
    distribute = None if options is None else options.distribute
    policy = None if distribute is None else distribute.policy
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        source = _make_source(dataset, mesh, policy, batch_size)
        summary = source.summary()
    reading, reason = summary.reading.value, summary.reason
    if mesh.num_processes == 1 and summary.reading is not Reading.REPLICAS:
        reading = "the only process reads all rows"
    if policy is summary.applied:
        reason = "the policy was chosen"
    notes = [str(w.message) for w in caught if w.category is UserWarning]
    size = source.batch_size
    if size is None and source.num_batches != 0:
        size = source.likely_size
        if size:
            notes.append("The first batch determines the size of a full batch.")
    whole, last = _compute_shares(source, summary, size, mesh)
    facts = {
        "data": source.kind,
        "policy": f"{summary.applied.name}, because {reason}",
        "reading": reading,
        "batch": _format_known(size, "row"),
        "epoch": _format_known(source.num_batches, "step"),
        "rows of replicas": _list_rows(whole),
        "last batch": _format_known(last and sum(last[0]), "row"),
        "its rows": _list_rows(last),
        **_list_files(summary, mesh),
    }
    if notes:
        facts["note"] = "\n".join(dict.fromkeys(notes))
    return InputExplanation(
        facts=facts, batch_size=size, whole=whole, last=last
    )


def compute_batch_shares(
    rows: int, batch_size: int, num_replicas: int
) -> Shares:
    """Returns each replica's row count in a batch that all processes see."""
    fixed = rows_lib.rows_of_replicas(rows, batch_size, num_replicas)
    return rows_lib.balanced_rows(rows, num_replicas), fixed


def _list_rows(shares: Shares | None) -> str:
    """Describes how many rows of a batch each replica gets."""
    if shares is None:
        return _UNKNOWN
    fit, distributed = (
        ", ".join(map(str, counts[:_MAX_REPLICAS]))
        + ", ..." * (len(counts) > _MAX_REPLICAS)
        for counts in shares
    )
    if fit == distributed:
        return fit
    return f"{fit} in `fit`, {distributed} in a distributed dataset"


def _list_files(summary: Summary, mesh: ReplicaMesh) -> dict[str, str]:
    facts = {}
    for i, paths in enumerate(summary.files[: describe.MAX_PROCESSES]):
        names = [os.path.basename(path) for path in paths[:_MAX_FILES]]
        names += ["..."] * (len(paths) > _MAX_FILES)
        process = ", ".join(map(str, mesh.readers[i]))
        text = f"{len(paths)}: {', '.join(names)}"
        facts[f"files, process {process}"] = text
    return facts


def _make_source(
    dataset: Dataset,
    mesh: ReplicaMesh,
    policy: AutoShardPolicy | None,
    size: int | None,
) -> Source:
    """Makes this process's source, without contacting other processes."""
    if isinstance(dataset, DistributedDataset):
        return dataset.source
    leaves = [leaf for leaf in tree.flatten(dataset) if leaf is not None]
    if leaves and keras_sources.are_arrays(leaves):
        if not all(map(np.shape, leaves)):
            num_rows(leaves)  # Raises if an array has no rows.
        return keras_sources.make_array_source(leaves, size or 32)
    return choose_source.make_local_source(
        dataset, mesh, 0, policy=policy, batch_size=size
    )


def _compute_shares(
    source: Source, summary: Summary, size: int | None, mesh: ReplicaMesh
) -> tuple[Shares | None, Shares | None]:
    """Returns each replica's rows in a full batch and in the last one.

    Both are unknown for process-local rows, which differ from step to step.
    """
    if not size or source.is_process_local:
        return None, None
    whole = compute_batch_shares(size, size, mesh.num_replicas)
    rows, count = summary.num_rows, source.num_batches
    last = min(rows - (count - 1) * size, size) if rows and count else None
    if not last:
        return whole, None
    if source.batch_size is None and mesh.num_processes > 1:
        size = last  # `Steps` does the same.
    return whole, compute_batch_shares(last, size, mesh.num_replicas)


def _format_known(number: int | None, noun: str) -> str:
    if number is None:
        return _UNKNOWN
    return describe.format_count(number, noun)
