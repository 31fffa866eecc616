"""Programs for the GPU that is there, beside those for absent ones."""

import jax
import keras
import pytest

import keras_strategies as ks

pytestmark = pytest.mark.on_gpu


def make_model():
    layers = [keras.layers.Dense(256, "relu") for _ in range(3)]
    model = keras.Sequential(
        [keras.Input((64,)), *layers, keras.layers.Dense(4)]
    )
    model.compile("adam", "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("kind", ["train", "test"])
def test_arguments_are_those_that_were_planned(kind):
    batch = (
        jax.ShapeDtypeStruct((32, 64), "float32"),
        jax.ShapeDtypeStruct((32, 4), "float32"),
    )
    present = ks.MirroredStrategy(jax.devices("gpu")[:1])
    with present.scope():
        model = make_model()
    absent = ks.MirroredStrategy.for_topology("h100:1")
    with absent.scope(), ks.abstract():
        planned_model = make_model()
    program = present.compile_step(model, batch, kind=kind)
    planned = absent.compile_step(planned_model, batch, kind=kind)
    assert program.argument_bytes == planned.argument_bytes
    memory = [p.executable.memory_analysis() for p in (program, planned)]
    alias, planned_alias = (m.alias_size_in_bytes for m in memory)
    assert alias == planned_alias


def test_a_report_knows_the_chip(tmp_path):
    with ks.MirroredStrategy(jax.devices("gpu")[:1]).scope():
        model = make_model()
    report = ks.callbacks.RunReport(tmp_path, verbose=False)
    x, y = jax.numpy.ones((640, 64)), jax.numpy.ones((640, 4))
    model.fit(x, y, batch_size=32, verbose=0, callbacks=[report])
    assert 0 < report.figures["mfu"] < 1
