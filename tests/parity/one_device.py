"""Training one model on one device and on several, and comparing."""

import contextlib
import functools
from typing import Any

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from keras_strategies.variables.model_variables import (
    all_variables,
)
from tests.parity.cases import CASES, LOSSES, METRICS, Case
from tests.support.strategies import make_strategy

PAIRS = ((64, 16), (70, 16), (250, 64), (10, 4), (3, 8), (13, 5))
STRATEGIES = ("mirrored1", "mirrored2", "mirrored3", "mirrored8", "one", "tpu")


class Trained:
    """One model, set back to its first state before every run."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = case.build()
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        self._first: list[Any] | None = None

    def run(
        self, rows: int, batch_size: int, seen: tuple[str, ...]
    ) -> dict[str, Any]:
        """Trains two epochs from the first state; returns what can be seen."""
        case, model = self.case, self.model
        x, y = case.data(rows)
        weight = case.weight(rows)
        self._reset(x, y, weight)
        history = model.fit(
            x,
            y,
            sample_weight=weight,
            batch_size=batch_size,
            epochs=2,
            shuffle=False,
            verbose=0,
            **case.fit,
        ).history
        # Of several processes no one has all shards of a divided variable.
        state = [np.asarray(v) for v in all_variables(model)]
        result = {"history": history, "state": state}
        if "evaluate" in seen:
            result["evaluate"] = model.evaluate(
                x,
                y,
                sample_weight=weight,
                batch_size=batch_size,
                verbose=0,
                return_dict=True,
            )
        if "predict" in seen:
            result["predict"] = model.predict(
                x, batch_size=batch_size, verbose=0
            )
        return result

    def _reset(self, x: Any, y: Any, weight: Any) -> None:
        model = self.model
        if self._first is None:
            # Metrics are built by the first batch they see.
            type(model)._symbolic_build(model, data_batch=(x, y, weight))
            self._first = [np.array(v) for v in all_variables(model)]
        for variable, value in zip(
            all_variables(model), self._first, strict=True
        ):
            variable.assign(value)


@functools.cache
def _on_one_device(name: str) -> Trained:
    # A scope of one device: BatchNormalization(synchronized=True) needs one.
    # The model itself is a plain Keras model.
    strategy = ks.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        trained = Trained(CASES[name])
    strategy.detach(trained.model)
    return trained


@functools.cache
def expected(
    name: str, rows: int, batch_size: int, seen: tuple[str, ...]
) -> dict[str, Any]:
    """What plain Keras gives on one device."""
    return _on_one_device(name).run(rows, batch_size, seen)


def check(
    name: str,
    strategy: str,
    pairs: Any = PAIRS,
    seen: tuple[str, ...] = ("evaluate", "predict"),
    layout_map: Any = None,
) -> keras.Model:
    """Asserts that a strategy gives one device's numbers; for all pairs.

    Returns the model that it trained.
    """
    case = CASES[name]
    wanted = {pair: expected(name, *pair, seen) for pair in pairs}
    made = make_strategy(strategy, layout_map)
    with made.scope():
        trained = Trained(case)
    # With one replica nothing is gathered, so nothing is warned of.
    is_alone = made.num_replicas_in_sync == 1 and name == "not_additive"
    warned = (
        pytest.warns(UserWarning, match=case.warns)
        if case.warns and not is_alone
        else contextlib.nullcontext()
    )
    with warned:
        for pair in pairs:
            actual = trained.run(*pair, seen)
            assert_close(actual, wanted[pair], case.tolerance, pair)
            assert_replicated(trained.model)
    return trained.model


def list_seen(name: str) -> tuple[str, ...]:
    """What a case compares, beside the history and the state."""
    # All counts, of all loops: tests/step/test_steps_per_execution.py.
    return ("evaluate",) if name in LOSSES | METRICS else ()


def assert_close(actual: Any, wanted: Any, tolerance: float, pair: Any) -> None:
    """Compares histories, states, evaluations and predictions."""
    flat_actual = jax.tree_util.tree_leaves_with_path(actual)
    flat_wanted = jax.tree_util.tree_leaves_with_path(wanted)
    assert [p for p, _ in flat_actual] == [p for p, _ in flat_wanted]
    for (path, got), (_, want) in zip(flat_actual, flat_wanted, strict=True):
        np.testing.assert_allclose(
            np.asarray(got, dtype="float64"),
            np.asarray(want, dtype="float64"),
            rtol=tolerance,
            atol=tolerance,
            err_msg=f"{jax.tree_util.keystr(path)} of rows/batch {pair}",
        )
