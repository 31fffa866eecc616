"""Callbacks that log to Weights & Biases and TensorBoard."""

import glob
import os
import re

import jax
import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_strategies as ks

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore"),
]
wandb = pytest.importorskip("wandb", reason="./run test -m integrations")
searching = pytest.importorskip("tests.integrations.searching")


def train(strategy, callbacks):
    with strategy.scope():
        model = searching.build(64, 1e-2)
    model.fit(searching.X, searching.Y, **searching.FIT, callbacks=callbacks)
    return model


def make_strategy(is_sharded):
    return ks.MirroredStrategy(
        jax.devices()[:4],
        variable_partitioner=searching.SHARDED if is_sharded else None,
    )


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_wandb_logs_what_one_device_logs(
    tmp_path, monkeypatch, mode, is_sharded
):
    from wandb.integration.keras import (
        WandbMetricsLogger,
        WandbModelCheckpoint,
    )

    monkeypatch.chdir(tmp_path)

    def logged(strategy):
        lines = []
        with wandb.init(mode=mode, project="p", dir=tmp_path) as run:
            monkeypatch.setattr(wandb, "log", lambda line: lines.append(line))
            path = tmp_path / "{epoch}.keras"
            monkeypatch.setattr(run, "log", lines.append, raising=False)
            model = train(
                strategy,
                [
                    WandbMetricsLogger(log_freq=2),
                    WandbMetricsLogger(),
                    WandbModelCheckpoint(str(path), monitor="val_loss"),
                ],
            )
        return lines, model

    expected, _ = logged(ks.OneDeviceStrategy(jax.devices()[0]))
    found, model = logged(make_strategy(is_sharded))
    assert len(found) == len(expected) > 4
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert found[-1]["epoch/learning_rate"] == pytest.approx(1e-2)
    saved = keras.models.load_model(tmp_path / "2.keras")
    for one, other in zip(
        saved.get_weights(), model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_tensorboard_has_histograms_of_whole_weights(tmp_path, is_sharded):
    from tensorboard.backend.event_processing import event_accumulator

    def histograms(strategy, directory):
        callback = keras.callbacks.TensorBoard(
            directory, histogram_freq=1, profile_batch=0, write_graph=False
        )
        train(strategy, [callback])
        (path,) = glob.glob(os.path.join(directory, "train", "*"))
        events = event_accumulator.EventAccumulator(path)
        events.Reload()
        return {
            (re.sub(r"_\d+", "", tag), event.step): tf.make_ndarray(
                event.tensor_proto
            )
            for tag in events.Tags()["tensors"]
            if "histogram" in tag
            for event in events.Tensors(tag)
        }

    one = ks.OneDeviceStrategy(jax.devices()[0])
    expected = histograms(one, str(tmp_path / "one"))
    found = histograms(make_strategy(is_sharded), str(tmp_path / "several"))
    # Of two epochs: `dense` and `dense_1` are one name here.
    assert len(found) == len(expected) == 2 * 2
    assert not glob.glob(str(tmp_path / "*" / "plugins"))
    for key, value in found.items():
        # Entries of all shards.
        assert value[:, 2].sum() == expected[key][:, 2].sum()
        np.testing.assert_allclose(
            value[:, :2], expected[key][:, :2], rtol=1e-3, atol=1e-5
        )
