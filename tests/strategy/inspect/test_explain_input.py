"""What `explain_input` says of every kind of data, and that it is true."""

import dataclasses
import types

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.data import distributed
from keras_strategies.data.source import Source
from keras_strategies.data.steps import Steps
from keras_strategies.spmd import batches
from keras_strategies.spmd.batches import HostBatch
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.rows import balanced_rows, rows_of_processes
from keras_strategies.strategy.inspect import explain_input as explaining
from tests.support.jobs import values_of
from tests.support.plain_keras import mirrored

X = np.arange(13, dtype="float32")[:, None]
Policy = ks.data.AutoShardPolicy

WORKERS = [1, 2, 3]
REPLICAS = [1, 2, 4, 8]
BATCHES = [1, 4, 8, 9, 64]


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int
    platform: str = "tpu"


def make_mesh(num_processes, each=2):
    """A mesh as process 0 of several sees it."""
    return ReplicaMesh(
        devices=tuple(
            FakeDevice(i, i // each) for i in range(num_processes * each)
        )
    )


def explain(dataset, num_processes=1, each=2, batch_size=None, policy=None):
    options = None
    if policy is not None:
        distribute = ks.data.DistributeOptions(auto_shard_policy=policy)
        options = ks.InputOptions(distribute=distribute)
    return explaining.explain_input(
        dataset, make_mesh(num_processes, each), batch_size, options
    )


def read_lines(text):
    return [line.split() for line in text.splitlines() if line.split()]


class Rows(Source):
    def __init__(self, size):
        self.batch_size = size

    def read(self, epoch, start, cut):
        raise AssertionError


def list_steps(size, mesh, process_index, is_balanced):
    place = types.SimpleNamespace(
        num_replicas=mesh.num_replicas,
        num_processes=mesh.num_processes,
        num_readers=mesh.num_readers,
        reader_index=process_index,
    )
    return Steps(
        source=Rows(size), mesh=place, name="fit", is_balanced=is_balanced
    )


def placed(parts, mesh):
    """True rows of each replica, as `batches.place` lays them out."""
    each = mesh.replicas_per_process
    maximum = batches._block_index(parts, mesh) // each
    return tuple(
        min(max(n - r * maximum, 0), maximum)
        for n in parts
        for r in range(each)
    )


# The arithmetic, against the code that divides batches.


@pytest.mark.parametrize("size", BATCHES)
@pytest.mark.parametrize("each", REPLICAS)
@pytest.mark.parametrize("num_processes", WORKERS)
def test_shares_of_a_batch_are_those_that_are_fed(num_processes, each, size):
    mesh = make_mesh(num_processes, each)
    for rows in {1, size // 2, size - 1, size} - {0}:
        shares = explaining.compute_batch_shares(rows, size, mesh.num_replicas)
        for is_balanced, counts in zip((True, False), shares, strict=True):
            assert sum(counts) == rows
            for p in range(num_processes):
                ends = list_steps(size, mesh, p, is_balanced)._cut(rows)
                own = rows_of_processes(counts, num_processes)
                assert ends == (sum(own[:p]), sum(own[: p + 1]))
        fit, fixed = shares
        assert fit == placed(rows_of_processes(fit, num_processes), mesh)
        batch = HostBatch(
            data=None,
            parts=rows_of_processes(fixed, num_processes),
            batch_size=size,
        )
        assert fixed == distributed.count_rows(batch, mesh)


def test_shares_on_devices_are_the_ones_explained():
    strategy = mirrored(4)
    arrays = strategy.experimental_make_numpy_dataset(X)
    dataset = strategy.experimental_distribute_dataset(arrays.batch(9))
    explanation = strategy.explain_input(dataset)
    assert explanation.whole == ((3, 3, 3, 0), (3, 2, 2, 2))
    assert explanation.last == ((1, 1, 1, 1), (3, 1, 0, 0))
    for (fit, fixed), batch in zip(
        (explanation.whole, explanation.last), dataset, strict=True
    ):
        values = strategy.experimental_local_results(batch)
        assert tuple(map(len, values)) == fixed
        assert fit == balanced_rows(sum(fixed), 4)


# What is printed.


def test_text_of_arrays(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = str(explain((X, X), batch_size=9, each=4))
    assert [" ".join(words) for words in read_lines(text)] == [
        "data arrays",
        "policy DATA, because it is not split by files",
        "reading the only process reads all rows",
        "batch 9 rows",
        "epoch 2 steps",
        "rows of replicas 3, 3, 3, 0 in `fit`, 3, 2, 2, 2 in a distributed "
        "dataset",
        "last batch 4 rows",
        "its rows 1, 1, 1, 1 in `fit`, 3, 1, 0, 0 in a distributed dataset",
    ]


def test_rules_are_told_apart_only_where_they_differ():
    facts = explain(X[:8], batch_size=4).facts
    assert facts["rows of replicas"] == facts["its rows"] == "2, 2"
    assert facts["last batch"] == "4 rows"


def test_many_replicas_take_few_lines():
    text = str(explain(X, 64, 4, batch_size=256))
    assert "1, 1, ..." in text
    assert len(text.splitlines()) < 30


def test_repr_is_the_table():
    explanation = explain(X)
    assert repr(explanation) == str(explanation)
    # 13 rows in batches of 32: Keras's size.
    assert explanation.batch_size == 32
    assert explanation.last == ((7, 6), (13, 0))


# Every kind of data.


class Pairs(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.read = []

    def __len__(self):
        return 2

    def __getitem__(self, index):
        self.read.append(index)
        return X[:6], X[:6]


def npz_files(directory, lengths, **options):
    for i, length in enumerate(lengths):
        np.savez(directory / f"part-{i}.npz", x=np.zeros((length, 2)))
    options = {"batch_size": 8} | options
    return ks.data.files(directory / "*.npz", "npz", **options)


RUNS_ALL = "each process runs the entire pipeline and uses only its rows"
ITS_ROWS = "each process reads only its own rows of each batch"
LOCAL = "each process reads only its own files, shard or dataset"


@pytest.mark.parametrize("num_processes", WORKERS)
def test_arrays(num_processes):
    explanation = explain({"a": X, "b": [X, None]}, num_processes, batch_size=6)
    assert explanation.facts["epoch"] == "3 steps"
    assert explanation.whole[0] == balanced_rows(6, 2 * num_processes)
    assert explanation.last[0] == balanced_rows(1, 2 * num_processes)
    if num_processes > 1:
        assert explanation.facts["reading"] == ITS_ROWS
        assert explanation.facts["policy"].startswith("DATA, because")


def test_dataset_of_arrays():
    dataset = mirrored(1).experimental_make_numpy_dataset(X)
    explanation = explain(dataset.batch(4), 2)
    assert explanation.facts["reading"] == ITS_ROWS
    assert explanation.last == ((1, 0, 0, 0), (1, 0, 0, 0))
    dropped = explain(dataset.batch(4, drop_remainder=True), 2)
    assert dropped.facts["epoch"] == "3 steps"
    assert dropped.last == dropped.whole
    own = explain(dataset.batch(4), 2, policy=Policy.OFF)
    assert own.facts["policy"] == "OFF, because the policy was chosen"
    assert own.facts["reading"] == LOCAL
    assert own.facts["last batch"].startswith("unknown")


def test_py_datasets_are_not_read():
    dataset = Pairs()
    explanation = explain(dataset, 2)
    assert dataset.read == []
    assert explanation.facts["reading"] == RUNS_ALL
    assert explanation.facts["epoch"] == "2 steps"
    assert explanation.facts["batch"].startswith("unknown")


@pytest.mark.parametrize("num_processes", WORKERS)
def test_generators_are_not_looked_at(num_processes):
    batches_of = iter([X[:8], X[8:]])
    generator = (batch for batch in batches_of)
    explanation = explain(generator, num_processes)
    assert explanation.facts["batch"] == "unknown without reading the data"
    assert len(list(generator)) == 2
    assert "unknown" in str(explanation)


def test_function_of_datasets():
    strategy = mirrored(2)
    dataset = strategy.distribute_datasets_from_function(
        lambda context: iter([X])
    )
    explanation = strategy.explain_input(dataset)
    assert "each replica gets entire batches" in explanation.facts["reading"]
    assert explanation.whole is None


@pytest.mark.torch
def test_torch():
    import torch

    class Counted(torch.utils.data.Dataset):
        read = 0

        def __len__(self):
            return 13

        def __getitem__(self, index):
            self.read += 1
            return torch.zeros(2)

    rows = Counted()
    loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
    for explanation in (explain(loader, 3), explain(rows, 3, batch_size=4)):
        assert explanation.facts["reading"] == ITS_ROWS
        assert explanation.facts["epoch"] == "4 steps"
        assert sum(explanation.last[0]) == 1
    assert rows.read == 0
    collated = torch.utils.data.DataLoader(
        rows, batch_size=4, collate_fn=lambda rows: torch.stack(rows)
    )
    assert explain(collated, 3).facts["reading"] == RUNS_ALL
    assert explain(collated, 3).last is None
    drop = torch.utils.data.DataLoader(rows, batch_size=4, drop_last=True)
    assert explain(drop).last == explain(drop).whole


def test_grain():
    grain = pytest.importorskip("grain")
    rows = grain.MapDataset.range(13)
    explanation = explain(rows.batch(4), 2)
    assert explanation.facts["reading"] == ITS_ROWS
    assert sum(explanation.last[0]) == 1
    mapped = explain(rows.batch(4).map(lambda batch: batch), 2)
    assert mapped.facts["reading"] == RUNS_ALL
    assert mapped.last is None
    # Sliced by the user for this process, as it seems: said, not warned of.
    assert (
        "divided among the processes already"
        in explain(rows[0::2].batch(4), 2).facts["note"]
    )


class TestFiles:
    def test_each_process_reads_its_files(self, tmp_path):
        facts = explain(npz_files(tmp_path, [5] * 7), 3).facts
        assert [facts[f"files, process {p}"] for p in range(3)] == [
            "3: part-0.npz, part-3.npz, part-6.npz",
            "2: part-1.npz, part-4.npz",
            "2: part-2.npz, part-5.npz",
        ]
        assert facts["policy"] == (
            "FILE, because there is a file for each process"
        )
        assert facts["reading"] == LOCAL
        assert facts["rows of replicas"].startswith("unknown")

    def test_too_few_are_divided_by_rows(self, tmp_path):
        explanation = explain(npz_files(tmp_path, [5, 6]), 3)
        assert explanation.facts["policy"].startswith("DATA, because")
        assert "there must be at least one file" in explanation.facts["note"]
        assert explanation.facts["reading"] == RUNS_ALL
        assert sum(explanation.last[0]) == 3
        with pytest.raises(ValueError, match="2 files for 3 processes"):
            explain(npz_files(tmp_path, [5, 6]), 3, policy=Policy.FILE)

    def test_shuffled_files_are_not_listed(self, tmp_path):
        dataset = npz_files(tmp_path, [5] * 4, shuffle=True)
        assert "files" not in str(explain(dataset, 2).facts.keys())


class TestTfData:
    @pytest.fixture
    def tf(self):
        return pytest.importorskip("tensorflow")

    @pytest.fixture
    def records(self, tf, tmp_path):
        for i in range(5):
            with tf.io.TFRecordWriter(f"{tmp_path}/{i}.tfrecord") as writer:
                for _ in range(6):
                    writer.write(np.zeros(2, "float32").tobytes())
        names = sorted(map(str, tmp_path.glob("*.tfrecord")))
        return (
            tf.data.TFRecordDataset(names)
            .map(lambda record: tf.io.decode_raw(record, tf.float32))
            .map(lambda row: tf.ensure_shape(row, [2]))
        )

    @pytest.mark.parametrize("num_processes", WORKERS)
    def test_rows(self, tf, num_processes):
        dataset = tf.data.Dataset.from_tensor_slices(X).shuffle(13, seed=1)
        explanation = explain(dataset.batch(8).prefetch(1), num_processes)
        num_replicas = 2 * num_processes
        assert explanation.facts["epoch"] == "2 steps"
        assert explanation.whole[0] == balanced_rows(8, num_replicas)
        if num_processes > 1:
            assert explanation.facts["reading"] == RUNS_ALL
            assert explanation.facts["policy"] == (
                "DATA, because it reads no files"
            )

    def test_batches_that_are_mapped_are_said_to_be_uncertain(self, tf):
        dataset = tf.data.Dataset.range(13).batch(8).map(lambda row: row * 2)
        alone, two = explain(dataset), explain(dataset, 2)
        assert alone.batch_size == two.batch_size == 8
        assert "The first batch determines" in alone.facts["note"]

    def test_files_of_all_processes(self, records):
        explanation = explain(records.batch(8), 2)
        assert explanation.facts["policy"] == (
            "FILE, because it reads enough files"
        )
        assert explanation.facts["reading"] == LOCAL
        assert explanation.last is None

    def test_files_that_cannot_be_split(self, records):
        explanation = explain(records.take(20).batch(8), 2)
        assert explanation.facts["policy"].startswith(
            "DATA, because `take` counts rows"
        )
        assert "runs the entire input pipeline" in explanation.facts["note"]
        assert explanation.facts["note"].count("\n") == 0

    @pytest.mark.parametrize(
        ("policy", "reading"),
        [
            (Policy.OFF, LOCAL),
            (Policy.DATA, RUNS_ALL),
        ],
    )
    def test_policy_of_the_dataset_is_followed(self, tf, policy, reading):
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy(int(policy))
        )
        dataset = tf.data.Dataset.range(13).batch(4).with_options(options)
        explanation = explain(dataset, 2)
        assert explanation.facts["reading"] == reading
        assert explanation.facts["policy"].startswith(f"{policy.name}, because")

    def test_hint(self, tf):
        dataset = tf.data.Dataset.range(13).shard(ks.data.SHARD_HINT, 0)
        explanation = explain(dataset.batch(4), 2, policy=Policy.HINT)
        assert explanation.facts["reading"] == LOCAL

    def test_infinite(self, tf):
        dataset = tf.data.Dataset.range(13).repeat().batch(4)
        explanation = explain(dataset)
        assert explanation.facts["epoch"].startswith("unknown")
        assert explanation.last is None

    def test_distributed_dataset(self, tf):
        strategy = mirrored(2)
        options = tf.data.Options()
        dataset = tf.data.Dataset.range(13).batch(4).with_options(options)
        explanation = strategy.explain_input(
            strategy.experimental_distribute_dataset(dataset)
        )
        assert explanation.whole == ((2, 2), (2, 2))


# Mistakes.


@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        (
            Pairs(),
            {"policy": Policy.FILE},
            "FILE and HINT only apply to",
        ),
        ((X, X[:3]), {}, "[Cc]ardinality"),
        ((X, np.float32(3)), {}, "must have a first dimension that"),
    ],
)
def test_arguments_that_do_not_fit(data, arguments, message):
    with pytest.raises(ValueError, match=message):
        explain(data, **arguments)


@pytest.mark.parametrize("data", [None, 3, [1, 2], {"x": "text"}])
def test_what_is_no_data(data):
    with pytest.raises(TypeError, match="A dataset must yield global batches"):
        explain(data)


def test_options_of_another_kind():
    with pytest.raises(TypeError, match="InputOptions"):
        mirrored(1).explain_input(X, options="DATA")


def test_no_rows_are_no_steps():
    assert explain(X[:0]).facts["epoch"] == "0 steps"
    assert explain(X[:0]).last is None


def test_dataset_of_single_rows():
    rows = mirrored(1).experimental_make_numpy_dataset(X)
    with pytest.raises(ValueError, match="batch"):
        explain(rows)


# Several processes.


def on_each_process(directory):
    strategy = ks.MultiWorkerMirroredStrategy()
    files = ks.data.files(f"{directory}/*.npz", "npz", batch_size=8)
    explained = [strategy.explain_input(data) for data in (X, files)]
    if jax.process_index() == 0:
        # Nobody is waited for.
        strategy.explain_input(files)
    dataset = strategy.experimental_distribute_dataset(files)
    explained.append(strategy.explain_input(dataset))
    return [str(explanation) for explanation in explained]


@pytest.mark.slow
def test_every_process_says_the_same(tmp_path):
    npz_files(tmp_path, [5] * 3)
    target = "strategy.inspect.test_explain_input:on_each_process"
    first, second = values_of(target, 2, tmp_path)
    assert first == second
    arrays, files, given = first
    assert "its rows" in arrays
    assert "part-2.npz" in files
    assert "part-2.npz" in given
