"""Batch ends are skipped where nobody listens, and nowhere else."""

import keras
import numpy as np
import pytest

from keras_strategies.fit.callbacks.callback_list import (
    QuietCallbackList,
    set_quiet_list,
)
from keras_strategies.fit.scope_hooks import Call
from tests.support.combinations import combine
from tests.support.models import compiled_in
from tests.support.plain_keras import check_same, dense, mirrored

_random = np.random.default_rng(0)
X = _random.normal(size=(22, 3)).astype("float32")
Y = _random.normal(size=(22, 1)).astype("float32")


def one_input():
    return keras.Sequential([keras.Input((3,)), dense(1)])


class OfBatches(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_batch_end(self, batch, logs=None):
        self.seen.append((batch, float(logs["loss"])))


class OfTrainBatches(OfBatches):
    def on_train_batch_end(self, batch, logs=None):
        self.seen.append((batch, float(logs["loss"])))


def set_on_the_instance():
    callback = keras.callbacks.Callback()
    callback.seen = []
    callback.on_train_batch_end = lambda batch, logs=None: callback.seen.append(
        (batch, float(logs["loss"]))
    )
    return callback


def given_a_function():
    seen = []
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(
            (batch, float(logs["loss"]))
        )
    )
    callback.seen = seen
    return callback


LISTENING = {
    "on_batch_end": OfBatches,
    "on_train_batch_end": OfTrainBatches,
    "instance": set_on_the_instance,
    "LambdaCallback": given_a_function,
}
SILENT = {
    "EarlyStopping": lambda: keras.callbacks.EarlyStopping("loss"),
    "History": keras.callbacks.History,
    "Callback": keras.callbacks.Callback,
}


class Feed:
    num_batches = 3


