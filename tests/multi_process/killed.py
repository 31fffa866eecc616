"""A job that is killed in the middle of its epochs; see `run_processes`."""

import json
import os
import pathlib
import signal

import jax
import numpy as np
from jax.experimental import multihost_utils

import keras_strategies as ks
from tests.multi_process.scenarios import Batches
from tests.support.optional import without_torch

ROWS, SIZE = 30, 4  # Seven batches and a half.


def rows(count=ROWS):
    return np.arange(count, dtype="float32")[:, None] + np.zeros(3, "float32")


class Numbered(Batches):
    def __init__(self):
        super().__init__(ROWS, SIZE, workers=2)
        self.x = rows()


class Factory:
    def __iter__(self):
        for start in range(0, ROWS, SIZE):
            yield (rows()[start : start + SIZE],)


def arrays(strategy, directory):
    return strategy.experimental_make_numpy_dataset(rows()).batch(SIZE)


def grain_dataset(strategy, directory):
    import grain

    return grain.MapDataset.source(rows()).seed(5).shuffle().batch(SIZE)


def torch_loader(strategy, directory):
    import torch

    dataset = torch.utils.data.TensorDataset(torch.tensor(rows()))
    return torch.utils.data.DataLoader(dataset, batch_size=SIZE, shuffle=True)


def tf_dataset(strategy, directory):
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(rows()).shuffle(ROWS)
    return dataset.batch(SIZE)


def files(strategy, directory):
    paths = [str(directory / f"{number}.npy") for number in range(3)]
    return ks.data.files(paths, "npy", batch_size=SIZE, shuffle=True)


SOURCES = without_torch(
    {
        "arrays": arrays,
        "PyDataset": lambda strategy, directory: Numbered(),
        "factory": lambda strategy, directory: Factory(),
        "grain": grain_dataset,
        "torch": torch_loader,
        "tf.data": tf_dataset,
        "files": files,
    }
)


def write_files(directory):
    for number, part in enumerate(np.array_split(rows(), 3)):
        np.save(directory / f"{number}.npy", part)


def make_iterator(name, strategy, directory):
    options = ks.InputOptions(
        distribute=ks.data.DistributeOptions(
            auto_shard_policy=ks.data.AutoShardPolicy.DATA
        )
        if name == "files"
        else None
    )
    return iter(
        strategy.experimental_distribute_dataset(
            SOURCES[name](strategy, directory), options
        )
    )


def first_column(strategy, batch):
    """The rows of a global batch, in order, in every process."""
    first, *_ = jax.tree.leaves(
        batch, is_leaf=lambda value: isinstance(value, ks.PerReplica)
    )
    return np.asarray(strategy.gather(first, axis=0))[:, 0].tolist()


def go_on(directory, stop, is_killed):
    """Each source's next steps up to `stop`; all of them while reading."""
    directory = pathlib.Path(directory)
    is_job = jax.process_count() > 1
    strategy = (
        ks.MultiWorkerMirroredStrategy() if is_job else ks.MirroredStrategy()
    )
    iterators = {}
    for name in SOURCES:
        iterator = iterators[name] = make_iterator(name, strategy, directory)
        state = directory / f"{name}.state"
        read = directory / f"{name}.rows"
        if state.exists():
            iterator.set_state(json.loads(state.read_text()))
        lines = []
        while iterator.get_state()["step"] < stop:
            batch = iterator.get_next_as_optional()
            if not batch.has_value():
                break
            lines.append(first_column(strategy, batch.get_value()))
        if is_job:
            multihost_utils.sync_global_devices(f"read {name} to {stop}")
        if jax.process_index() == 0:
            with open(read, "a") as file:
                file.writelines(f"{json.dumps(line)}\n" for line in lines)
            state.write_text(json.dumps(iterator.get_state()))
    if is_job:
        multihost_utils.sync_global_devices("written")
    if is_killed:
        # The chief first: the others hear of it only by its silence.
        os.kill(os.getpid(), signal.SIGKILL)
    return list(iterators)
