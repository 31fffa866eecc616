"""Reading a source's epochs in steps, the same number in every process."""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from keras_strategies._types import Tree
from keras_strategies.cluster.exchange.host_exchange import (
    Agreement,
    IsStopped,
)
from keras_strategies.cluster.exchange.message_forms import Either, is_count
from keras_strategies.cluster.exchange.rounds import Rounds
from keras_strategies.data import batch_spec, step_checks
from keras_strategies.data.prefetch import Prefetched, Rebatcher, peek
from keras_strategies.data.source import (
    Part,
    Source,
    all_rows,
    check_part,
    data_checksum,
)
from keras_strategies.data.step_checks import raise_everywhere
from keras_strategies.names.phases import READ, Phase
from keras_strategies.spmd.batches import HostBatch
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.rows import (
    balanced_rows,
    rotated_rows,
    rows_of_processes,
    rows_of_replicas,
)


def _is_size(value: object) -> bool:
    # With batches of zero rows, reading would never end.
    return is_count(value) and value > 0


# The expected form of the messages between processes.
_PEEKED = {"rows": [_is_size], "is_cut": bool}
_MARK = int | str | None
_END = {"rows": None, "checksum?": _MARK, "error?": str}
_ROWS = {"rows": is_count, "spec": str, "checksum": _MARK, "read?": is_count}
_PLACE = {"place": str}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """Reads a source's epochs as steps that all processes take together.

    If every process sees the global batches, each process uses its own rows of
    every batch. If the source is process-local, its rows are regrouped into
    this process's share of a batch. Processes that have no more rows take part
    in the steps with empty batches until all processes have finished.

    Before each step the processes exchange, on the host, a description of the
    rows that each has read (`Agreement`). This ensures that no process starts a
    step that another process cannot take part in. If the length of the data is
    known, they do this only once per epoch. Processes that have cores of the
    same replicas read the same rows (`ReplicaMesh.readers`), and compare
    checksums of these rows at every step.

    Attributes:
      source: The source to read.
      mesh: The mesh of the replicas.
      name: The name of the method that reads the data, such as "fit", for
        messages.
      is_balanced: Whether the rows of a batch are divided evenly among the
        replicas, as in `fit`. Otherwise each replica has a fixed range of rows
        in the batch (rule V2 of docs/parity.md).
      agree: A function that creates the `Agreement` of an epoch; tests replace
        it.
      sizes: Only for a process-local source with an unknown batch size: a list
        that is empty until all processes have read their first batches. Then
        its only entry is the batch size, or None if each process's batches are
        used without regrouping.
    """

    source: Source
    mesh: ReplicaMesh
    name: str
    is_balanced: bool = True
    agree: Callable[[tuple[int, ...], str], Any] = Agreement
    sizes: list[int | None] = dataclasses.field(
        default_factory=list, init=False, compare=False
    )

    def read_epoch(
        self, epoch: int, start: int = 0, is_stopped: IsStopped | None = None
    ) -> Iterator[HostBatch]:
        """Iterates over the steps of an epoch.

        Args:
          epoch: Number of the epoch, from 0.
          start: Number of steps to skip at the beginning.
          is_stopped: A function that is called while this process waits for
            the other processes; the wait ends if it returns True.

        Yields:
          This process's part of each step's batch.

        Raises:
          ValueError: if the processes' data differ in a property that must be
            equal. All processes raise this error.
          RuntimeError: if reading failed in another process.
        """
        if self.mesh.num_processes == 1:
            return self._read_alone(epoch, start)
        is_local = self.source.is_process_local
        first, cut = (0, all_rows) if is_local else (start, self._cut)
        parts = self.source.read(epoch, first, cut)
        # Created now and not when a thread reads the first step: all processes
        # must create their agreements in the same order.
        about = f"the data of `{self.name}`"
        rounds = Rounds(
            self.mesh.processes,
            f"reading {about}",
            about,
            is_stopped=is_stopped,
            agree=self.agree,
        )
        return self._read_together(rounds, parts, epoch, start)

    def prefetch(
        self,
        epoch: int,
        start: int,
        make_items: Callable[[Iterator[HostBatch]], Iterator[Any]],
        *,
        is_pause: Callable[[Any], bool],
    ) -> Iterator[Any]:
        """Makes items from an epoch's batches, ahead of time if that is faster.

        Args:
          epoch: Number of the epoch, from 0.
          start: Number of steps to skip at the beginning.
          make_items: A function that converts an iterator over the batches of
            the steps to an iterator over items.
          is_pause: See `Prefetched`.

        Returns:
          An iterator over the items; it has a method `close`.
        """
        stop = threading.Event()
        items = make_items(self.read_epoch(epoch, start, stop.is_set))
        if self._needs_no_exchange:
            # Slicing arrays takes less time than switching threads.
            return items
        needs_thread = self.mesh.num_processes > 1
        return Prefetched(items, stop, is_pause, needs_thread=needs_thread)

    @property
    def _needs_no_exchange(self) -> bool:
        """Whether the processes exchange messages only for the first step."""
        return self.source.is_planned and not self.mesh.spans_processes

    def _read_alone(self, epoch: int, start: int) -> Iterator[HostBatch]:
        size = self.source.batch_size
        for read in self.source.read(epoch, start, all_rows):
            part = check_part(read, self.source.kind)
            size = size or part.rows
            yield HostBatch(
                data=part.data,
                parts=(part.rows,),
                batch_size=size,
                counts=part.counts,
            )

    def _cut(self, rows: int) -> tuple[int, int]:
        parts = self._divide_rows(rows, self.source.batch_size or rows)
        start = sum(parts[: self.mesh.reader_index])
        return start, start + parts[self.mesh.reader_index]

    def _divide_rows(self, rows: int, batch_size: int) -> tuple[int, ...]:
        """Returns the number of a batch's rows for each reader.

        A reader is a process, or a group of processes that share replicas and
        therefore read the same rows.
        """
        count = self.mesh.num_replicas
        counts = balanced_rows(rows, count)
        if not self.is_balanced:
            counts = rows_of_replicas(rows, batch_size, count)
        return rows_of_processes(counts, self.mesh.num_readers)

    @property
    def _size(self) -> int | None:
        """Number of rows in a global batch of process-local rows, if known."""
        return self.source.batch_size or next(iter(self.sizes), None)

    def _read_local_parts(
        self, rounds: Rounds, parts: Iterator[Part], start: int
    ) -> Iterator[Part]:
        """Yields this process's rows, regrouped into its share of each step.

        Rows that the source has assigned to replicas (`Part.counts`) are not
        regrouped.
        """
        if self.source.batch_size is None and not self.sizes:
            parts = self._find_batch_size(rounds, parts)
        if self._size is None:
            return itertools.islice(parts, start, None)
        return self._rebatch(parts, self._size, start)

    def _find_batch_size(
        self, rounds: Rounds, parts: Iterator[Part]
    ) -> Iterator[Part]:
        """Finds the batch size from the first batches of all processes.

        If a process has only one batch, this batch may not be full. Then the
        size is determined by the batches of other processes, or by the source's
        `likely_size`.

        Returns:
          An iterator over all parts, including those that were read to find
          the size.
        """
        first, parts = peek(parts, 2)
        message = {
            "rows": [part.rows for part in first],
            "is_cut": all(part.counts is None for part in first),
        }
        received = rounds.exchange(message, _PEEKED)
        rows = [h["rows"] for h in received if h["rows"]]
        if not all(h["is_cut"] for h in received):
            self.sizes.append(None)
        elif rows:
            # Only a batch that another batch follows is certainly full.
            full = [one[0] for one in rows if len(one) > 1]
            short = [*(one[0] for one in rows), self.source.likely_size or 0]
            self.sizes.append(max(full or short))
        return parts

    def _rebatch(
        self, parts: Iterator[Part], size: int, start: int
    ) -> Iterator[Part]:
        rows = Rebatcher(parts)
        for step in itertools.count():
            data = rows.take(self._compute_share(step, size))
            if data is None:
                return
            # Parts may have any number of rows, so the rows of skipped steps
            # must be read, too.
            if step >= start:
                yield Part(data=data, rows=len(jax.tree.leaves(data)[0]))

    def _compute_share(self, step: int, size: int) -> int:
        mesh, count = self.mesh, self.mesh.num_readers
        counts = rotated_rows(step, size, mesh.num_replicas, count)
        return rows_of_processes(counts, count)[mesh.reader_index]

    def _read_together(
        self, rounds: Rounds, parts: Iterator[Part], epoch: int, start: int
    ) -> Iterator[HostBatch]:
        with rounds:
            if self.source.is_process_local:
                parts = self._read_local_parts(rounds, parts, start)
            for step in itertools.count(start):
                place = f"step {step} of epoch {epoch}"
                part, received = self._exchange(
                    rounds, parts, place if step == start else None
                )
                step_checks.check_readers(self.mesh, received, step)
                if all(h["rows"] is None for h in received):
                    return
                step_checks.check_specs(self.mesh, received, step)
                if not self.source.is_process_local:
                    step_checks.check_global_batch(self.mesh, received, step)
                    assert part is not None
                    yield self._make_batch(part)
                    if self._needs_no_exchange:
                        yield from self._read_on(parts)
                        return
                elif any(h["rows"] for h in received):
                    spec = next(h["spec"] for h in received if "spec" in h)
                    data = part.data if part else batch_spec.make_empty(spec)
                    yield self._join(data, received)

    def _read_on(self, parts: Iterator[Part]) -> Iterator[HostBatch]:
        while True:
            with Phase(READ):
                part = next(parts, None)
            if part is None:
                return
            yield self._make_batch(part)

    def _exchange(
        self, rounds: Rounds, parts: Iterator[Part], place: str | None
    ) -> tuple[Part | None, list[dict[str, Any]]]:
        """Reads the next part and exchanges messages about it.

        Args:
          rounds: The object that exchanges the messages of the epoch.
          parts: This process's parts.
          place: A text that identifies the epoch and the step, if this is the
            first step to be read; all processes must have the same text. None
            for later steps.

        Returns:
          This process's part, and the messages of all processes.
        """
        part, message, error = self._read_next(parts)
        counts = Either((None, (is_count,) * self.mesh.replicas_per_process))
        forms = (_END, _ROWS | {"counts": counts})
        if place is not None:
            message["place"] = place
            if message.get("checksum") is None:
                message["checksum"] = self.source.checksum
            forms = tuple(form | _PLACE for form in forms)
        received = rounds.exchange(message, Either(forms))
        what = f"Reading the data of `{self.name}`"
        raise_everywhere(self.mesh, what, received, error)
        if place is not None:
            step_checks.check_places(self.mesh, received)
        return part, received

    def _join(self, data: Tree, received: list[dict[str, Any]]) -> HostBatch:
        """Makes a step's batch from this process's rows and all messages."""
        received = self.mesh.first_of_readers(received)
        rows = tuple(h["rows"] or 0 for h in received)
        by_reader, counts = [h.get("counts") for h in received], None
        if any(one is not None for one in by_reader):
            nothing = [0] * self.mesh.replicas_per_process
            counts = tuple(n for one in by_reader for n in one or nothing)
        return HostBatch(
            data=data,
            parts=rows,
            batch_size=self._size or sum(rows),
            counts=counts,
        )

    def _make_batch(self, part: Part) -> HostBatch:
        size = self.source.batch_size or part.rows
        return HostBatch(
            data=part.data,
            parts=self._divide_rows(part.rows, size),
            batch_size=size,
        )

    def _read_next(
        self, parts: Iterator[Part]
    ) -> tuple[Part | None, dict[str, Any], Exception | None]:
        """Reads the next part.

        Returns:
          The part, or None at the end or after an error; the message about it
          for the other processes; and the error, or None.
        """
        try:
            with Phase(READ):
                part = next(parts, None)
            if part is None:
                return None, {"rows": None}, None
            part = check_part(part, self.source.kind)
            message = {
                "rows": part.rows,
                "spec": batch_spec.make_spec(part.data),
                "checksum": part.checksum,
                "counts": part.counts,
            }
            if self.mesh.spans_processes:
                message["read"] = data_checksum(part.data)
            return part, message, None
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return None, {"rows": None, "error": text}, error
