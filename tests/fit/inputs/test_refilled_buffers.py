"""User code may fill the same arrays again for each batch or row."""

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks

# Small ones and such that CPU devices use as they lie in memory.
WIDTHS = [1, 8192]
ROWS, BATCHES = 4, 12


class Refilled:
    """Batches 0, 1, 2, ... in one array."""

    def __init__(self, width):
        self.width = width

    def __iter__(self):
        buffer = np.empty((ROWS, self.width), "float32")
        for batch in range(BATCHES):
            buffer[:] = batch
            yield buffer


class OfKeras(keras.utils.PyDataset):
    def __init__(self, width):
        super().__init__()
        self.buffer = np.empty((ROWS, width), "float32")

    def __len__(self):
        return BATCHES

    def __getitem__(self, index):
        self.buffer[:] = index
        return self.buffer


def of_torch(width):
    import torch

    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            return map(torch.from_numpy, Refilled(width))

    return torch.utils.data.DataLoader(Rows(), batch_size=None)


def collated(width):
    import torch

    buffer = torch.empty((ROWS, width))

    def fill(rows):
        buffer[:] = torch.stack(rows)[:, None]
        return buffer

    dataset = torch.arange(BATCHES).repeat_interleave(ROWS).float()
    return torch.utils.data.DataLoader(dataset, ROWS, collate_fn=fill)


SOURCES = {
    "iterable": Refilled,
    "PyDataset": OfKeras,
    "torch": of_torch,
    "torch with collate_fn": collated,
}


def strategy_of(count):
    return ks.MirroredStrategy(jax.devices()[:count])


def firsts(batch):
    leaves = jax.tree.leaves(
        batch, is_leaf=lambda value: isinstance(value, ks.PerReplica)
    )
    return [float(np.asarray(v)[0, 0]) for v in leaves[0].values if len(v)]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SOURCES)
def test_a_loop_sees_every_batch(name, width):
    strategy = strategy_of(2)
    data = strategy.experimental_distribute_dataset(SOURCES[name](width))
    read = list(data)  # All are kept while others are read.
    assert [firsts(batch) for batch in read] == [
        [float(n)] * 2 for n in range(BATCHES)
    ]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_predict_sees_every_batch(name, width, steps):
    strategy = strategy_of(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((width,)), keras.layers.ReLU()])
        model.compile(steps_per_execution=steps)
    data = SOURCES[name](width)
    if name == "iterable":
        data = strategy.experimental_distribute_dataset(data)
    rows = model.predict(data, verbose=0)[:, 0]
    assert rows.tolist() == np.repeat(np.arange(BATCHES), ROWS).tolist()


@pytest.mark.parametrize("width", WIDTHS)
def test_every_replica_has_a_batch_of_its_own(width):
    strategy = strategy_of(2)
    data = strategy.distribute_datasets_from_function(lambda _: Refilled(width))
    assert [firsts(batch) for batch in data] == [
        [float(n), float(n + 1)] for n in range(0, BATCHES, 2)
    ]
