"""MultiWorkerMirroredStrategy as it is made, in one process."""

import json

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.experimental import (
    CommunicationImplementation,
    CommunicationOptions,
)


def test_alone_it_is_a_mirrored_strategy():
    strategy = ks.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == len(jax.devices())
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    outputs = model.predict(np.ones((3, 2), "float32"), verbose=0)
    assert outputs.shape == (3, 1)
    assert strategy.extended.experimental_between_graph


def test_tf_config_of_one_process_is_alone(monkeypatch):
    config = {
        "cluster": {"worker": ["localhost:2222"]},
        "task": {"type": "worker", "index": 0},
    }
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    strategy = ks.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == len(jax.devices())
    assert strategy.cluster_resolver.task_type == "worker"
    assert strategy.cluster_resolver.task_id == 0


def test_an_evaluator_is_alone(monkeypatch):
    config = {
        "cluster": {"worker": ["a:1", "b:1"], "evaluator": ["c:1"]},
        "task": {"type": "evaluator", "index": 0},
    }
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    strategy = ks.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == len(jax.devices())
    assert strategy.cluster_resolver.task_type == "evaluator"


@pytest.mark.parametrize("text", ["", "{}"])
def test_an_empty_tf_config_is_none(monkeypatch, text):
    monkeypatch.setenv("TF_CONFIG", text)
    strategy = ks.MultiWorkerMirroredStrategy()
    assert strategy.cluster_resolver.task_type is None
    assert strategy.cluster_resolver.task_id is None


@pytest.mark.parametrize(
    ("arguments", "error", "parts"),
    [
        ({"cluster_resolver": 3}, TypeError, ["`cluster_spec()`", "int"]),
        (
            {
                "coordinator_address": "nowhere",
                "num_processes": 2,
                "process_id": 0,
            },
            ValueError,
            ["'nowhere'"],
        ),
        (
            {
                "coordinator_address": "127.0.0.1:1",
                "num_processes": 2,
                "process_id": 0,
                "startup_timeout_s": 0,
            },
            ValueError,
            ["`startup_timeout_s` must be > 0"],
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(arguments, error, parts):
    with pytest.raises(error) as caught:
        ks.MultiWorkerMirroredStrategy(**arguments)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error", "part"),
    [
        ({"bytes_per_pack": -1}, ValueError, ">= 0"),
        ({"bytes_per_pack": "1"}, TypeError, "str"),
        ({"timeout_seconds": 0}, ValueError, "> 0"),
        ({"timeout_seconds": True}, TypeError, "bool"),
        ({"implementation": "MPI"}, ValueError, "'NCCL'"),
    ],
)
def test_options_are_checked(arguments, error, part):
    with pytest.raises(error, match=part):
        CommunicationOptions(**arguments)


@pytest.mark.parametrize("value", ["NCCL", CommunicationImplementation.NCCL])
def test_options_of_gpus(value):
    options = CommunicationOptions(implementation=value)
    assert options.implementation is CommunicationImplementation.NCCL


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            {"cluster_resolver": object(), "num_processes": 2},
            ["either by `cluster_resolver` or by", "`num_processes`"],
        ),
        ({"num_processes": 2}, ["Pass coordinator_address and process_id"]),
        ({"predict_in": "some"}, ["'some'", "'chief'"]),
    ],
)
def test_wrong_arguments_are_named(arguments, parts):
    with pytest.raises(ValueError, match="Received") as caught:
        ks.MultiWorkerMirroredStrategy(**arguments)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("task", "workers", "is_warned"),
    [
        ({"type": "worker", "index": 1}, 2, True),
        ({"type": "worker", "index": 0}, 1, False),
        ({"type": "evaluator", "index": 0}, 2, False),
        ({"type": "worker", "index": 9}, 2, False),
    ],
)
def test_a_mirrored_strategy_warns_of_a_cluster(
    task, workers, is_warned, monkeypatch, recwarn
):
    addresses = [f"localhost:{2222 + i}" for i in range(workers)]
    config = {"cluster": {"worker": addresses}, "task": task}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    ks.MirroredStrategy()
    texts = [str(warning.message) for warning in recwarn]
    found = [text for text in texts if "only the devices of this" in text]
    assert len(found) == is_warned
    for text in found:
        assert "2 processes" in text
        assert "ks.MultiWorkerMirroredStrategy" in text
