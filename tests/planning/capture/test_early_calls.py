"""Scripts that read or write values before their first training step."""

import contextlib
import runpy

import jax
import pytest

from keras_strategies.planning.capture import captured_data
from keras_strategies.planning.capture.capture import Capture
from keras_strategies.planning.capture.errors import PlanError, StepCaptured
from tests.planning.capture.scripts import HEAD
from tests.support.combinations import combine
from tests.support.slices import make_slice

TWO = (
    HEAD
    + """
strategy = ks.MirroredStrategy()
def make():
    return keras.Sequential([keras.Input((40,)), keras.layers.Dense(30)])
with strategy.scope():
    model, target = make(), make()
    model.compile("adam", "mse", metrics=["mae"])
x, y = np.ones((50, 40), "float32"), np.zeros((50, 30), "float32")
"""
)


def run(tmp_path, text, devices=None, **kwargs):
    """Runs a script up to its first step, on eight CPU devices by default."""
    script = tmp_path / "script.py"
    script.write_text(text)
    capture = Capture(devices or jax.devices()[:8], None, **kwargs)
    with capture.install(), contextlib.suppress(StepCaptured):
        runpy.run_path(str(script), run_name="__main__")
    return capture


@pytest.mark.parametrize(
    "early",
    combine(
        [
            "target.set_weights(model.get_weights())\n"
            "for a, b in zip(model.weights, target.weights):\n"
            "    np.testing.assert_array_equal(a, b)\n"
            "assert np.std(target.get_weights()[0]) > 0.01",
            "for _ in range(2):\n"
            "    outputs = model.predict(x, batch_size=8)\n"
            "    np.testing.assert_allclose(outputs, model(x), rtol=1e-5)",
            "assert model.predict_on_batch(x).shape == (50, 30)",
            "first = model.evaluate(x, y, batch_size=50)\n"
            "assert first == model.evaluate(x, y, batch_size=50)\n"
            "assert first[0] > 0\n"
            "assert model.test_on_batch(x, y)[0] == first[0]",
            "kernel = model.weights[0]\n"
            "kernel.assign(kernel * 0 + 3)\n"
            "assert float(kernel[0, 0]) == 3\n"
            "kernel.assign_add(np.ones((40, 30)))\n"
            "assert np.asarray(kernel).sum() == 40 * 30 * 4",
            "copy = keras.models.clone_model(model)\n"
            "for a, b in zip(model.weights, copy.weights):\n"
            "    b.assign(0.99 * a + 0.01 * b)",
            "target.save(DIRECTORY + '/a.keras')\n"
            "again = keras.models.load_model(DIRECTORY + '/a.keras')\n"
            "np.testing.assert_array_equal("
            "again.weights[0], target.weights[0])",
            "with strategy.scope():\n"
            "    assert model.evaluate(x, y)[0] > 0\n"
            "    assert model.predict(x).shape == y.shape",
            "model.summary()\nassert model.count_params() == 41 * 30",
        ],
        every=3,
    ),
)
def test_values_are_initial_or_assigned(tmp_path, early):
    directory = f"DIRECTORY = {str(tmp_path)!r}\n"
    texts = []
    for code in ("", early):
        fit = f"{directory}{code}\nmodel.fit(x, y, batch_size=24)"
        capture = run(tmp_path, TWO + fit)
        texts.append(capture.step.lower(24).as_text())
    # A program of values that were read is the one of values that were not.
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "options", ["run_eagerly=True", "steps_per_execution=4, jit_compile=False"]
)
def test_early_calls_of_models_that_are_compiled_otherwise(tmp_path, options):
    text = f"""
with strategy.scope():
    target.compile("sgd", "mse", {options})
assert np.isscalar(target.evaluate(x, y, batch_size=8))
assert target.predict(x, batch_size=8).shape == y.shape
target.fit(x, y, batch_size=24)
"""
    assert run(tmp_path, TWO + text).step.rows == 24


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        ("x, steps=2, batch_size=8", 16),
        ("x[:7]", 7),
        ("((x[i:i + 6],) for i in (0, 6))", 6),
        (
            "strategy.experimental_distribute_dataset("
            "strategy.experimental_make_numpy_dataset(x).batch(25))",
            50,
        ),
    ],
)
def test_a_prediction_has_the_rows_of_its_data(tmp_path, data, rows):
    text = (
        f"assert model.predict({data}).shape == ({rows}, 30)\nmodel.fit(x, y)"
    )
    assert run(tmp_path, TWO + text).step.rows == 32


