"""docs/data.md: its table's data train alike, and its code runs."""

import json
import pathlib
import re

import grain
import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_strategies as ks
from tests.support import plain_keras
from tests.support.mistakes import make_iter

TEXT = (pathlib.Path(__file__).parents[2] / "docs/data.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
_random = np.random.default_rng(0)
X = _random.normal(size=(22, 3)).astype("float32")
Y = _random.normal(size=(22, 1)).astype("float32")
ROWS = list(zip(X, Y, strict=True))
SIZE = 8
PIECES = [(X[i : i + SIZE], Y[i : i + SIZE]) for i in range(0, 22, SIZE)]


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return len(PIECES)

    def __getitem__(self, index):
        return PIECES[index]


def list_files(directory):
    np.savez(directory / "rows.npz", x=X, y=Y)
    return ks.data.files(
        str(directory / "*.npz"), "npz", keys=("x", "y"), batch_size=SIZE
    )


def load_by_torch(_):
    import torch

    rows = map(torch.as_tensor, (X, Y))
    dataset = torch.utils.data.TensorDataset(*rows)
    return {"x": torch.utils.data.DataLoader(dataset, batch_size=SIZE)}


# By the words that a row of the page's table begins with.
GIVEN = {
    "arrays": lambda _: {"x": X, "y": Y, "batch_size": SIZE},
    "`keras.utils.PyDataset`": lambda _: {"x": Batches()},
    "other `tf.data.Dataset`": lambda _: {
        "x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(SIZE)
    },
    "`grain.MapDataset`": lambda _: {
        "x": grain.MapDataset.source(ROWS).batch(SIZE)
    },
    "`grain.IterDataset`": lambda _: {
        "x": grain.MapDataset.source(ROWS).to_iter_dataset().batch(SIZE)
    },
    "`torch.utils.data.DataLoader`": load_by_torch,
    "`ks.data.files": lambda directory: {"x": list_files(directory)},
    "generators": lambda _: {"x": make_iter(*PIECES)},
}
# tests/data/tfdata/test_tf_data.py reads files; test_extending.py has sources.
ELSEWHERE = {"`tf.data.Dataset` that reads", "a `ks.data.Source`"}


def rows_of_table(heading):
    section = TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (.*) \|$", section, re.M)
    return [line.split(" | ")[0] for line in lines[1:]]


def test_every_kind_of_data_of_the_table_has_a_case():
    for row in rows_of_table("Supported inputs"):
        starts = [s for s in {*GIVEN, *ELSEWHERE} if row.startswith(s)]
        assert len(starts) == 1, row


def trained(model, given):
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(**given, shuffle=False, verbose=0)
    return model.get_weights()


@plain_keras.no_data_left
@plain_keras.no_shuffle
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.torch] * ("torch" in kind))
        for kind in GIVEN
    ],
)
def test_a_kind_of_data_trains_as_arrays_in_plain_keras(kind, tmp_path):
    plain = keras.Sequential([keras.Input((3,)), plain_keras.dense(1)])
    expected = trained(plain, {"x": X, "y": Y, "batch_size": SIZE})
    with plain_keras.mirrored(3).scope():
        model = keras.Sequential([keras.Input((3,)), plain_keras.dense(1)])
        got = trained(model, GIVEN[kind](tmp_path))
    plain_keras.assert_same(expected, got, tolerance=1e-6)


def test_the_table_of_policies_has_all():
    rows = rows_of_table("Several processes")
    names = [row.strip("`") for row in rows]
    assert names == ["AUTO", "FILE", "DATA", "HINT", "OFF"]
    assert set(names) == set(ks.data.AutoShardPolicy.__members__)


@plain_keras.no_data_left
def test_a_policy_is_given_as_shown():
    (script,) = (block for block in BLOCKS if "InputOptions" in block)
    strategy = plain_keras.mirrored(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), plain_keras.dense(1)])
        model.compile("sgd", "mse")
    names = {"ks": ks, "strategy": strategy, "model": model}
    exec(script, names | {"batches": make_iter(*PIECES)})
    assert int(model.optimizer.iterations) == len(PIECES)


def test_a_loop_resumes_as_shown():
    (script,) = (block for block in BLOCKS if "get_state" in block)
    strategy = plain_keras.mirrored(2)
    dataset = grain.MapDataset.source(np.arange(20)).batch(4)
    names = {"strategy": strategy, "dataset": dataset}
    exec(script, names)
    assert json.loads(json.dumps(names["state"])) == names["state"]
    batch = next(names["iterator"])
    rows = [
        np.asarray(part) for part in strategy.experimental_local_results(batch)
    ]
    np.testing.assert_array_equal(np.concatenate(rows), [4, 5, 6, 7])


def test_rows_of_a_batch_in_a_loop_of_ones_own():
    assert "a last batch of 6 rows is split into 4 and 2" in " ".join(
        TEXT.split()
    )
    strategy = plain_keras.mirrored(2)
    dataset = strategy.experimental_distribute_dataset(
        grain.MapDataset.source(np.arange(14)).batch(8)
    )
    counts = [
        [len(part) for part in strategy.experimental_local_results(batch)]
        for batch in dataset
    ]
    assert counts == [[4, 4], [4, 2]]


def test_a_second_fit_shuffles_anew():
    seen = []

    class Seen(keras.utils.PyDataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            seen.append(index)
            return X[index : index + 2], Y[index : index + 2]

    data = Seen()
    with plain_keras.mirrored(2).scope():
        model = keras.Sequential([keras.Input((3,)), plain_keras.dense(1)])
        model.compile("sgd", "mse")
    for _ in range(2):
        model.fit(data, shuffle=True, verbose=0)
    # The first batch may be read once more, for its shapes.
    first, second = seen[-12:-6], seen[-6:]
    assert sorted(first) == sorted(second) == list(range(6))
    assert first != second
