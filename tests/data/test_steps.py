"""Every row once, equally many steps, and what each batch is made of."""

import collections
import itertools

import jax
import keras
import numpy as np
import pytest
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from keras_strategies.data.distributed import count_rows
from keras_strategies.data.options import AutoShardPolicy
from keras_strategies.data.sources.iterables import IterableSource
from keras_strategies.data.sources.numpy_dataset import NumpyDataset, RowsSource
from keras_strategies.data.steps import Steps
from keras_strategies.fit.inputs.keras_sources import (
    ArraySource,
    PyDatasetSource,
)
from keras_strategies.spmd.rows import rows_of_processes, rows_of_replicas
from tests.support.combinations import combine
from tests.support.workers import Mesh, global_batches, read_all, rows_of

WORKERS = [1, 2, 3, 5]
REPLICAS = [1, 2, 4]
ROWS = [0, 1, 7, 8, 13, 64]
SIZES = [1, 4, 8, 9]


def values(rows):
    return np.arange(rows, dtype="float32")[:, None]


def batches_of(rows, size):
    whole = values(rows)
    return [whole[i : i + size] for i in range(0, rows, size)]


class Iterable:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


class Dataset(keras.utils.PyDataset):
    def __init__(self, batches, **kwargs):
        super().__init__(**kwargs)
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return (self.batches[index],)


def arrays(rows, size, count, index, own):
    del count, index, own
    return ArraySource(ArrayDataAdapter(values(rows), batch_size=size))


def rows_source(rows, size, count, index, own):
    del count, index, own
    return RowsSource(NumpyDataset(values(rows)).batch(size))


def py_dataset(rows, size, count, index, own):
    dataset = Dataset(batches_of(rows, size))
    return PyDatasetSource(
        PyDatasetAdapter(dataset), is_process_local=own, has_checksums=count > 1
    )


def iterable(rows, size, count, index, own):
    return IterableSource(
        Iterable(batches_of(rows, size)),
        is_process_local=own,
        has_checksums=count > 1,
    )


def files(directory):
    from keras_strategies.data.sources.file_source import FilesSource
    from keras_strategies.data.sources.files import files as list_files

    def make(rows, size, count, index, own, policy=AutoShardPolicy.DATA):
        cuts = [0, rows // 7, rows // 7, rows // 2, rows, rows]
        paths = []
        for number, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False)):
            path = directory / f"{rows}-{number}.npy"
            if not path.exists():
                temporary = directory / f"{rows}-{number}-{count}-{index}"
                with open(temporary, "wb") as file:
                    np.save(file, values(rows)[a:b])
                temporary.replace(path)
            paths.append(path)
        options = place(count, index, own)
        if not own:
            options["policy"] = policy
        return FilesSource(list_files(paths, "npy", batch_size=size), **options)

    return make


def by_file(directory):
    make = files(directory)

    def by_file(rows, size, count, index, own):
        return make(rows, size, count, index, own, AutoShardPolicy.FILE)

    return by_file


def place(count, index, own):
    policy = AutoShardPolicy.OFF if own else AutoShardPolicy.AUTO
    return {"num_processes": count, "process_index": index, "policy": policy}


def grain_dataset(rows, size, count, index, own):
    import grain

    from keras_strategies.data.grain.grain_data import GrainSource

    dataset = grain.MapDataset.source(values(rows)).batch(size)
    return GrainSource(dataset, **place(count, index, own))


def torch_loader(rows, size, count, index, own):
    import torch

    from keras_strategies.data.sources.torch_data import TorchSource

    dataset = torch.utils.data.TensorDataset(torch.tensor(values(rows)))
    loader = torch.utils.data.DataLoader(dataset, batch_size=size)
    return TorchSource(loader, **place(count, index, own))


def tf_data(rows, size, count, index, own, then=lambda dataset: dataset):
    import tensorflow as tf

    from keras_strategies.data.tfdata.tf_data import TfDataSource

    dataset = tf.data.Dataset.from_tensor_slices(values(rows)).batch(size)
    return TfDataSource(then(dataset), seed=0, **place(count, index, own))


def check(make, workers, replicas, rows, size, own, is_balanced, times):
    made = read_all(
        lambda count, index: make(rows, size, count, index, times > 1),
        workers=workers,
        replicas=replicas,
        is_balanced=is_balanced,
    )
    steps = global_batches(made)
    taken = collections.Counter(sum(steps, []))
    assert taken == dict.fromkeys(range(rows), times)
    for number, step in enumerate(zip(*made, strict=True)):
        plans = {(batch.parts, batch.batch_size) for batch in step}
        assert len(plans) == 1
        ((parts, batch_size),) = plans
        assert parts == tuple(len(rows_of(batch)) for batch in step)
        assert sum(parts) <= batch_size
        shapes = {
            str(jax.tree.map(lambda a: (a.shape[1:], a.dtype), b.data))
            for b in step
        }
        assert len(shapes) == 1
        if step[0].batch_size == size and len(made) > 1:
            check_counts(step[0], workers, replicas, own, is_balanced)
        if not own:
            # A batch of one process, cut in pieces in their order.
            first = number * size
            assert steps[number] == list(range(first, min(first + size, rows)))
    return steps