IN_SCOPE = (
    HEAD
    + """
class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(30)
    def call(self, x, scale=None):
        return self.dense(x if scale is None else x * scale)
x, y = np.ones((50, 40), "float32"), np.zeros((50, 30), "float32")
with ks.MirroredStrategy().scope():
    model = Model()
    %s
    model.compile("adam", "mse")
    %s
    assert np.std(model.dense.kernel.numpy()) > 0.01
model.fit(x, y, batch_size=24)
"""
)


@pytest.mark.parametrize(
    "lines",
    [
        ("model(x[:1])", "pass"),
        ("model(x[:1], scale=x[:1])", "pass"),
        ("model(x[:1])", "model.predict(x)"),
        ("pass", "model.predict(x)"),
        ("pass", "model.evaluate(x, y)"),
    ],
)
def test_models_may_be_built_and_called_in_the_scope(tmp_path, lines):
    # The strategy's devices are absent.
    step = run(tmp_path, IN_SCOPE % lines, make_slice((2, 2, 1))).step
    assert step.state_bytes()["weights"] == 4 * (40 * 30 + 30)


def test_a_model_that_is_built_by_an_early_call_is_placed(tmp_path):
    text = """
strategy = ks.MirroredStrategy(
    variable_partitioner=ks.experimental.FullySharded(min_size=1)
)
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(80)])
    model.compile("adam", "mse")
x, y = np.ones((50, 40), "float32"), np.zeros((50, 80), "float32")
model.evaluate(x, y)
model.predict(x)
model.fit(x, y, batch_size=24)
"""
    step = run(tmp_path, HEAD + text).step
    text = step.lower(24).as_text()
    assert "all_gather" in text
    size = 4 * (40 * 80 + 80)
    assert step.state_bytes()["weights"] == pytest.approx(size / 8, rel=0.01)


def test_a_step_may_read_a_model_that_is_not_in_its_state(tmp_path):
    text = """
model.compile("adam", lambda y, p: (keras.ops.mean(target(x)) - p) ** 2)
model.fit(x, y, batch_size=24)
"""

    texts = []

    def lower(step, layout):
        texts.append(step.lower(24).as_text())

    run(tmp_path, TWO + text, plan=lower)
    # Its weights are constants of the program, as in training.
    assert "dense<" in texts[0]


READS = [
    "target.set_weights(model.get_weights())",
    "model(x)",
    "model.predict(x)",
    "model.save('a.keras')",
]


@pytest.mark.parametrize("code", READS)
def test_values_of_large_models_are_refused(tmp_path, monkeypatch, code):
    monkeypatch.setattr(captured_data, "_MAX_BYTES", 4000)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match="'.*kernel' of shape") as error:
        run(tmp_path, TWO + code)
    assert "script skip this read" in str(error.value)
    assert "abstract" not in str(error.value)


@pytest.mark.slow
def test_values_that_are_not_stored_are_not_read_as_initial_ones(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(captured_data, "_MAX_BYTES", 4000)
    write = "target.set_weights([np.ones((40, 30)), np.ones(30)])\n"
    assert run(tmp_path, TWO + write + "model.fit(x, y)").step.rows == 32
    monkeypatch.setattr(captured_data, "_MAX_BYTES", 2**20)
    many = "keep = [make() for _ in range(300)]\n"
    many += "for m in keep: m.set_weights([np.ones((40, 30)), np.ones(30)])\n"
    # The first values have taken all of the room.
    with pytest.raises(PlanError, match="exceeds this limit"):
        run(
            tmp_path,
            TWO
            + f"with strategy.scope():\n    {many}".replace(
                "\nfor", "\n    for"
            )
            + "keep[0].get_weights()\nkeep[-1].get_weights()",
        )
