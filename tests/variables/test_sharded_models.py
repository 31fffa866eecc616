"""What else is done with a model whose variables the replicas divide.

Each is done to a plain model on one device, too, and gives the same numbers;
the variables are divided before and after it.
"""

import contextlib
import pickle
import re

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from keras_strategies.variables.model_variables import (
    all_variables,
)
from tests.support.combinations import combine
from tests.support.plain_keras import assert_same, dense

_random = np.random.default_rng(0)
X = _random.normal(size=(24, 8)).astype("float32")
Y = np.tanh(X[:, :4])
KINDS = (ks.experimental.FullySharded, ks.experimental.SlotsOnly)
FIT = {"batch_size": 8, "shuffle": False, "verbose": 0}


def dividing(count=4, kind=ks.experimental.FullySharded):
    return ks.MirroredStrategy(
        jax.devices()[:count], variable_partitioner=kind(min_size=1)
    )


def adam(**kwargs):
    return keras.optimizers.Adam(0.01, epsilon=0.01, **kwargs)


def built(strategy=None, optimizer=adam):
    """The same model each time: of a strategy, or a plain one."""
    scope = strategy.scope() if strategy else contextlib.nullcontext()
    with scope:
        model = keras.Sequential(
            [
                keras.Input((8,)),
                dense(16, seed=2, activation="tanh", name="one"),
                dense(4, seed=3, name="two"),
            ],
            name="net",
        )
        if optimizer is not None:
            model.compile(optimizer(), "mse")
    return model


def fit(model, epochs=1):
    return model.fit(X, Y, epochs=epochs, **FIT).history["loss"]


def values_of(model):
    """Of weights and the optimizer; no file has metrics."""
    return [np.array(v) for v in [*model.weights, *model.optimizer.variables]]


def divided(model):
    """The names of the variables that are divided."""
    # Optimizers are numbered, and a model that is loaded names its slots when
    # its layers are not in it yet.
    return {
        re.sub(r"^(net|adam(_[0-9]+)?)/(net_)?", "", variable.path)
        for variable in all_variables(model)
        if not variable.value.sharding.is_fully_replicated
    }


ALL = {"one/kernel", "one/bias", "two/kernel", "two/bias"}
SLOTS = {
    f"{name.replace('/', '_')}_{slot}"
    for name in ALL
    for slot in ("momentum", "velocity")
}


def compare(act, optimizer=adam):
    """Does the same to a plain and a divided model; returns the latter."""
    plain, ours = built(None, optimizer), built(dividing(), optimizer)
    assert divided(ours) >= ALL
    expected, found = act(plain), act(ours)
    assert_same(expected, found)
    assert_replicated(ours)
    return ours


# Layers that change.


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Layer InputLayer:UserWarning")
def test_quantized():
    def act(model):
        fit(model)
        model.quantize("int8")
        return [
            model.predict(X, batch_size=8, verbose=0),
            model.predict(X[:7], batch_size=7, verbose=0),
        ]

    ours = compare(act)
    kernel = ours.layers[0]._kernel
    assert kernel.dtype == "int8"
    assert divided(ours) >= {"one/kernel", "two/kernel"}


def enable_lora(model):
    for layer in model.layers:
        layer.enable_lora(2, a_initializer=keras.initializers.GlorotUniform(7))


@pytest.mark.slow
def test_lora_before_compile():
    plain, ours = built(None, None), built(dividing(), None)
    for model in (plain, ours):
        enable_lora(model)
        model.compile(adam(), "mse")
    frozen = [layer._kernel for layer in ours.layers]
    before = list(map(np.array, frozen))
    assert_same(fit(plain, 2), fit(ours, 2))
    assert_same(plain.predict(X, verbose=0), ours.predict(X, verbose=0))
    for kernel, first in zip(frozen, before, strict=True):
        assert not kernel.value.sharding.is_fully_replicated
        np.testing.assert_array_equal(kernel, first)
    assert {"one/lora_kernel_a", "one/lora_kernel_b"} <= divided(ours)


@pytest.mark.slow
def test_lora_of_a_trained_model(tmp_path):
    plain, ours = built(), built(dividing())
    for model in (plain, ours):
        fit(model)
        enable_lora(model)
        # Keras's optimizer knows its variables from the first step.
        model.compile(adam(), "mse")
    frozen = [layer._kernel for layer in ours.layers]
    before = list(map(np.array, frozen))
    assert_same(fit(plain), fit(ours))
    for kernel, first in zip(frozen, before, strict=True):
        assert not kernel.value.sharding.is_fully_replicated
        np.testing.assert_array_equal(kernel, first)
    wanted = ours.predict(X, verbose=0)
    # Saved with what LoRA added merged into the kernels.
    ours.save(tmp_path / "merged.keras")
    alone = keras.saving.load_model(tmp_path / "merged.keras")
    assert not np.any(alone.layers[0].lora_kernel_b)
    assert_same(wanted, alone.predict(X, verbose=0))
    with dividing(2).scope():
        loaded = keras.saving.load_model(tmp_path / "merged.keras")
    assert divided(loaded) >= ALL
    assert_same(wanted, loaded.predict(X, verbose=0))