def check_counts(batch, workers, replicas, own, is_balanced):
    """The places of the replicas are those of rule V2."""
    if is_balanced:
        return
    mesh = Mesh(num_processes=workers, replicas_per_process=replicas)
    counts = count_rows(batch, mesh)
    assert rows_of_processes(counts, workers) == batch.parts
    if not own and batch.rows == batch.batch_size:
        size = batch.batch_size
        assert counts == rows_of_replicas(size, size, mesh.num_replicas)


FAST = [arrays, rows_source, py_dataset, iterable]


AXES = WORKERS, REPLICAS, ROWS, SIZES
CASES = list(itertools.product(*AXES))
# Each value meets half of those of the others.
DIAGONALS = [
    case for case in CASES if sum(map(list.index, AXES, case)) % 2 == 0
]
both = pytest.mark.parametrize(
    "cases",
    [DIAGONALS, pytest.param(CASES, marks=pytest.mark.slow)],
    ids=["diagonals", "all"],
)


def check_all(make, own, cases):
    for number, (workers, replicas, rows, size) in enumerate(cases):
        is_process_local = workers > 1 and (own or make.__name__ == "by_file")
        arguments = (make, workers, replicas, rows, size, is_process_local)
        times = workers if own else 1
        check(*arguments, is_balanced=bool(number % 2), times=times)


@both
@pytest.mark.parametrize("make", combine(FAST, every=2))
def test_each_row_is_used_once(make, cases):
    # Arrays without rows are refused before.
    is_array = make in (arrays, rows_source)
    check_all(make, False, [c for c in cases if c[2] or not is_array])


@pytest.mark.multi_process
@both
@pytest.mark.parametrize("make", combine([py_dataset, iterable], every=2))
def test_each_process_uses_its_own_rows_once(make, cases):
    check_all(make, True, cases)


def made(name, directory):
    return {
        "files": lambda: files(directory),
        "by file": lambda: by_file(directory),
        "grain": lambda: grain_dataset,
        "torch": lambda: torch_loader,
        "tf.data": lambda: tf_data,
    }[name]()


NAMES = ["files", "by file", "grain", "torch", "tf.data"]


@pytest.mark.parametrize(
    ("name", "own"), combine(NAMES, [False, True], every=2)
)
def test_each_row_is_used_once_of_other_sources(name, own, tmp_path):
    cases = [
        (workers, replicas, rows, size)
        for workers, replicas in [(2, 2), (3, 1), (5, 4)]
        for rows, size in [(0, 4), (1, 4), (13, 4), (8, 9), (7, 1)]
    ]
    check_all(made(name, tmp_path), own, cases)


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_each_row_is_used_once_in_all_cases(name, own, tmp_path):
    check_all(made(name, tmp_path), own, CASES)


def test_own_rows_of_unequal_numbers_fill_equal_steps():
    for rows in ([0, 9], [13, 2], [1, 1], [5, 0, 7], [64, 63, 1]):
        for size in SIZES:
            read = read_all(
                lambda count, index, rows=rows, size=size: PyDatasetSource(
                    PyDatasetAdapter(
                        Dataset(batches_of(rows[index], 3) or [values(1)[:0]])
                        if rows[index]
                        else Dataset([])
                    ),
                    is_process_local=True,
                ),
                workers=len(rows),
                replicas=2,
            )
            for index, batches in enumerate(read):
                own = sum(map(rows_of, batches), [])
                assert own == list(range(rows[index])), (rows, size)
            assert len({len(batches) for batches in read}) == 1


@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_error_of_one_process_is_raised_in_all(index):
    raised = []

    class Broken:
        def __init__(self, is_broken):
            self.is_broken = is_broken

        def __iter__(self):
            yield values(4)
            if self.is_broken:
                raise OSError("gone")
            yield values(4)

    def make(count, i):
        raised.append(i)
        return IterableSource(
            Broken(i == index), is_process_local=False, has_checksums=True
        )

    with pytest.raises((OSError, RuntimeError), match="gone"):
        read_all(make, workers=3)
    assert sorted(raised) == [0, 1, 2]


