"""Fits that are interrupted, and what must be equal when they have gone on."""

import csv
import dataclasses
import os
import pathlib
import random
import re
import shutil
import signal
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

import keras_strategies as ks
from keras_strategies.fit.callbacks import callback_states
from keras_strategies.variables import model_variables
from tests.support.plain_keras import mirrored

layers = keras.layers
_rng = np.random.default_rng(3)
X = _rng.normal(size=(32, 4)).astype("float32")
Y = (X[:, :1] * 2 + _rng.normal(size=(32, 1)) * 0.3).astype("float32")


class Interrupted(Exception):
    """What ends a run."""


class Seen(keras.callbacks.Callback):
    """Notes what callbacks are told; may interrupt.

    Args:
      stop: Raise after so many steps.
      where: The hook that raises; "SIGTERM" to be told to end.
    """

    def __init__(self, stop=None, where="batch"):
        super().__init__()
        self.stop, self.where = stop, where
        self.told: list[Any] = []
        self.steps = 0

    def _note(self, what, index, logs=None):
        self.told.append(
            [what, index, {k: float(v) for k, v in (logs or {}).items()}]
        )

    def on_train_begin(self, logs=None):
        self.steps = 0

    def on_train_batch_begin(self, batch, logs=None):
        self._note("begins", batch)

    def on_train_batch_end(self, batch, logs=None):
        self._note("ends", batch, logs)
        self.steps += 1
        if self.stop == self.steps and self.where == "batch":
            raise Interrupted
        if self.stop == self.steps and self.where == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)

    def on_test_batch_end(self, batch, logs=None):
        self._note("tests", batch, logs)
        if self.stop is not None and self.where == "validation":
            self.stop -= 1
            if self.stop < 0:
                raise Interrupted

    def on_epoch_end(self, epoch, logs=None):
        self._note("epoch", epoch, logs)


class Counting(keras.callbacks.Callback):
    """A user's own, which counts."""

    def __init__(self):
        super().__init__()
        self.count, self.rows = 0, np.zeros(3)

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1
        self.rows = self.rows + self.count * (1 + batch)

    def get_state(self):
        return {"count": self.count, "nest": [(1, None), {"r": self.rows}]}

    def set_state(self, state):
        self.count = state["count"]
        assert state["nest"][0] == (1, None)
        self.rows = state["nest"][1]["r"]


