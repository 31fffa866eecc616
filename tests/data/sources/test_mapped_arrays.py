"""Arrays that are larger than memory: what is read of them is let go of."""

import os

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.data.sources import files
from tests.support.jobs import values_of_each
from tests.support.peaks import forget_peak, resident_mb

MB = 2**20
BATCH_SIZE = 256
COLUMNS = 1024
KINDS = (
    *("fit", "fit, several steps an execution", "evaluate"),
    *("predict", "distributed dataset", "files"),
)

on_linux = pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's /proc"
)


def write(path, num_bytes, dtype="float32"):
    """An array of zeros in a sparse file, which takes no space."""
    rows = num_bytes // (COLUMNS * np.dtype(dtype).itemsize)
    shape = (rows, COLUMNS)
    np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    return str(path)


def reader(strategy, model, kind, path):
    """A function that reads the whole array once."""
    x = np.load(path, mmap_mode="r")
    y = np.zeros((len(x), 1), "float32")
    given = {"batch_size": BATCH_SIZE, "verbose": 0}
    if kind.startswith("fit"):
        model.steps_per_execution = 8 if "several" in kind else 1
        # In another order, one row would bring the pages around it along.
        return lambda: model.fit(x, y, shuffle=False, **given)
    model.steps_per_execution = 1
    if kind == "evaluate":
        return lambda: model.evaluate(x, y, **given)
    if kind == "predict":
        return lambda: model.predict(x, **given)
    if kind == "files":
        files = ks.data.files(path, "npy", batch_size=BATCH_SIZE)
        return lambda: model.predict(files, verbose=0)
    rows = strategy.experimental_make_numpy_dataset(x).batch(BATCH_SIZE)
    dataset = strategy.experimental_distribute_dataset(rows)
    # On the CPU nothing is read before it is computed with.
    return lambda: [strategy.run(keras.ops.sum, (batch,)) for batch in dataset]


def max_added(kinds, small, large):
    """How many MB reading the large array adds, after reading the small one.

    Runs in a process of its own.
    """
    strategy = ks.MirroredStrategy()
    with strategy.scope():
        layers = [keras.Input((COLUMNS,)), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
    added = {}
    for kind in kinds:
        reader(strategy, model, kind, small)()
        forget_peak()
        before, _ = resident_mb()
        reader(strategy, model, kind, large)()
        _, maximum = resident_mb()
        added[kind] = maximum - before
    return added


def call_for(directory, kinds, num_bytes, dtype):
    """`max_added` for arrays of a directory, as `values_of_each` takes it."""
    small = write(directory / f"small_{dtype}.npy", 16 * MB, dtype)
    large = write(directory / f"large_{dtype}.npy", num_bytes, dtype)
    return "data.sources.test_mapped_arrays:max_added", kinds, small, large


def check(of_processes, max_mb):
    (value,) = of_processes
    for kind, added in value.items():
        assert added < max_mb, f"{kind} adds {added:.0f} MB"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Of arrays of float32 and of float64, one after the other."""
    directory = tmp_path_factory.mktemp("mapped")
    given = (KINDS, 256 * MB, "float32"), (KINDS[:1], 256 * MB, "float64")
    return values_of_each(1, *(call_for(directory, *args) for args in given))


@pytest.mark.slow
@on_linux
def test_reading_a_mapped_array_adds_little_memory(found):
    check(found[0], max_mb=128)


@pytest.mark.multi_process
@on_linux
def test_casting_a_mapped_array_adds_little_memory(found):
    check(found[1], max_mb=128)


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_four_gigabytes_add_less_than_one(tmp_path, dtype):
    call = call_for(tmp_path, KINDS[:1], 4096 * MB, dtype)
    check(*values_of_each(1, call), max_mb=1024)


def test_mapped_rows_are_those_of_the_array(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(24.0).reshape(8, 3))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    strategy = ks.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = keras.Sequential([keras.layers.Identity()])
    expected = model.predict(np.array(x), batch_size=3, verbose=0)
    actual = model.predict(x, batch_size=3, verbose=0)
    np.testing.assert_array_equal(actual, expected)
    assert actual.dtype == expected.dtype == np.float32


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_nothing_that_was_written_is_lost(tmp_path, mode):
    np.save(tmp_path / "x.npy", np.zeros(5000))
    x = np.load(tmp_path / "x.npy", mmap_mode=mode)
    if mode != "r":
        x[:] = 1
    assert files.is_mapped(x[3:]) == (mode != "c")
    files.let_go(np.asarray(x))
    np.testing.assert_array_equal(x, np.full(5000, float(mode != "r")))


def test_arrays_in_memory_are_left_alone():
    assert not files.is_mapped(np.zeros(3))
    files.let_go(np.zeros(3))