@pytest.mark.slow
def test_frozen_and_unfrozen_between_fits():
    kernels = []

    def act(model):
        losses = fit(model)
        model.layers[0].trainable = False
        frozen = np.array(model.layers[0].kernel)
        model.compile(adam(), "mse")
        losses += fit(model)
        np.testing.assert_array_equal(model.layers[0].kernel, frozen)
        model.layers[0].trainable = True
        model.compile(adam(), "mse")
        losses += fit(model)
        kernels.append((frozen, np.array(model.layers[0].kernel)))
        return losses, model.predict(X, verbose=0)

    ours = compare(act)
    assert divided(ours) == ALL | SLOTS
    assert all((a != b).any() for a, b in kernels)


@pytest.mark.parametrize(
    "frequency", [2, pytest.param(None, marks=pytest.mark.slow)]
)
def test_averages_that_overwrite(frequency):
    def optimizer():
        return adam(
            use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=frequency
        )

    def act(model):
        losses = fit(model, 2)
        return losses, values_of(model)

    ours = compare(act, optimizer)
    found = divided(ours)
    assert found >= ALL | SLOTS
    assert any("average" in name for name in found)


# Attached and detached.


@pytest.mark.parametrize("kind", combine(KINDS, every=2))
def test_attached_and_detached_values_stay_bit_for_bit(kind):
    plain, model = built(), built()
    expected = [fit(plain)]
    fit(model)
    before = values_of(model)
    assert any("momentum" in v.path for v in model.optimizer.variables)
    strategy = dividing(4, kind)
    strategy.attach(model)
    whole = kind is ks.experimental.SlotsOnly
    assert divided(model) == (set() if whole else ALL) | SLOTS
    assert_same(before, values_of(model), tolerance=0)
    expected.append(fit(plain))
    losses = fit(model)
    assert divided(model) == (set() if whole else ALL) | SLOTS
    trained = values_of(model)
    strategy.detach(model)
    assert divided(model) == set()
    assert all(type(v) is keras.Variable for v in all_variables(model))
    for variable in all_variables(model):
        assert len(variable.value.sharding.device_set) == 1
    assert_same(trained, values_of(model), tolerance=0)
    expected.append(fit(plain))
    assert_same(expected[1:], [losses, fit(model)])
    assert_same(values_of(plain), values_of(model))


# Files.


@pytest.fixture(scope="module")
def trained():
    model = built(dividing())
    fit(model)
    return model, values_of(model), model.predict(X, verbose=0)


def test_a_model_in_a_file(trained, tmp_path):
    model, values, predicted = trained
    model.save(tmp_path / "model.keras")
    alone = keras.saving.load_model(tmp_path / "model.keras")
    assert divided(alone) == set()
    assert_same(values, values_of(alone), tolerance=0)
    with dividing(2).scope():
        ours = keras.saving.load_model(tmp_path / "model.keras")
    assert divided(ours) == ALL | SLOTS
    assert_same(values, values_of(ours), tolerance=0)
    assert_same(fit(alone), fit(ours))
    assert divided(ours) == ALL | SLOTS
    assert_same(predicted, model.predict(X, verbose=0), tolerance=0)
    assert divided(model) == ALL | SLOTS


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_model_that_is_attached(kind, tmp_path):
    plain = built()
    fit(plain)
    plain.save(tmp_path / "model.keras")
    ours = keras.saving.load_model(tmp_path / "model.keras")
    dividing(4, kind).attach(ours)
    whole = kind is ks.experimental.SlotsOnly
    assert divided(ours) == (set() if whole else ALL) | SLOTS
    assert_same(values_of(plain), values_of(ours), tolerance=0)
    assert_same(fit(plain), fit(ours))


def test_weights_in_a_file(trained, tmp_path):
    model, values, _ = trained
    model.save_weights(tmp_path / "model.weights.h5")
    for other in (built(), built(dividing(2))):
        other.optimizer.build(other.trainable_variables)
        other.load_weights(tmp_path / "model.weights.h5")
        assert_same(values, values_of(other), tolerance=0)
    assert divided(other) == ALL | SLOTS
    model.load_weights(tmp_path / "model.weights.h5")
    assert divided(model) == ALL | SLOTS
    assert_same(values, values_of(model), tolerance=0)