class Looking(keras.callbacks.Callback):
    """Evaluates, and predicts, in the middle of an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.evaluate(X[:8], Y[:8], batch_size=8, verbose=0)
            self.model.predict(X[:4], batch_size=4, verbose=0)


class Stopping(keras.callbacks.Callback):
    """Stops in the middle of the second epoch."""

    def __init__(self):
        super().__init__()
        self.epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 1 and batch == 1:
            self.model.stop_training = True


def mlp():
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5, activation="tanh", name="hidden"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.3, seed=2, name="drop"),
            layers.Dense(1, name="out"),
        ]
    )


def adam(k):
    return {
        "optimizer": keras.optimizers.Adam(0.01),
        "loss": "mse",
        "metrics": ["mae"],
        "steps_per_execution": k,
    }


def arrays():
    return {"x": X, "y": Y, "batch_size": 8}


def usual(directory):
    return [
        keras.callbacks.EarlyStopping(
            monitor="loss", patience=9, restore_best_weights=True
        ),
        keras.callbacks.ReduceLROnPlateau(
            monitor="loss", factor=0.5, patience=1, min_delta=0.5
        ),
        keras.callbacks.CSVLogger(directory / "log.csv"),
        Counting(),
    ]


@dataclasses.dataclass(frozen=True)
class Case:
    """A fit.

    Attributes:
      name: What is special about it.
      make: Makes the model.
      compiled: Arguments of `compile`, for steps per execution.
      data: Arguments of `fit`.
      callbacks: The callbacks of fit, for a directory.
      replicas: Of a `MirroredStrategy`.
      k: Steps per execution.
      then: The same for runs that go on.
      epochs: How many.
      is_exact: Whether they are equal bit for bit.
    """

    name: str
    _: dataclasses.KW_ONLY
    make: Callable[[], keras.Model] = mlp
    compiled: Callable[[int], dict[str, Any]] = adam
    data: Callable[[], dict[str, Any]] = arrays
    callbacks: Callable[[pathlib.Path], list[Any]] = usual
    replicas: int = 2
    k: int = 1
    then: int | None = None
    epochs: int = 3
    is_exact: bool = True

    def __str__(self):
        return self.name.replace(" ", "-")


class Runner:
    """Runs of a case, by one model whose values are set anew for each.

    Compiling is what costs time.
    """

    def __init__(self, case):
        self.case = case
        self._first: dict[int, Any] = {}
        self._models: dict[int, keras.Model] = {}

    def model(self, k):
        if k not in self._models:
            keras.utils.set_random_seed(1)
            with mirrored(self.case.replicas).scope():
                model = self.case.make()
                model.compile(**self.case.compiled(k))
                if model.built:
                    # Its slots have first values, too.
                    model.optimizer.build(model.trainable_variables)
            self._models[k] = model
        return self._models[k]

    def run(
        self,
        directory,
        *,
        seed=1,
        k=None,
        stop=None,
        where="batch",
        epochs=None,
        verbose=0,
        **options,
    ):
        """A fit with a `Checkpoint`, as a process would that just started."""
        model = self.model(k or self.case.k)
        self._set(model, seed)
        np.random.seed(seed)
        random.seed(seed)
        directory.mkdir(exist_ok=True)
        seen = Seen(stop, where)
        callbacks = self.case.callbacks(directory)
        kept = ks.callbacks.Checkpoint(
            directory / "kept", **{"save_every_steps": 1, "keep": 99} | options
        )
        arguments = {"epochs": epochs or self.case.epochs, "verbose": verbose}
        try:
            history = model.fit(
                **arguments | self.case.data(),
                callbacks=[*callbacks, seen, kept],
            )
        finally:
            for callback in callbacks:
                file = getattr(callback, "csv_file", None)
                if file is not None:
                    file.close()
        return self._outcome(model, history, callbacks, directory), seen.told

    def reset(self):
        """The model with its first values."""
        model = self.model(self.case.k)
        self._set(model, 1)
        return model

    def _set(self, model, seed):
        """First values, or, with another seed, what nobody must go on with."""
        values = self._first.get(id(model))
        if not model_variables.all_variables(model) or values is None:
            values = self._first[id(model)] = {}
        for variable in model_variables.all_variables(model):
            value = values.setdefault(id(variable), np.asarray(variable.value))
            if seed != 1:
                value = value + np.ones((), value.dtype)
            variable.assign(value)
        model.stop_training = False

    def _outcome(self, model, history, callbacks, directory):
        log = directory / "log.csv"
        text = log.read_text() if log.exists() else ""
        return {
            "variables": {
                f"{i} {re.sub(r'_[0-9]+', '', v.path)}": np.asarray(v.value)
                for i, v in enumerate(model_variables.all_variables(model))
            },
            "history": history.history,
            "epochs": history.epoch,
            "is_model's": model.history is history,
            "is_stopped": model.stop_training,
            "log": [
                list(map(number_or_text, row))
                for row in csv.reader(text.splitlines())
            ],
            "callbacks": callback_states.collect_states(callbacks),
        }


def number_or_text(cell):
    try:
        return float(cell)
    except ValueError:
        return cell


def interrupted_at(directory, step, copy):
    """What a run has left that was killed after it saved `step`."""
    copy.mkdir()
    shutil.copytree(directory / "kept" / str(step), copy / "kept" / str(step))
    for file in directory.glob("*.csv"):
        # Lines may have been written after the save.
        shutil.copy(file, copy / file.name)


def assert_equal(actual, expected, *, is_exact=True):
    """Bit for bit, by name."""
    ours, theirs = (
        {
            jax.tree_util.keystr(path): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(
                nest, is_leaf=lambda leaf: leaf is None
            )
        }
        for nest in (actual, expected)
    )
    assert not set(ours) ^ set(theirs), set(ours) ^ set(theirs)
    for where, two in theirs.items():
        one = ours[where]
        if is_exact or isinstance(two, str | bool):
            np.testing.assert_array_equal(one, two, err_msg=where)
            assert np.asarray(one).dtype == np.asarray(two).dtype, where
        elif not where.endswith("['CSVLogger']['size']"):
            # A number that is rounded differently may have another digit.
            np.testing.assert_allclose(
                one, two, rtol=1e-5, atol=1e-6, err_msg=where
            )
