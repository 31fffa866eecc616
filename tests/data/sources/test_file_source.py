"""Files given directly as sources."""

import functools
import itertools
import tracemalloc
import warnings

import jax
import numpy as np
import pytest

from keras_strategies.data.options import AutoShardPolicy
from keras_strategies.data.sources.file_source import FilesSource
from keras_strategies.data.sources.files import files
from keras_strategies.data.sources.numpy_dataset import NumpyDataset
from tests.support.combinations import combine
from tests.support.parts import (
    BATCHES,
    ROWS,
    WORKERS,
    cut_rows,
    cut_up,
    ids,
    make_sources,
    read_joined,
    read_parts,
)

DATA, FILE, OFF = (
    AutoShardPolicy.DATA,
    AutoShardPolicy.FILE,
    AutoShardPolicy.OFF,
)


def pair(ids):
    ids = np.asarray(ids, "int32")
    return np.repeat(ids[..., None].astype("float32"), 2, -1), ids


def write_npz(path, ids):
    x, y = pair(ids)
    with path.open("wb") as file:
        np.savez(file, x=x, y=y)


def write_compressed(path, ids):
    x, y = pair(ids)
    with path.open("wb") as file:
        np.savez_compressed(file, x=x, y=y)


def write_text(path, ids):
    path.write_text("".join(f"{i}\n" for i in ids))


def read_ids(path):
    with open(path) as file:
        for line in file:
            yield pair(int(line))


FORMATS = {
    "npz": (write_npz, "npz", {"keys": ("x", "y")}),
    "compressed": (write_compressed, "npz", {"keys": ("x", "y")}),
    "own": (write_text, read_ids, {}),
}


