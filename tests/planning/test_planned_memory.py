"""Memory that plans say and memory that steps take: within 15 percent.

Of models of at least 500 MB, in processes of their own: benchmarks/planned.py
says what is measured.
"""

import json
import pathlib

import jax
import keras
import pytest

import keras_strategies as ks
from tests.support.combinations import combine
from tests.support.commands import python

PROGRAM = pathlib.Path(__file__).parents[2] / "benchmarks" / "planned.py"
LEAST_BYTES = 500e6
MODELS = (
    *("wide_mlp_bf16", "wide_mlp_sharded_x4", "deep_mlp", "lstm"),
    *("decoder_remat", "decoder_sharded_x4", "embedding_sgd_x2", "autoencoder"),
)


@pytest.mark.planned
@pytest.mark.parametrize("name", MODELS)
def test_measured_memory_is_as_planned(name, tmp_path):
    file = tmp_path / "found.json"
    done = python(PROGRAM, "--models", name, "--json", file, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads(file.read_text()).values()
    assert row["measured"] >= LEAST_BYTES
    assert row["planned"] == pytest.approx(row["measured"], rel=0.15), row


@pytest.mark.parametrize("num_devices", combine([1, 2], every=2))
def test_a_deep_stack_is_planned_as_by_compiling_all_of_it(num_devices):
    # One replica uses each gradient up as soon as it is there; 4.2 MB in all.
    names = [f"cpu:{i}" for i in range(num_devices)]
    strategy = ks.MirroredStrategy(names)
    rows = jax.ShapeDtypeStruct((32, 256), "float32")

    def planned(is_whole):
        plan = strategy.plan(
            deep_stack,
            (rows, rows),
            strategies="replicated",
            whole=is_whole,
            cache=False,
        )
        (step,) = plan.steps
        assert (step.blocks is None) == is_whole
        return step.bytes_in_all

    assert planned(False) == pytest.approx(planned(True), rel=0.03)


def deep_stack():
    stack = [keras.layers.Dense(256, "relu") for _ in range(16)]
    model = keras.Sequential([keras.Input((256,)), *stack])
    model.compile("sgd", "mse")
    return model
