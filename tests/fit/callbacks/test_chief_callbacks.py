"""Which callbacks may read variables in one process only."""

import keras
import pytest

import keras_strategies as ks
from keras_strategies.fit.callbacks import chief_callbacks
from tests.support.models import chain
from tests.support.plain_keras import dense, mirrored


class EachEpoch(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.save("model.keras")


class EachBatch(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.model.save("model.keras")


class OwnLogs(keras.callbacks.CSVLogger):
    def on_train_batch_end(self, batch, logs=None):
        self.model.save("model.keras")


def each_batch(**hooks):
    return keras.callbacks.LambdaCallback(**hooks)


CALLBACKS = [
    (EachEpoch, True),
    (EachBatch, False),
    (lambda: OwnLogs("log.csv"), False),
    (lambda: keras.callbacks.CSVLogger("log.csv"), True),
    (lambda: keras.callbacks.EarlyStopping("loss"), True),
    (lambda: keras.callbacks.ModelCheckpoint("model.keras"), True),
    (
        lambda: keras.callbacks.ModelCheckpoint("model.keras", save_freq=2),
        False,
    ),
    (lambda: keras.callbacks.BackupAndRestore("kept"), True),
    (lambda: keras.callbacks.BackupAndRestore("kept", save_freq=2), False),
    (lambda: each_batch(on_train_batch_end=print), False),
    (lambda: each_batch(on_epoch_end=print), True),
    (lambda: ks.callbacks.Checkpoint("kept"), True),
    (lambda: ks.callbacks.Scalars("logs"), True),
]


@pytest.mark.parametrize(("make", "expected"), CALLBACKS)
def test_callbacks_with_hooks_for_batches_may_read_variables(
    tmp_path, monkeypatch, make, expected
):
    monkeypatch.chdir(tmp_path)
    assert chief_callbacks._reads_after_epochs(make()) == expected


def test_only_accumulated_gradients_matter():
    mesh = mirrored(2).mesh
    model = chain((3,), dense(1))
    for steps, expected in ((None, False), (2, True)):
        model.compile(keras.optimizers.SGD(gradient_accumulation_steps=steps))
        together = chief_callbacks.read_variables_together(
            model, [EachBatch()], mesh
        )
        assert together == expected