def write(directory, form, rows, num_files):
    """Files of about as many rows each, which are numbered in their order."""
    writer, reader, options = FORMATS[form]
    ends = [rows * k // num_files for k in range(num_files + 1)]
    for k in range(num_files):
        writer(directory / f"{k:02}.{form}", range(ends[k], ends[k + 1]))
    return str(directory / f"*.{form}"), reader, options


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Makes `Files`; what was written once is used again."""
    known = {}

    def make(form, rows, num_files, batch_size=4, **more):
        key = form, rows, num_files
        if key not in known:
            known[key] = write(tmp_path_factory.mktemp("files"), *key)
        pattern, reader, options = known[key]
        return files(pattern, reader, batch_size=batch_size, **options, **more)

    return make


sources = functools.partial(make_sources, FilesSource)
# The rows divided, also where there are files enough for all.
joined = functools.partial(read_joined, FilesSource, policy=DATA)


@pytest.mark.parametrize(("rows", "form"), combine(ROWS, FORMATS, every=3))
def test_every_row_is_used_once_in_its_batch(written, form, rows):
    for batch, workers in itertools.product(BATCHES, WORKERS):
        data = written(form, rows, 3, batch)
        assert joined(data, workers) == cut_up(rows, batch)


@pytest.mark.parametrize(
    ("shuffle", "rows", "form"), combine([False, 5], ROWS, FORMATS, every=4)
)
def test_whole_files_hold_every_row_once(written, form, rows, shuffle):
    for batch, workers in itertools.product(BATCHES, WORKERS[1:]):
        data = written(form, rows, 5, batch, shuffle=shuffle)
        seen = []
        for worker, source in enumerate(sources(data, workers)):
            assert source.is_process_local
            assert source.batch_size == batch
            assert source.num_batches is None
            got = ids(read_parts(source, worker, workers))
            assert all(len(b) <= -(-batch // workers) for b in got)
            seen += got
        assert sorted(sum(seen, [])) == list(range(rows))


@pytest.mark.parametrize("form", FORMATS)
def test_off_gives_every_row_to_every_worker(written, form):
    data = written(form, 13, 3)
    for source in sources(data, 3, policy=OFF):
        assert source.is_process_local
        assert source.num_batches is None
        assert ids(read_parts(source, 0, 3)) == cut_up(13, 4)


def test_which_process_reads_which_file(written):
    data = written("npz", 64, 5)
    names = [path[-6:-4] for path in data.paths]
    assert names == ["00", "01", "02", "03", "04"]
    source = FilesSource(data, num_processes=2, process_index=1)
    assert source.assigned_files(0) == data.paths[::2]
    assert source.assigned_files(1) == data.paths[1::2]
    assert FilesSource(data).assigned_files(0) == data.paths
    shuffled = FilesSource(
        written("npz", 64, 5, shuffle=True), num_processes=2, process_index=1
    )
    for epoch in range(3):
        both = [set(shuffled.assigned_files(p, epoch)) for p in range(2)]
        assert both[0] | both[1] == set(data.paths)
        assert not both[0] & both[1]


def test_own_files_are_the_only_ones_opened(tmp_path):
    opened = []

    def reader(path):
        opened.append(path)
        return read_ids(path)

    pattern, _, _ = write(tmp_path, "own", 20, 4)
    data = files(pattern, reader, batch_size=4)
    for worker, source in enumerate(sources(data, 3)):
        opened.clear()
        read_parts(source, worker, 3)
        assert tuple(opened) == source.assigned_files(worker)


@pytest.mark.parametrize("form", ["npz", "own"])
def test_auto_with_too_few_files_divides_rows_and_says_so(written, form):
    data = written(form, 13, 3)
    with pytest.warns(UserWarning, match="3 files for 5 processes.* DATA"):
        source = FilesSource(data, num_processes=5, process_index=1)
    assert not source.is_process_local
    assert source.num_batches == (4 if form == "npz" else None)
    with pytest.raises(ValueError, match="3 files for 5 processes.*AUTO or"):
        FilesSource(data, num_processes=5, process_index=1, policy=FILE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FilesSource(data, num_processes=5, process_index=1, policy=DATA)
        FilesSource(data, policy=FILE)


def test_size_and_length_are_known(written):
    def known(form, **more):
        source = FilesSource(written(form, 13, 3, **more))
        return source.batch_size, source.num_batches

    assert known("npz") == known("compressed") == (4, 4)
    assert known("npz", drop_remainder=True) == (4, 3)
    assert known("own") == (4, None)


@pytest.mark.parametrize("form", FORMATS)
def test_dropped_remainder(written, form):
    data = written(form, 13, 3, drop_remainder=True)
    assert joined(data, 3) == cut_up(12, 4)


@pytest.mark.parametrize(
    ("window", "form"), combine([2, 5, True], FORMATS, every=3)
)
def test_shuffled_order_is_the_same_everywhere_and_anew_each_epoch(
    written, form, window
):
    data = written(form, 20, 3, shuffle=window)
    orders = []
    for epoch in range(3):
        whole = joined(data, 1, epoch, seed=3)
        for workers in WORKERS[1:]:
            assert joined(data, workers, epoch, seed=3) == whole
        orders.append(sum(whole, []))
        assert sorted(orders[-1]) == list(range(20))
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert sum(joined(data, 1, seed=4), []) != orders[0]
    own = written(form, 20, 3, shuffle=window, seed=3)
    assert sum(joined(own, 1, seed=9), []) == orders[0]


def test_formats_are_shuffled_alike(written):
    orders = [
        joined(written(form, 20, 3, shuffle=5), 2, epoch=1) for form in FORMATS
    ]
    assert all(order == orders[0] for order in orders)


def test_rows_stay_in_their_window(written):
    order = sum(joined(written("npz", 20, 1, shuffle=5), 1), [])
    for first in range(0, 20, 5):
        window = set(order[first : first + 5])
        assert window == set(range(first, first + 5))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shuffle", [False, 5])
def test_resumes_on_any_number_of_workers(written, form, shuffle):
    data = written(form, 13, 3, shuffle=shuffle)
    whole = joined(data, 1, epoch=2)
    for workers, start in itertools.product(WORKERS, range(6)):
        assert joined(data, workers, 2, start) == whole[start:]


@pytest.mark.parametrize("form", FORMATS)
def test_own_files_resume_on_the_same_number_of_workers(written, form):
    data = written(form, 20, 3, shuffle=5)
    for worker, source in enumerate(sources(data, 2)):
        whole = ids(read_parts(source, worker, 2, 1))
        again = ids(read_parts(source, worker, 2, 1, start=2))
        assert again == whole[2:]


def test_worker_without_rows_reads_one_for_its_shape(written):
    for form in ("npz", "own"):
        source = FilesSource(written(form, 13, 3))
        parts = list(source.read(0, 0, lambda rows: (rows, rows)))
        assert ids(parts) == [[]] * 4


def test_npy_and_keys(tmp_path):
    rows = np.asfortranarray(np.arange(6.0).reshape(3, 2))
    np.save(tmp_path / "a.npy", rows)
    np.save(tmp_path / "b.npy", np.arange(6.0, 8)[None])
    data = files(tmp_path / "*.npy", "npy", batch_size=4)
    (part,) = FilesSource(data).read(0, 0, cut_rows(0, 1))
    assert part.data.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]

    write_npz(tmp_path / "c.npz", range(3))

    def first(keys):
        data = files(tmp_path / "c.npz", "npz", batch_size=2, keys=keys)
        return next(FilesSource(data).read(0, 0, cut_rows(0, 1))).data

    assert sorted(first(None)) == ["x", "y"]
    assert first("y").tolist() == [0, 1]
    x, y = first(("x", "y"))
    assert (x.shape, y.shape) == ((2, 2), (2,))


def test_reading_holds_one_batch_in_memory(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((4096, 1024), "float32"))
    data = files(tmp_path / "a.npy", "npy", batch_size=64)
    source = FilesSource(data)
    tracemalloc.start()
    for part in source.read(0, 0, cut_rows(0, 1)):
        assert part.data.shape == (64, 1024)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * 64 * 1024 * 4


def test_patterns(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "[odd].txt").write_text("1\n")
    for name in ("b/2.txt", "1.txt"):
        (tmp_path / name).write_text("1\n")

    def paths(pattern):
        found = files(pattern, read_ids, batch_size=1).paths
        return [path.removeprefix(f"{tmp_path}/") for path in found]

    assert paths(f"{tmp_path}/**/*.txt") == ["1.txt", "[odd].txt", "b/2.txt"]
    assert paths(tmp_path / "[odd].txt") == ["[odd].txt"]
    both = [tmp_path / "b/2.txt", f"{tmp_path}/1.txt"]
    assert paths(both) == ["1.txt", "b/2.txt"]
    with pytest.raises(ValueError, match=r"nothing\*.*matches no file"):
        paths(tmp_path / "nothing*")
    with pytest.raises(ValueError, match="at least one file"):
        paths([])
    with pytest.raises(FileNotFoundError, match=r"Received: .*/3\.txt"):
        paths([tmp_path / "1.txt", tmp_path / "3.txt"])
    with pytest.raises(FileNotFoundError, match="an existing file"):
        paths(tmp_path)


@pytest.mark.parametrize(
    ("reader", "options", "message"),
    [
        ("csv", {}, "'npz', 'npy' or a function.*Received: 'csv'"),
        ("npz", {"batch_size": 0}, "`batch_size` must be >= 1"),
        ("npz", {"shuffle": -1}, "`shuffle` must be >= 0"),
    ],
)
def test_arguments_that_do_not_fit(tmp_path, reader, options, message):
    (tmp_path / "a").touch()
    with pytest.raises(ValueError, match=message):
        files(tmp_path / "a", reader, **{"batch_size": 2} | options)


def test_a_batch_size_is_required(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(TypeError, match="`batch_size` must be an integer"):
        files(tmp_path / "a", "npz", batch_size=None)
    with pytest.raises(TypeError, match="`batch_size` must be an integer"):
        NumpyDataset(np.zeros(2)).batch(None)


def truncate(path, missing=10):
    path.write_bytes(path.read_bytes()[:-missing])


@pytest.mark.parametrize("form", ["npy", "npz", "compressed"])
def test_truncated_arrays_are_found_before_reading(tmp_path, form):
    for name in ("a", "b"):
        path = tmp_path / name
        if form == "npy":
            with path.open("wb") as file:
                np.save(file, np.zeros((8, 3)))
        else:
            FORMATS[form][0](path, range(40))
    truncate(tmp_path / "b")
    reader = "npy" if form == "npy" else "npz"
    data = files(tmp_path / "*", reader, batch_size=2)
    with pytest.raises(
        OSError, match=r"could not be read\. Received: .*/b:"
    ) as e:
        FilesSource(data)
    assert e.value.__cause__ is not None


def test_unlike_arrays_are_refused(tmp_path):
    write_npz(tmp_path / "a.npz", range(3))
    np.savez(tmp_path / "b.npz", x=np.zeros((3, 5), "float32"), y=np.zeros(3))

    def read():
        return read_parts(FilesSource(data), 0, 1)

    data = files(tmp_path / "*.npz", "npz", batch_size=2)
    with pytest.raises(ValueError, match=r"same structure.*from .*b\.npz"):
        read()
    np.savez(tmp_path / "b.npz", x=np.zeros(3), y=np.zeros(4))
    with pytest.raises(OSError, match=r"b\.npz: ValueError: .*same"):
        read()
    with pytest.raises(OSError, match=r"a\.npz: KeyError.*'z\.npy'"):
        FilesSource(files(tmp_path / "*", "npz", keys=("z",), batch_size=2))


@pytest.mark.parametrize(
    "array", [np.array([{}, 1]), np.array(["a"]), np.array(1.0)]
)
def test_arrays_that_hold_no_rows_of_numbers_are_refused(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    data = files(tmp_path / "a.npy", "npy", batch_size=2)
    with pytest.raises(OSError, match=r"a\.npy: (ValueError|TypeError|IndexE)"):
        read_parts(FilesSource(data), 0, 1)


def test_reader_that_fails_is_named(tmp_path):
    def reader(path):
        yield from read_ids(path)
        raise RuntimeError("the disk is gone")

    (tmp_path / "a.txt").write_text("0\n1\n")
    data = files(tmp_path / "a.txt", reader, batch_size=8)
    with pytest.raises(OSError, match=r"a\.txt: RuntimeError: the d"):
        read_parts(FilesSource(data), 0, 1)


def test_rows_of_different_shape_are_refused(tmp_path):
    (tmp_path / "a.txt").touch()

    def reader(path):
        yield np.zeros(1)
        yield np.zeros(2)

    data = files(tmp_path / "a.txt", reader, batch_size=2)
    with pytest.raises(
        OSError, match=r"a\.txt: ValueError: .*\[\(1,\), \(2,\)"
    ):
        read_parts(FilesSource(data), 0, 1)
    data = files(tmp_path / "a.txt", reader, batch_size=1)
    with pytest.raises(ValueError, match="The rows of all files must have"):
        read_parts(FilesSource(data), 0, 1)


def test_leaves_may_be_nested(tmp_path):
    (tmp_path / "a.txt").touch()

    def reader(path):
        for i in (1, 2, 3):
            yield {"a": i, "b": [0.5, 1.5]}, 1

    data = files(tmp_path / "a.txt", reader, batch_size=2)
    (first, last) = FilesSource(data).read(0, 0, cut_rows(0, 1))
    assert first.data[0]["a"].tolist() == [1, 2]
    assert jax.tree.map(np.shape, last.data)[1] == (1,)