def mapped_tf_data(rows, size, count, index, own):
    """tf's commonest order: `batch`, then `map`."""

    def then(dataset):
        return dataset.cache().map(lambda x: 1 * x).prefetch(1)

    return tf_data(rows, size, count, index, own, then)


@pytest.mark.parametrize("make", [py_dataset, iterable, mapped_tf_data])
@pytest.mark.parametrize("size", [3, 4, 5, 8])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_batch_of_own_rows_is_the_global_batch(make, size, workers):
    """As in tf: each process's batch is cut, and a step has that many rows."""
    rows = 6 * size + 1
    made = read_all(
        lambda count, index: make(rows, size, count, index, True),
        workers=workers,
    )
    steps = global_batches(made)
    sizes = [len(step) for step in steps]
    assert set(sizes[:6]) == {size}
    assert max(sizes) == size
    assert {batch.batch_size for batch in made[0]} == {size}
    assert sum(sizes) == workers * rows
    # Each process's rows are in their order.
    for batches in made:
        assert sum(map(rows_of, batches), []) == list(range(rows))


@pytest.mark.parametrize("own_rows", [[1, 12], [12, 0], [0, 3], [2, 3], [0, 0]])
def test_who_has_a_short_batch_alone_takes_the_others_size(own_rows):
    made = read_all(
        lambda count, index: IterableSource(
            Iterable(batches_of(own_rows[index], 4)),
            is_process_local=True,
            has_checksums=False,
        ),
        workers=2,
    )
    found = {batch.batch_size for batches in made for batch in batches}
    whole = 4 if max(own_rows) > 4 else max(own_rows)
    assert found == ({whole} if any(own_rows) else set())
    taken = [sum(map(rows_of, batches), []) for batches in made]
    assert taken == [list(range(rows)) for rows in own_rows]


def test_maps_that_change_the_rows_count():
    import tensorflow as tf

    def then(dataset):
        return dataset.map(lambda x: tf.repeat(x, 3, axis=0))

    def make(count, index, rows=24):
        return tf_data(rows, 4, count, index, True, then)

    made = read_all(make, workers=2)
    assert {batch.batch_size for batch in made[0]} == {12}
    few = read_all(lambda *place: make(*place, rows=1), workers=2)
    # All have one batch, a short one: `batch` says 4.
    assert {batch.batch_size for batch in few[0]} == {4}


def test_batches_of_other_lengths_are_not_joined():
    shapes = ((4, 2), (3, 5), (4, 2))
    batches = [np.zeros(shape, "float32") for shape in shapes]
    made = read_all(
        lambda count, index: IterableSource(
            Iterable(batches), is_process_local=True, has_checksums=False
        ),
        workers=2,
    )
    shapes = [batch.data.shape for batch in made[0]]
    assert shapes == [(2, 2), (2, 2), (2, 5), (1, 5), (2, 2), (2, 2)]


def test_an_error_after_the_first_batch_comes_after_its_step():
    class Broken:
        def __iter__(self):
            yield values(4)
            raise OSError("gone")

    with pytest.raises((OSError, RuntimeError), match="gone"):
        read_all(
            lambda count, index: IterableSource(
                Broken(), is_process_local=True, has_checksums=False
            ),
            workers=2,
        )


@pytest.mark.parametrize(
    ("own_rows", "size", "steps"),
    [(9, 3, 6), (15, 5, 6), (7, 1, 14), (8, 3, 6)],
)
@pytest.mark.parametrize("is_balanced", [False, True])
def test_processes_with_as_many_rows_end_together(
    own_rows, size, steps, is_balanced
):
    """Of a batch size that the replicas do not divide, as in tf."""
    made = read_all(
        lambda count, index: iterable(own_rows, size, count, index, True),
        workers=2,
        is_balanced=is_balanced,
    )
    assert [len(batches) for batches in made] == [steps] * 2
    whole = [batch.rows for batch in made[0]]
    assert set(whole[:-1]) == {size}


@pytest.mark.parametrize("rows", ["[0, 4]", "[-1]", "[true]", "3", "null"])
def test_a_process_that_tells_of_no_batch_is_named(rows):
    """Shares of a batch without rows would never come to the end."""

    class Agreement:
        def __init__(self, processes, name):
            pass

        def exchange(self, text, is_stopped=None):
            return [text, f'{{"rows": {rows}, "is_cut": true}}']

        def end(self):
            pass

    source = iterable(8, 4, 2, 0, True)
    # As of data that a `map` may have made longer.
    assert source.batch_size is None
    mesh = Mesh(num_processes=2, replicas_per_process=1)
    steps = Steps(source=source, mesh=mesh, name="fit", agree=Agreement)
    with pytest.raises(RuntimeError, match="1, with this problem: it has"):
        next(steps.read_epoch(0))
