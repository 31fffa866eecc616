"""Divided variables in several processes: one device's numbers."""

import jax
import keras
import numpy as np
import pytest

from keras_strategies.testing import run_processes
from tests.multi_process import sharded
from tests.parity.cases import CASES
from tests.parity.one_device import expected


def check(optimizer, num_processes, devices, shards, cores=1):
    results = run_processes(
        "tests.multi_process.sharded:fitted",
        num_processes,
        args=[optimizer, shards, 8, cores],
        devices_per_process=devices,
    )
    values = [result.value for result in results]
    assert all(value == values[0] for value in values)
    assert values[0]["divided"] >= 5
    model = sharded.compiled(optimizer)
    model.set_weights(sharded.first_weights(model))
    history = model.fit(
        sharded.X,
        sharded.Y,
        batch_size=8,
        epochs=2,
        shuffle=False,
        verbose=0,
    )
    _same(values[0]["history"], history.history)
    _same(values[0]["weights"], [w.tolist() for w in model.get_weights()])
    wanted = model.predict(sharded.X, batch_size=8, verbose=0)
    np.testing.assert_allclose(values[0]["predict"], wanted, atol=1e-5)


def _same(actual, wanted):
    keys = actual if isinstance(actual, dict) else range(len(wanted))
    for key in keys:
        np.testing.assert_allclose(
            actual[key], wanted[key], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    "shards", [4, pytest.param(None, marks=pytest.mark.slow)]
)
def test_two_processes_equal_one_device(shards):
    check("sgd", 2, 2, shards)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "lamb"])
@pytest.mark.parametrize(
    ("num_processes", "devices", "shards"),
    [(2, 2, None), (2, 2, 4), (3, 1, None), (2, 4, 4)],
)
def test_more_equal_one_device(optimizer, num_processes, devices, shards):
    check(optimizer, num_processes, devices, shards)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "shards"), [("sgd", 4), ("lamb", 2)])
def test_cores_and_replicas_of_two_processes_divide(optimizer, shards):
    check(optimizer, 2, 4, shards, cores=2)


@pytest.mark.parametrize(
    "shards", [4, pytest.param(None, marks=pytest.mark.slow)]
)
def test_files_and_checkpoints(tmp_path, shards):
    first, second = run_processes(
        "tests.multi_process.sharded:saved",
        2,
        args=[str(tmp_path), shards],
        timeout_s=300,
    )
    assert first.value == second.value
    # Of one process without a strategy.
    model = keras.saving.load_model(tmp_path / "model.keras")
    for got, want in zip(model.get_weights(), first.value, strict=True):
        np.testing.assert_array_equal(got, np.asarray(want, "float32"))
    assert (tmp_path / "best.keras").exists()


def test_a_loop_of_ones_own():
    first, second = run_processes(
        "tests.multi_process.sharded:looped", 2, args=[4]
    )
    assert first.value == second.value
    (alone,) = run_processes("tests.multi_process.sharded:looped", 1, args=[1])
    for got, want in zip(first.value, alone.value, strict=True):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_large_variables_are_equal_in_all_processes():
    # Keras compiles their initializers, in each process for itself.
    first, second = run_processes("tests.multi_process.sharded:large", 2)
    assert first.value == second.value


def test_what_processes_do_not_divide_alike_is_refused_in_all():
    first, second = run_processes(
        "tests.multi_process.sharded:refused", 2, devices_per_process=2
    )
    assert first.value.keys() == second.value.keys()
    for name, told in first.value.items():
        other = second.value[name]
        if name.startswith("raises"):
            for part in (
                "RuntimeError: Calling `variable_partitioner` failed in",
                "process 1: LookupError: no rule here",
                "Pass the same `variable_partitioner` in all processes",
            ):
                assert part in told
            assert other == "LookupError: no rule here"
        elif name == "passed":
            assert abs(told) < 1e-4
        elif name == "captured":
            assert told == other
            for part in (
                "must be passed to a compiled function",
                "float32[6, 24]",
                "to `run` in `args`",
            ):
                assert part in told
        else:
            assert told == other
            assert "All processes must shard variables in the same" in told
    told = first.value
    assert "dimension 0 of" in told["differs, created"]
    assert "(24, 24) (process 0), dimension 1" in told["differs, attached"]
    assert "no dimension of" in told["is_whole_in_one, attached"]
    assert "over 4 (process 0), FullySharded" in told["shards, created"]


@pytest.mark.slow
@pytest.mark.parametrize(("num_processes", "devices"), [(1, 4), (2, 2)])
def test_no_device_holds_a_whole_model_while_it_is_built(
    num_processes, devices
):
    # Twelve variables of 4.2 MB, with two slots each: 151 MB, which the
    # devices of a process divide.
    results = run_processes(
        "tests.multi_process.sharded:building",
        num_processes,
        args=[12, 1024],
        devices_per_process=devices,
    )
    for result in results:
        most, held = result.value
        # What was sent last is held until more is sent.
        assert held < 151 / devices + 4.2 + 1, result.value
        # A variable, and its copy on its way from the chief.
        assert most < held + 2 * 4.2, result.value


CASES_OF_PARITY = (
    *("global_clipnorm", "accumulation", "ema", "loss_scale_optimizer"),
    *("two_optimizers", "dice", "mask_and_weight", "class_weight"),
    *("keras_binary", "own_apply_gradients", "synchronized", "transformer"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_processes", "devices", "shards"),
    [(2, 2, 4), (2, 2, None), (3, 1, None)],
)
def test_cases_of_parity_equal_one_device(num_processes, devices, shards):
    results = run_processes(
        "tests.multi_process.sharded:of_cases",
        num_processes,
        args=[CASES_OF_PARITY, shards],
        devices_per_process=devices,
        timeout_s=900,
    )
    first, *others = (result.value for result in results)
    assert all(other == first for other in others)
    for name in CASES_OF_PARITY:
        assert first[name]["divided"], name
        wanted = expected(name, 15, 4, ("evaluate", "predict"))
        for got, want in zip(
            first[name]["leaves"], jax.tree.leaves(wanted), strict=True
        ):
            np.testing.assert_allclose(
                got,
                np.asarray(want, "float64"),
                rtol=CASES[name].tolerance,
                atol=CASES[name].tolerance,
                err_msg=name,
            )
