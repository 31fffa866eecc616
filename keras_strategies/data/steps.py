"""The steps of a source's epochs: as many, and alike, in every process."""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from keras_strategies._core.batches import HostBatch
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.rows import (
    balanced_rows,
    rotated_rows,
    rows_of_processes,
    rows_of_replicas,
)
from keras_strategies._types import Tree
from keras_strategies.cluster.exchange.host_exchange import (
    Agreement,
    IsStopped,
)
from keras_strategies.cluster.exchange.message_forms import Either, is_count
from keras_strategies.cluster.exchange.rounds import Rounds
from keras_strategies.data import batch_spec, step_checks
from keras_strategies.data.prefetch import Prefetched
from keras_strategies.data.raise_together import raise_together
from keras_strategies.data.regrouping import Rows, looked_at
from keras_strategies.data.source import (
    Part,
    Source,
    all_rows,
    checked_part,
    data_checksum,
)


def _is_size(value: object) -> bool:
    # Shares of a batch without rows would never end.
    return is_count(value) and value > 0


# The messages between processes.
_LOOKED_AT = {"rows": [_is_size], "is_cut": bool}
_MARK = int | str | None
_END = {"rows": None, "checksum?": _MARK, "error?": str}
_ROWS = {
    "rows": is_count,
    "spec": str,
    "checksum": _MARK,
    "read?": is_count,
}
_PLACE = {"place": str}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """A source's epochs as steps of all processes.

    A source that every process sees whole is cut: each process gets its rows
    of every batch. Of a source that is each process's own, the rows are
    regrouped to its share of a batch; processes whose rows have ended take
    part without rows until all have ended.

    Several processes send each other, on the host, what each read for a step
    (`Agreement`): nobody starts one that the others cannot take part in. Of
    data whose length is known, that is done once an epoch. Processes that have
    cores of the same replicas read the same rows (`ReplicaMesh.readers`), and
    compare checksums of them, of every step.

    Attributes:
      source: What is read.
      mesh: The replicas.
      name: The loop that it is for, for messages: "fit".
      is_balanced: Whether a batch's rows are shared out evenly, as the steps
        of models do; otherwise the replicas have fixed places in it (rule V2
        of docs/parity.md).
      agree: Makes the `Agreement` of an epoch; tests have another.
      found: Of a source that is own and does not know its batch size: the
        size, once all have looked at their first batches; None for parts that
        are the process's as they are.
    """

    source: Source
    mesh: ReplicaMesh
    name: str
    is_balanced: bool = True
    agree: Callable[[tuple[int, ...], str], Any] = Agreement
    found: list[int | None] = dataclasses.field(
        default_factory=list, init=False, compare=False
    )

    def epoch(
        self, epoch: int, start: int = 0, is_stopped: IsStopped | None = None
    ) -> Iterator[HostBatch]:
        """The steps of an epoch.

        Args:
          epoch: Its number, from 0.
          start: Number of steps to leave out at the beginning.
          is_stopped: Asked while the others are waited for; True ends it.

        Yields:
          What this process holds of each step's batch.

        Raises:
          ValueError: the processes' data differ in what must be the same;
            all processes raise.
          RuntimeError: reading failed in another process.
        """
        if self.mesh.num_processes == 1:
            return self._alone(epoch, start)
        parts = (
            self.source.read(epoch, 0, all_rows)
            if self.source.is_process_local
            else self.source.read(epoch, start, self._cut)
        )
        # Made now and not when the first step is read: that may be in a thread,
        # and agreements are made in one order in all processes.
        about = f"the data of `{self.name}`"
        rounds = Rounds(
            self.mesh.processes,
            f"reading {about}",
            about,
            is_stopped=is_stopped,
            agree=self.agree,
        )
        return self._agreed(rounds, parts, epoch, start)

    def ahead(
        self,
        epoch: int,
        start: int,
        items_of: Callable[[Iterator[HostBatch]], Iterator[Any]],
        *,
        num_bytes: Callable[[Any], int],
        is_pause: Callable[[Any], bool],
    ) -> Iterator[Any]:
        """What is made of the steps of an epoch, ahead of time if that helps.

        Args:
          epoch: Its number, from 0.
          start: Number of steps to leave out at the beginning.
          items_of: Makes items of the steps.
          num_bytes: See `Prefetched`.
          is_pause: See there.

        Returns:
          An iterator with a method `close`.
        """
        stop = threading.Event()
        items = items_of(self.epoch(epoch, start, stop.is_set))
        if self._needs_no_exchange:
            # Slicing arrays takes less time than a thread's turn.
            return items
        needs_thread = self.mesh.num_processes > 1
        return Prefetched(
            items, stop, num_bytes, is_pause, needs_thread=needs_thread
        )

    @property
    def _needs_no_exchange(self) -> bool:
        """Whether an epoch's steps are known, once the first one is agreed."""
        return self.source.is_planned and not self.mesh.spans_processes

    def _alone(self, epoch: int, start: int) -> Iterator[HostBatch]:
        size = self.source.batch_size
        for read in self.source.read(epoch, start, all_rows):
            part = checked_part(read, self.source.kind)
            size = size or part.rows
            yield HostBatch(
                data=part.data,
                parts=(part.rows,),
                batch_size=size,
                counts=part.counts,
            )

    def _cut(self, rows: int) -> tuple[int, int]:
        parts = self._parts_of(rows, self.source.batch_size or rows)
        start = sum(parts[: self.mesh.reader_index])
        return start, start + parts[self.mesh.reader_index]

    def _parts_of(self, rows: int, batch_size: int) -> tuple[int, ...]:
        """How many rows each reader takes of a batch that all see."""
        count = self.mesh.num_replicas
        counts = (
            balanced_rows(rows, count)
            if self.is_balanced
            else rows_of_replicas(rows, batch_size, count)
        )
        return rows_of_processes(counts, self.mesh.num_readers)

    @property
    def _size(self) -> int | None:
        """Rows of a whole batch of process-local rows, if that is known."""
        return self.source.batch_size or next(iter(self.found), None)

    def _own_parts(
        self, rounds: Rounds, parts: Iterator[Part], start: int
    ) -> Iterator[Part]:
        """This process's rows, in its share of each step."""
        if self.source.batch_size is None and not self.found:
            parts = self._look_ahead(rounds, parts)
        if self._size is None:
            return itertools.islice(parts, start, None)
        return self._in_shares(parts, self._size, start)

    def _look_ahead(
        self, rounds: Rounds, parts: Iterator[Part]
    ) -> Iterator[Part]:
        """Finds the batch size by the first batches of all processes.

        A process's first batch may be its only one, and short: then others'
        count, or what is likely.

        Returns:
          The parts, those that were looked at included.
        """
        first, parts = looked_at(parts, 2)
        message = {
            "rows": [part.rows for part in first],
            "is_cut": all(part.counts is None for part in first),
        }
        received = rounds.exchange(message, _LOOKED_AT)
        rows = [h["rows"] for h in received if h["rows"]]
        if not all(h["is_cut"] for h in received):
            self.found.append(None)
        elif rows:
            whole = [one[0] for one in rows if len(one) > 1]
            short = [*(one[0] for one in rows), self.source.likely_size or 0]
            self.found.append(max(whole or short))
        return parts

    def _in_shares(
        self, parts: Iterator[Part], size: int, start: int
    ) -> Iterator[Part]:
        rows = Rows(parts)
        for step in itertools.count():
            data = rows.take(self._own_share(step, size))
            if data is None:
                return
            if step >= start:
                yield Part(data=data, rows=len(jax.tree.leaves(data)[0]))

    def _own_share(self, step: int, size: int) -> int:
        mesh, count = self.mesh, self.mesh.num_readers
        counts = rotated_rows(step, size, mesh.num_replicas, count)
        return rows_of_processes(counts, count)[mesh.reader_index]

    def _agreed(
        self, rounds: Rounds, parts: Iterator[Part], epoch: int, start: int
    ) -> Iterator[HostBatch]:
        with rounds:
            if self.source.is_process_local:
                parts = self._own_parts(rounds, parts, start)
            spec: Any = None
            for step in itertools.count(start):
                place = f"step {step} of epoch {epoch}"
                part, received = self._exchanged(
                    rounds, parts, place if step == start else None
                )
                step_checks.check_readers(self.mesh, received, step)
                if all(h["rows"] is None for h in received):
                    return
                step_checks.check_specs(self.mesh, received, step, spec)
                spec = next(h["spec"] for h in received if "spec" in h)
                if not self.source.is_process_local:
                    step_checks.check_whole(self.mesh, received, step)
                    assert part is not None
                    yield self._whole(part)
                    if self._needs_no_exchange:
                        yield from map(self._whole, parts)
                        return
                elif any(h["rows"] for h in received):
                    data = batch_spec.empty(spec) if part is None else part.data
                    yield self._joined(data, received)

    def _exchanged(
        self, rounds: Rounds, parts: Iterator[Part], place: str | None
    ) -> tuple[Part | None, list[dict[str, Any]]]:
        """The next part, and what all processes have sent of theirs.

        Args:
          rounds: The epoch's.
          parts: This process's.
          place: Of the first step: where it is, which all must have alike.
        """
        part, message, error = self._next(parts)
        counts = Either((None, (is_count,) * self.mesh.replicas_per_process))
        forms = (_END, _ROWS | {"counts": counts})
        if place is not None:
            message["place"] = place
            if message.get("checksum") is None:
                message["checksum"] = self.source.checksum
            forms = tuple(form | _PLACE for form in forms)
        received = rounds.exchange(message, Either(forms))
        what = f"Reading the data of `{self.name}`"
        raise_together(self.mesh, what, received, error)
        if place is not None:
            step_checks.check_places(self.mesh, received)
        return part, received

    def _joined(self, data: Tree, received: list[dict[str, Any]]) -> HostBatch:
        """A batch to which each reader gives rows of its own."""
        received = self.mesh.first_of_readers(received)
        rows = tuple(h["rows"] or 0 for h in received)
        given, counts = [h.get("counts") for h in received], None
        if any(one is not None for one in given):
            nothing = [0] * self.mesh.replicas_per_process
            counts = tuple(n for one in given for n in one or nothing)
        return HostBatch(
            data=data,
            parts=rows,
            batch_size=self._size or sum(rows),
            counts=counts,
        )

    def _whole(self, part: Part) -> HostBatch:
        size = self.source.batch_size or part.rows
        return HostBatch(
            data=part.data,
            parts=self._parts_of(part.rows, size),
            batch_size=size,
        )

    def _next(
        self, parts: Iterator[Part]
    ) -> tuple[Part | None, dict[str, Any], Exception | None]:
        """A part or an error, and its message to the others."""
        try:
            part = next(parts, None)
            if part is None:
                return None, {"rows": None}, None
            part = checked_part(part, "it")
            message = {
                "rows": part.rows,
                "spec": batch_spec.spec_of(part.data),
                "checksum": part.checksum,
                "counts": part.counts,
            }
            if self.mesh.spans_processes:
                message["read"] = data_checksum(part.data)
            return part, message, None
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return None, {"rows": None, "error": text}, error