def test_a_plain_models_weights_in_a_divided_one(tmp_path):
    plain = built()
    fit(plain)
    plain.save_weights(tmp_path / "plain.weights.h5")
    ours = built(dividing())
    ours.optimizer.build(ours.trainable_variables)
    ours.load_weights(tmp_path / "plain.weights.h5")
    assert_same(values_of(plain), values_of(ours), tolerance=0)
    assert divided(ours) == ALL | SLOTS
    ours.set_weights([w + 1 for w in plain.get_weights()])
    assert divided(ours) == ALL | SLOTS
    assert_same(
        [w + 1 for w in plain.get_weights()], ours.get_weights(), tolerance=0
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("given", ["float64", "float32", "int64"])
def test_arrays_of_the_host_are_assigned_as_plain_keras_does(dtype, given):
    value = np.random.default_rng(5).normal(size=(8, 6), scale=9).astype(given)
    plain = keras.Variable(np.zeros((8, 6)), dtype=dtype)
    plain.assign(value)
    for count in (2, 3):
        with dividing(count).scope():
            variable = keras.Variable(np.zeros((8, 6)), dtype=dtype)
        changed = value.copy()
        variable.assign(changed)
        changed[:] = 0
        assert variable.value.dtype == plain.value.dtype
        assert not variable.value.sharding.is_fully_replicated
        np.testing.assert_array_equal(np.asarray(variable), plain.numpy())
        with pytest.raises(ValueError, match="must match"):
            variable.assign(value[:4])
        np.testing.assert_array_equal(np.asarray(variable), plain.numpy())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_exported_model(trained, tmp_path):
    import tensorflow as tf

    model, values, predicted = trained
    model.export(tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "exported")
    assert_same(predicted, loaded.serve(X).numpy())
    assert divided(model) == ALL | SLOTS
    assert_same(values, values_of(model), tolerance=0)


def test_cloned_and_pickled(trained):
    model, values, predicted = trained
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    assert divided(clone) == set()
    assert_same(predicted, clone.predict(X, verbose=0))
    with dividing(2).scope():
        clone = keras.models.clone_model(model)
        clone.set_weights(model.get_weights())
    assert divided(clone) >= ALL
    assert_same(predicted, clone.predict(X, verbose=0))
    copy = pickle.loads(pickle.dumps(model))
    assert divided(copy) == set()
    assert all(type(v) is keras.Variable for v in all_variables(copy))
    assert_same(values, values_of(copy), tolerance=0)
    assert divided(model) == ALL | SLOTS


# Callbacks.


def test_callbacks_of_keras(tmp_path):
    def act(model):
        directory = tmp_path / str(id(model))
        best = keras.callbacks.ModelCheckpoint(
            f"{directory}/best.keras", monitor="loss", save_best_only=True
        )
        weights = keras.callbacks.ModelCheckpoint(
            f"{directory}/e{{epoch}}.weights.h5", save_weights_only=True
        )
        backup = keras.callbacks.BackupAndRestore(f"{directory}/backup")
        stop = keras.callbacks.EarlyStopping(
            "loss", mode="max", patience=1, restore_best_weights=True
        )
        losses = model.fit(
            X, Y, epochs=4, callbacks=[best, weights, backup, stop], **FIT
        ).history["loss"]
        # It falls, so the first epoch's weights were the best.
        assert len(losses) == 2
        loaded = keras.saving.load_model(f"{directory}/best.keras")
        first = model.get_weights()
        model.load_weights(f"{directory}/e2.weights.h5")
        assert_same(loaded.get_weights(), model.get_weights(), tolerance=0)
        return losses, first, model.get_weights()

    ours = compare(act)
    assert divided(ours) == ALL | SLOTS


@pytest.mark.slow
def test_averages_are_swapped_in_for_evaluation():
    class Seen(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.divided = []

        def on_epoch_end(self, epoch, logs=None):
            self.divided.append(divided(self.model))

    seen = Seen()

    def act(model):
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        losses = model.fit(
            X,
            Y,
            validation_data=(X[:10], Y[:10]),
            epochs=2,
            callbacks=[swap, seen],
            **FIT,
        ).history
        return losses, model.evaluate(X, Y, verbose=0), model.get_weights()

    ours = compare(act, lambda: adam(use_ema=True, ema_momentum=0.5))
    assert divided(ours) >= ALL | SLOTS
    assert all(found >= ALL for found in seen.divided[2:])


class Interrupted(Exception):
    pass


class Stops(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise Interrupted


def test_a_fit_is_backed_up_and_restored(tmp_path):
    def act(model):
        backup = keras.callbacks.BackupAndRestore(
            tmp_path / str(id(model)), delete_checkpoint=False
        )
        with pytest.raises(Interrupted):
            model.fit(X, Y, epochs=4, callbacks=[backup, Stops()], **FIT)
        model.set_weights([0 * w for w in model.get_weights()])
        return model.fit(X, Y, epochs=4, callbacks=[backup], **FIT).history

    ours = compare(act)
    assert divided(ours) == ALL | SLOTS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_keras_checkpoints_of_orbax(tmp_path):
    def act(model):
        directory = str(tmp_path / str(id(model)))
        callback = keras.callbacks.OrbaxCheckpoint(directory, save_freq=2)
        losses = model.fit(X, Y, epochs=2, callbacks=[callback], **FIT)
        loaded = keras.saving.load_model(directory)
        return losses.history["loss"], values_of(loaded), values_of(model)

    ours = compare(act)
    assert divided(ours) == ALL | SLOTS
