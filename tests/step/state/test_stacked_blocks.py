"""The weights of equal blocks stay stacked between the steps of `fit`."""

import jax
import keras
import numpy as np
import pytest
from keras import layers, optimizers

import keras_strategies as ks
from keras_strategies.kernels import scanned_blocks
from keras_strategies.spmd import shard_exchange
from keras_strategies.step.state import stacked_blocks
from keras_strategies.testing import assert_replicated
from tests.support.combinations import combine
from tests.support.strategies import make_strategy

BLOCKS, WIDTH, ROWS = 5, 24, 44
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")


@pytest.fixture
def runs(monkeypatch):
    """The names of the programs that stack weights or divide stacks."""
    names = []
    run = stacked_blocks.StackedBlocks._run

    def note(self, program, *arrays):
        names.append(program.__name__.split("_")[0])
        return run(self, program, *arrays)

    monkeypatch.setattr(stacked_blocks.StackedBlocks, "_run", note)
    return names


def compiled(
    optimizer="adam",
    *,
    strategy="sharded2",
    is_scanned=True,
    layer=None,
    **options,
):
    keras.utils.set_random_seed(1)
    strategy = make_strategy(strategy)
    layer = layer or (lambda _: layers.Dense(WIDTH, "tanh"))
    with strategy.scope():
        x = inputs = keras.Input((WIDTH,))
        for number in range(BLOCKS):
            x = layer(number)(x)
        model = keras.Model(inputs, layers.Dense(WIDTH)(x))
        if is_scanned:
            ks.experimental.scan_blocks(model)
        if callable(optimizer):
            optimizer = optimizer()
        model.compile(optimizer, "mse", **options)
    return model


def fit(model, **options):
    options = {"batch_size": 8, "shuffle": False, "verbose": 0, **options}
    return model.fit(X, X, **options).history


