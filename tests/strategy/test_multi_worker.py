"""MultiWorkerMirroredStrategy as it is made, in one process."""

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks


def test_alone_it_is_a_mirrored_strategy():
    strategy = ks.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == len(jax.devices())
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    outputs = model.predict(np.ones((3, 2), "float32"), verbose=0)
    assert outputs.shape == (3, 1)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"cluster_resolver": object()}, ["cluster_resolver", "num_processes"]),
        ({"communication_options": 1}, ["communication_options"]),
        ({"num_processes": 2}, ["Give coordinator_address and process_id"]),
        ({"predict_in": "some"}, ["'some'", "'chief'"]),
    ],
)
def test_wrong_arguments_are_named(arguments, parts):
    with pytest.raises(ValueError, match="Received") as caught:
        ks.MultiWorkerMirroredStrategy(**arguments)
    for part in parts:
        assert part in str(caught.value)
