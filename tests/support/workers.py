"""Processes that are threads: what each of them reads, in lockstep."""

import concurrent.futures
import dataclasses
import itertools
import threading

import jax
import numpy as np

from keras_strategies.data.steps import Steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """Stands for a `ReplicaMesh`, without devices."""

    num_processes: int
    replicas_per_process: int
    process_index: int = 0

    num_copies: int = 1

    @property
    def num_readers(self):
        return self.num_processes // self.num_copies

    @property
    def reader_index(self):
        return self.process_index // self.num_copies

    @property
    def readers(self):
        count = self.num_copies
        return tuple(
            tuple(range(k * count, (k + 1) * count))
            for k in range(self.num_readers)
        )

    @property
    def spans_processes(self):
        return self.num_copies > 1

    def first_of_readers(self, of_processes):
        return list(of_processes)[:: self.num_copies]

    @property
    def num_replicas(self):
        return self.num_readers * self.replicas_per_process

    @property
    def processes(self):
        return tuple(range(self.num_processes))

    @property
    def local_replicas(self):
        start = self.reader_index * self.replicas_per_process
        return range(start, start + self.replicas_per_process)


class Room:
    """Where the threads tell each other things."""

    def __init__(self, count):
        self._count = count
        self._said: dict[tuple[int, int], str] = {}
        self._changed = threading.Condition()
        self._is_left = False

    def agreement(self, index):
        rounds = itertools.count()
        room = self

        class Agreement:
            def __init__(self, processes, name):
                assert len(processes) == room._count

            def exchange(self, text, is_stopped=None):
                return room._exchange(next(rounds), index, text)

            def end(self):
                pass

        return Agreement

    def _exchange(self, number, index, text):
        keys = [(number, other) for other in range(self._count)]

        def is_over():
            return self._is_left or all(key in self._said for key in keys)

        with self._changed:
            self._said[number, index] = text
            self._changed.notify_all()
            assert self._changed.wait_for(is_over, timeout=60)
            return [self._said[key] for key in keys]

    def leave(self):
        with self._changed:
            self._is_left = True
            self._changed.notify_all()


def read_all(
    make_source,
    *,
    workers,
    replicas=1,
    epoch=0,
    start=0,
    stop=None,
    is_balanced=True,
):
    """The batches of each process: lists of `HostBatch`.

    Args:
      make_source: Called with (num_processes, process_index).
    """
    room = Room(workers)

    def read(index):
        mesh = Mesh(
            num_processes=workers,
            replicas_per_process=replicas,
            process_index=index,
        )
        source = make_source(workers, index)
        steps = Steps(
            source=source,
            mesh=mesh,  # pyright: ignore[reportArgumentType]
            name="fit",
            is_balanced=is_balanced,
            agree=room.agreement(index),
        )
        try:
            source.begin_epoch(epoch, start)
            batches = steps.read_epoch(epoch, start)
            taken = []
            for batch in batches:
                taken.append(batch)
                if stop is not None and start + len(taken) == stop:
                    break
            batches.close()
            source.end_epoch()
            return taken
        except BaseException:
            room.leave()
            raise

    if workers == 1:
        return [read(0)]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(read, range(workers)))


def rows_of(batch):
    """The first column of a batch's first array, as integers."""
    leaf = jax.tree.leaves(batch.data)[0]
    return [int(row) for row in np.asarray(leaf)[:, 0]]


def global_batches(made):
    """The rows of each global batch, in order of the processes."""
    assert len({len(batches) for batches in made}) == 1
    return [sum(map(rows_of, step), []) for step in zip(*made, strict=True)]
