"""What the states of Keras's callbacks are, and how its loop counts.

`callback_states.py`, `resumable_fit.py` and the feed rely on it.
"""

import keras
import keras.src.trainers.data_adapters.data_adapter
import numpy as np
import pytest
from keras.src.trainers.epoch_iterator import EpochIterator

from keras_strategies.fit.callbacks import callback_states

WITH_STATE = {kind for kind, _ in callback_states._ATTRIBUTES}
# They have none that counts, or keep it in the model.
WITHOUT = {
    *("BackupAndRestore", "Callback", "CallbackList", "LambdaCallback"),
    *("LearningRateScheduler", "ProgbarLogger"),
    *("RemoteMonitor", "TerminateOnNaN"),
}
MADE = {
    "EarlyStopping": lambda path: keras.callbacks.EarlyStopping(),
    "ReduceLROnPlateau": lambda path: keras.callbacks.ReduceLROnPlateau(),
    "ModelCheckpoint": lambda path: keras.callbacks.ModelCheckpoint(
        path / "m.keras"
    ),
    "OrbaxCheckpoint": lambda path: keras.callbacks.OrbaxCheckpoint(path),
    "CSVLogger": lambda path: keras.callbacks.CSVLogger(path / "log.csv"),
    "TensorBoard": lambda path: keras.callbacks.TensorBoard(path),
    "SwapEMAWeights": lambda path: keras.callbacks.SwapEMAWeights(),
    "History": lambda path: keras.callbacks.History(),
}


def test_all_of_keras_s_callbacks_are_known():
    public = {name for name in dir(keras.callbacks) if name[0].isupper()}
    known = {kind.__name__ for kind in WITH_STATE} | WITHOUT
    assert public == known


@pytest.mark.parametrize(
    ("kind", "names"),
    callback_states._ATTRIBUTES,
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_their_attributes_are_there(kind, names, tmp_path):
    callback = MADE[kind.__name__](tmp_path)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(use_ema=True), "mse")
    callback.set_params({})
    callback.set_model(model)
    # Two of them open files.
    files = (keras.callbacks.TensorBoard, keras.callbacks.CSVLogger)
    if kind not in files:
        callback.on_train_begin()
    assert set(names) <= set(vars(callback))
    # Of these attributes nothing else is state: those that training changes.
    before = dict(vars(callback))
    assert before.keys() >= set(names)


def test_early_stopping_forgets_its_state_at_the_beginning():
    """So states are set after `on_train_begin`."""
    callback = keras.callbacks.EarlyStopping()
    callback.wait, callback.best = 3, 0.5
    callback.on_train_begin()
    assert (callback.wait, callback.best) == (0, None)


def test_a_logger_begins_a_new_file_unless_it_appends(tmp_path):
    path = tmp_path / "log.csv"
    for append, lines in ((False, 2), (True, 3), (False, 2)):
        logger = keras.callbacks.CSVLogger(path, append=append)
        logger.on_train_begin()
        assert not logger.csv_file.closed
        logger.on_epoch_end(0, {"loss": 1.0})
        logger.on_train_end()
        assert len(path.read_text().splitlines()) == lines


class Counted(keras.callbacks.CallbackList):
    """Where callbacks of batches may run in threads."""

    def __init__(self, callback):
        super().__init__([callback], model=keras.Sequential())


def test_threads_of_callbacks_can_be_waited_for():
    class Slow(keras.callbacks.Callback):
        async_safe = True
        seen = 0

        def on_train_batch_end(self, batch, logs=None):
            self.seen += 1

    slow = Slow()
    callbacks = Counted(slow)
    callbacks.on_train_begin()
    assert callbacks._async_train
    for batch in range(20):
        callbacks.on_train_batch_end(batch, {})
    callbacks._flush_futures()
    assert slow.seen == 20
    callbacks.on_train_end()


class Adapter(keras.src.trainers.data_adapters.data_adapter.DataAdapter):
    """Counts its iterators; each has `length` batches."""

    def __init__(self, length, num_batches):
        self.length = length
        self._num_batches = num_batches
        self.made = 0

    def get_numpy_iterator(self):
        self.made += 1
        for number in range(self.length):
            yield (np.full(1, number),)

    num_batches = property(lambda self: self._num_batches)
    batch_size = has_partial_batch = partial_batch_size = None


def read(iterator, epochs):
    found = []
    for _ in range(epochs):
        with iterator.catch_stop_iteration():
            for begin, _, batch in iterator:
                if batch:
                    found.append((begin, int(batch[0][0][0])))
    return found


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_an_epoch_s_batches_are_counted_from_the_iterator_s_first():
    """So a feed that goes on in the middle says that it has no end."""
    adapter = Adapter(length=4, num_batches=4)
    read(EpochIterator(adapter, steps_per_epoch=2), 2)
    # The next epoch's iterator is made where four batches were counted.
    before = adapter.made
    read(EpochIterator(adapter, steps_per_epoch=2), 1)
    assert adapter.made == before + 1
    infinite = Adapter(length=6, num_batches=2**62)
    found = read(EpochIterator(infinite, steps_per_epoch=2), 3)
    assert [batch for _, batch in found] == [0, 1, 2, 3, 4, 5]
    assert infinite.made == 1
    assert [begin for begin, _ in found] == [0, 1] * 3
