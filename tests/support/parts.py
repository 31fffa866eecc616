"""What sources give each process, without devices or threads."""

import itertools

import numpy as np

WORKERS = [1, 2, 3, 5]
ROWS = [0, 1, 7, 8, 13, 64]
BATCHES = [1, 4, 8, 9]


def cut_rows(worker, workers):
    return lambda rows: (
        rows * worker // workers,
        rows * (worker + 1) // workers,
    )


def read_parts(source, worker, workers, epoch=0, start=0):
    return list(source.read(epoch, start, cut_rows(worker, workers)))


def ids(parts):
    """The rows' numbers, of each batch; the other component must agree."""
    for part in parts:
        assert type(part.data) is tuple
        x, y = part.data
        assert x.shape[1:] == (2,)
        assert x.dtype == "float32"
        assert y.dtype in ("int32", "int64")
        np.testing.assert_array_equal(x[:, 0], y)
    return [part.data[1].tolist() for part in parts]


def make_sources(kind, data, workers, **options):
    """A source of each process."""
    return [
        kind(data, num_processes=workers, process_index=worker, **options)
        for worker in range(workers)
    ]


def read_joined(kind, data, workers, epoch=0, start=0, **options):
    """The global batches, put together from all workers' pieces."""
    read = [
        read_parts(source, worker, workers, epoch, start)
        for worker, source in enumerate(
            make_sources(kind, data, workers, **options)
        )
    ]
    batches = []
    for worker_parts in zip(*read, strict=True):
        batches.append(list(itertools.chain(*ids(worker_parts))))
        assert {part.rows for part in worker_parts} == {len(batches[-1])}
        assert (
            len({part.checksum for part in worker_parts if part.checksum}) <= 1
        )
    return batches


def cut_up(rows, batch):
    return [
        list(range(rows))[start : start + batch]
        for start in range(0, rows, batch)
    ]