class Choosy(OfTrainBatches):
    """Wants the logs of every other batch."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def wants_batch(self, batch):
        self.asked.append(batch)
        return batch % 2 == 0


def make_list(callbacks, verbose=0):
    model = one_input()
    call = Call(model, "fit", (), {"callbacks": callbacks, "verbose": verbose})
    set_quiet_list(call, model, Feed())
    return call["callbacks"]


@pytest.mark.parametrize("name", LISTENING)
def test_who_listens_to_batches_is_called(name):
    def act(model):
        listener = LISTENING[name]()
        callbacks = [keras.callbacks.Callback(), listener]
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
        assert [batch for batch, _ in listener.seen] == [0, 1, 2] * 2
        return [loss for _, loss in listener.seen]

    heard = make_list([LISTENING[name]()])
    assert heard._quiet == ["test", "predict"]
    check_same(one_input, act, optimizer="sgd", loss="mse")


@pytest.mark.parametrize("name", SILENT)
def test_without_listeners_epochs_are_as_ever(name):
    def act(model):
        callback = SILENT[name]()
        history = model.fit(
            X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[callback]
        )
        assert history is model.history
        assert callback.params == {"verbose": 0, "epochs": 2, "steps": 3}
        assert callback.model is model
        return history.history, history.epoch

    assert isinstance(make_list([SILENT[name]()]), QuietCallbackList)
    check_same(one_input, act, optimizer="sgd", loss="mse")


def test_one_callback_without_a_list():
    callback = keras.callbacks.History()
    quiet = make_list(callback)
    assert isinstance(quiet, QuietCallbackList)
    assert quiet.callbacks == [callback]


@pytest.mark.parametrize("verbose", ["auto", 1, 2])
def test_a_progress_bar_listens(verbose):
    heard = make_list(None, verbose)
    kinds = set(map(type, heard.callbacks))
    assert keras.callbacks.ProgbarLogger in kinds
    assert heard._quiet == []


def test_a_list_of_keras_is_left_as_it_is():
    given = keras.callbacks.CallbackList([keras.callbacks.History()])
    assert make_list(given) is given


def test_kerass_caps_for_debugging_are_left_to_keras():
    keras.config.set_max_epochs(1)
    try:
        assert make_list(None) is None
    finally:
        keras.config.set_max_epochs(None)


def test_a_callback_is_given_a_model_that_is_built():
    class Shadows(keras.callbacks.Callback):
        def set_model(self, model):
            super().set_model(model)
            self.shadow = model.get_weights()

    def act(model):
        callback = Shadows()
        model.fit(X, Y, batch_size=8, verbose=0, callbacks=[callback])
        return callback.shadow

    shadow, _ = check_same(
        lambda: keras.Sequential([dense(1)]),
        act,
        is_fresh=True,
        optimizer="sgd",
        loss="mse",
    )
    assert len(shadow) == 2


@pytest.mark.parametrize("verbose", [0, 2])
@pytest.mark.parametrize("listeners", [[], [OfTrainBatches]])
def test_who_chooses_batches_is_called_for_these(verbose, listeners, capsys):
    def list_losses(model):
        choosy, every = Choosy(), [make() for make in listeners]
        callbacks = [*every, choosy]
        assert isinstance(make_list(callbacks, verbose), QuietCallbackList)
        np.random.seed(3)
        history = model.fit(
            X,
            Y,
            batch_size=8,
            epochs=2,
            shuffle=False,
            verbose=verbose,
            callbacks=callbacks,
        )
        assert choosy.asked == [0, 1, 2] * 2
        assert [batch for batch, _ in choosy.seen] == [0, 2] * 2
        for one in every:
            assert [batch for batch, _ in one.seen] == [0, 1, 2] * 2
            assert one.seen[::3] == choosy.seen[::2]
        return history.history["loss"], choosy.seen[1::2]

    model = compiled_in(mirrored(2), one_input, "sgd", "mse")
    ends, seen = list_losses(model)
    assert [loss for _, loss in seen] == pytest.approx(ends)
    # The progress bar of Keras still is there.
    assert ("loss: " in capsys.readouterr().out) == (verbose == 2)


def test_who_chooses_keeps_no_other_from_keras_thread():
    with_choosy = make_list([Choosy()], verbose=1)
    assert with_choosy._async_train
    assert not make_list([Choosy(), OfTrainBatches()], verbose=1)._async_train


def test_a_list_of_keras_tells_who_chooses_of_every_batch():
    model, choosy = one_input(), Choosy()
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[choosy])
    assert [batch for batch, _ in choosy.seen] == [0, 1, 2]
    assert choosy.asked == []


class OfTests(keras.callbacks.Callback):
    kind = "test"

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_test_batch_end(self, batch, logs=None):
        self.seen.append((batch, float(logs["loss"])))


class OfPredictions(OfTests):
    kind = "predict"
    on_test_batch_end = keras.callbacks.Callback.on_test_batch_end

    def on_predict_batch_end(self, batch, logs=None):
        self.seen.append((batch, np.shape(logs["outputs"])))


class Counting:
    """Counts the batches' ends that go to Keras's own list."""

    def __init__(self, monkeypatch):
        self.count = 0
        for name in ("on_test_batch_end", "on_predict_batch_end"):
            original = getattr(keras.callbacks.CallbackList, name)
            monkeypatch.setattr(
                keras.callbacks.CallbackList, name, self.counted(original)
            )

    def counted(self, original):
        def method(callbacks, batch, logs=None):
            self.count += 1
            return original(callbacks, batch, logs)

        return method


@pytest.mark.parametrize(
    "listener", combine([None, OfTests, OfPredictions], every=2)
)
def test_evaluate_and_predict_tell_who_listens_and_no_other(
    monkeypatch, listener
):
    def act(model):
        told = listener() if listener else keras.callbacks.Callback()
        common = {"batch_size": 8, "verbose": 0, "callbacks": [told]}
        results = model.evaluate(X, Y, **common), model.predict(X, **common)
        fitted = model.fit(X, Y, validation_data=(X, Y), **common).history
        return results, fitted, getattr(told, "seen", None)

    check_same(one_input, act, optimizer="sgd", loss="mse")
    counting = Counting(monkeypatch)
    model = compiled_in(mirrored(2), one_input, "sgd", "mse")
    act(model)
    kind = getattr(listener, "kind", None)
    # Three batches each: evaluate and the validation, predict.
    assert counting.count == {None: 0, "test": 6, "predict": 3}[kind]


@pytest.mark.parametrize("loop", ["evaluate", "predict"])
def test_a_progress_bar_of_other_loops_listens(capsys, loop):
    model = compiled_in(mirrored(2), one_input, "sgd", "mse")
    arrays = (X, Y) if loop == "evaluate" else (X,)
    getattr(model, loop)(*arrays, batch_size=8, verbose=1)
    assert "3/3" in capsys.readouterr().out