def state_of(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [np.asarray(v) for v in variables]


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        error = np.linalg.norm(np.subtract(a, b, dtype="float64"))
        assert error <= 3e-5 * np.linalg.norm(b) + 1e-7


OPTIMIZERS = {
    "momentum": lambda: optimizers.SGD(0.01, momentum=0.9),
    "clipped": lambda: optimizers.AdamW(0.003, global_clipnorm=0.1),
    "averaged": lambda: optimizers.Adam(
        0.003, use_ema=True, ema_overwrite_frequency=3
    ),
    "factored": lambda: optimizers.Adafactor(0.003),
    "orthogonal": lambda: optimizers.Muon(0.003),
    "norms": lambda: optimizers.Lamb(0.003),
}


@pytest.mark.parametrize("per_execution", combine([1, 3], every=2))
@pytest.mark.parametrize("name", combine(OPTIMIZERS, every=6))
def test_optimizers_have_the_numbers_of_unrolled_blocks(
    name, per_execution, runs
):
    found = []
    for is_scanned in (False, True):
        model = compiled(
            OPTIMIZERS[name],
            is_scanned=is_scanned,
            steps_per_execution=per_execution,
        )
        history = fit(model, epochs=2, validation_data=(X[:9], X[:9]))
        found.append([*map(np.asarray, history.values()), *state_of(model)])
        assert_replicated(model)
        assert bool(runs) == is_scanned
    assert_equal(*found)


STRATEGIES = {
    "mirrored2": False,
    "sharded3": True,
    "sharded8_in_groups_of_2": True,
    "sharded_slots4": False,
    "tpu1_of_4_cores": True,
    "tpu2_of_2_cores": True,
    "sharded2_of_2_cores": True,
    "sharded_slots2_of_2_cores": True,
}


@pytest.mark.parametrize("name", combine(STRATEGIES, every=3))
def test_strategies_have_the_numbers_of_unrolled_blocks(name, runs):
    found = []
    for is_scanned in (False, True):
        model = compiled(strategy=name, is_scanned=is_scanned)
        # Batches of 24 rows, and one of 20.
        history = fit(model, batch_size=24, epochs=2)
        found.append([*map(np.asarray, history.values()), *state_of(model)])
        assert_replicated(model)
    # The gradients of replicated weights are summed in a buffer on CPUs, and
    # are therefore not stacked.
    assert bool(runs) == STRATEGIES[name]
    assert_equal(*found)


@pytest.mark.parametrize("replicas", combine([3, 8], every=2))
def test_rows_that_replicas_cannot_share_take_separate_arrays(replicas, runs):
    # Batches of 24 rows, and one of 20.
    fit(compiled(strategy=f"sharded{replicas}"), batch_size=24)
    # Kernels, biases, and two slots of each.
    assert runs == ["stack"] * 6 + ["unstack"] * 6


def test_weights_are_stacked_once_and_divided_when_they_are_read(runs):
    model = compiled(optimizer=OPTIMIZERS["momentum"])
    fit(model, batch_size=4)
    # The kernels, the biases, and their slots.
    assert runs == ["stack"] * 4 + ["unstack"] * 4
    runs.clear()
    seen = []

    class Reader(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                self.model.jax_state_sync()
                seen.append(state_of(self.model))

    fit(model, batch_size=4, callbacks=[Reader()])
    assert runs == (["stack"] * 4 + ["unstack"] * 4) * 2
    other = compiled(optimizer=OPTIMIZERS["momentum"], is_scanned=False)
    fit(other, batch_size=4)
    reader = Reader()
    fit(other, batch_size=4, callbacks=[reader])
    assert_equal(*seen)
    assert_equal(state_of(model), state_of(other))


def test_an_error_in_an_epoch_loses_no_weight(runs):
    class Failing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise KeyboardInterrupt

    found = []
    for is_scanned in (False, True):
        model = compiled(is_scanned=is_scanned)
        with pytest.raises(KeyboardInterrupt):
            fit(model, callbacks=[Failing()])
        fit(model)
        found.append(state_of(model))
    assert "unstack" in runs
    assert_equal(*found)


def test_other_methods_take_separate_arrays(runs):
    model = compiled()
    model.train_on_batch(X[:8], X[:8])
    model.evaluate(X, X, verbose=0)
    model.predict(X, verbose=0)
    assert runs == []


def make_penalized(number):
    return layers.Dense(WIDTH, "tanh", activity_regularizer="l2")


def test_weights_of_blocks_that_are_not_in_a_loop_are_not_stacked(runs):
    found = []
    for is_scanned in (False, True):
        model = compiled(is_scanned=is_scanned, layer=make_penalized)
        if is_scanned:
            with pytest.warns(UserWarning, match="one by one"):
                fit(model)
            # They were stacked before the first trace showed the losses.
            assert set(runs) == {"stack", "unstack"}
            runs.clear()
        else:
            fit(model)
        fit(model)
        found.append(state_of(model))
    assert runs == []
    assert_equal(*found)


def test_optimizers_with_branches_take_separate_arrays(runs):
    for options in ({"gradient_accumulation_steps": 2}, {}):
        optimizer = optimizers.Adam(0.003, **options)
        if not options:
            optimizer = optimizers.LossScaleOptimizer(optimizer)
        fit(compiled(optimizer))
    assert runs == []


@pytest.mark.parametrize("is_scanned", [False, True])
def test_a_program_has_one_update_for_all_blocks(is_scanned):
    model = compiled(is_scanned=is_scanned)
    strategy = model.distribute_strategy
    rows = jax.ShapeDtypeStruct((8, WIDTH), "float32")
    text = strategy.compile_step(model, (rows, rows)).executable.as_text()
    # One for the rate, and those of the kernels and the biases.
    updates = 1 if is_scanned else BLOCKS
    assert text.count(" sqrt(") == 1 + 2 * (updates + 1)


class Aliased(optimizers.SGD):
    """An optimizer with lists that share their variables."""

    def build(self, variables):
        super().build(variables)
        self.alias = self.momentums
        self.shared = [self.iterations] * len(variables)


def test_a_slot_is_stacked_once(runs):
    found = []
    for is_scanned in (False, True):
        optimizer = Aliased(0.01, momentum=0.9)
        model = compiled(optimizer, is_scanned=is_scanned)
        fit(model)
        found.append(state_of(model))
    assert runs == ["stack"] * 4 + ["unstack"] * 4
    assert_equal(*found)


def test_blocks_of_equal_layers_are_stacked_once(runs):
    found = []
    for is_scanned in (False, True):

        def block(_):
            x = inputs = keras.Input((WIDTH,))
            for _ in range(4):
                x = layers.Dense(WIDTH, "tanh")(x)
            return keras.Model(inputs, x)

        model = compiled("sgd", is_scanned=is_scanned, layer=block)
        fit(model)
        found.append(state_of(model))
    # The kernels and the biases of each of a block's four layers.
    assert runs == ["stack"] * 8 + ["unstack"] * 8
    assert_equal(*found)


def test_reading_the_learning_rate_divides_nothing(runs):
    class Reader(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            # `self.model` would write the values to the variables.
            model = self._model
            optimizer = model.optimizer
            ids = list(map(id, optimizer.variables))
            place = ids.index(id(optimizer.iterations))
            values = model._jax_state["optimizer_variables"]
            assert int(values[place]) == batch + 1

    fit(compiled(OPTIMIZERS["momentum"]), callbacks=[Reader()])
    assert runs == ["stack"] * 4 + ["unstack"] * 4


def test_loops_over_shards_are_not_cached_on_cpus(monkeypatch):
    found = []
    monkeypatch.setattr(shard_exchange, "keep_out_of_cache", found.append)
    for is_scanned in (False, True):
        fit(compiled(is_scanned=is_scanned))
        assert bool(found) == is_scanned


def test_models_that_are_not_marked_are_not_searched(monkeypatch):
    def search(model):
        raise AssertionError

    monkeypatch.setattr(scanned_blocks, "find_equal_blocks", search)
    fit(compiled(is_scanned=False))
