"""What compiling in a scope, `attach` and `detach` make of a model."""

import copy
import logging
import pickle
import threading

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.fit.binding import find_binding
from keras_strategies.testing import assert_replicated
from keras_strategies.variables import model_variables
from tests.support.combinations import combine, cover
from tests.support.plain_keras import dense, mirrored
from tests.support.rows_seen import (
    NOT_OURS,
    RowsSeen,
    X,
    Y,
    assert_close,
    compile_,
    fit,
    momentum,
    rows_seen,
    sequential,
    state_of,
    trained_plain,
)

LOOPS = {
    "fit": fit,
    "evaluate": lambda m: m.evaluate(X, Y, batch_size=8, verbose=0),
    "predict": lambda m: m.predict(X, batch_size=8, verbose=0),
    "train_on_batch": lambda m: m.train_on_batch(X, Y),
    "test_on_batch": lambda m: m.test_on_batch(X, Y),
    "predict_on_batch": lambda m: m.predict_on_batch(X),
}


def bound(strategy, build=sequential):
    with strategy.scope():
        return compile_(build())


def assert_on_mesh(model, strategy):
    devices = set(strategy.extended.worker_devices)
    for variable in model_variables.all_variables(model):
        assert variable.value.sharding.device_set == devices, variable.path


def assert_plain(model):
    assert find_binding(model) is None
    ours = {*LOOPS, "compile", "make_train_function", "_symbolic_build"}
    assert not ours & set(vars(model))
    for variable in model_variables.all_variables(model):
        assert len(variable.value.sharding.device_set) == 1, variable.path
        assert variable._layout is None, variable.path


# From inside the step.


@pytest.mark.parametrize("loop", LOOPS)
def test_loop_outside_the_scope_is_distributed(loop):
    strategy = mirrored(2)
    model = bound(strategy)
    assert rows_seen(LOOPS[loop], model) == 4
    assert_on_mesh(model, strategy)


def test_loop_inside_the_scope_is_distributed():
    strategy = mirrored(2)
    with strategy.scope():
        model = compile_(sequential())
        assert rows_seen(fit, model) == 4
    assert_close(state_of(model), trained_plain(1))


def test_own_train_step_sees_a_replicas_share():
    shares = []

    class Own(keras.Sequential):
        def train_step(self, state, data):
            shares.append(data[0].shape[0])
            return super().train_step(state, data)

        def compute_loss(self, x, *args, **kwargs):
            if shares:
                shares.append(x.shape[0])
            return super().compute_loss(x, *args, **kwargs)

    with mirrored(2).scope():
        model = compile_(Own(sequential().layers))
    fit(model)
    # Its second trace, with the rows of the global batch, is only compared.
    assert shares == [4, 4, 8, 8]


# Plain models next to it.


def test_plain_models_made_before_and_after_stay_plain():
    before = compile_(sequential())
    model = bound(mirrored(2))
    after = compile_(sequential())
    fit(model)
    for plain in (before, after):
        assert rows_seen(fit, plain) == NOT_OURS
        assert_plain(plain)
        assert_close(state_of(plain), state_of(model))


def test_plain_model_in_another_thread_while_a_scope_is_open():
    models, errors = [], []

    def work():
        try:
            assert not ks.has_strategy()
            model = compile_(sequential("other"))
            assert rows_seen(fit, model) == NOT_OURS
            models.append(model)
        except BaseException as error:
            errors.append(error)

    with mirrored(2).scope():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert errors == []
    assert_plain(models[0])


# attach and detach.


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_plain_model_in_a_scope_is_refused_and_stays_usable(loop, is_compiled):
    plain = compile_(sequential()) if is_compiled else sequential()
    with mirrored(2).scope():
        with pytest.raises(RuntimeError, match=f"`{loop}`.* 'model'.*attach"):
            LOOPS[loop](plain)
        np.testing.assert_equal(np.shape(plain(X[:3])), (3, 1))
    assert_plain(plain)
    if not is_compiled:
        compile_(plain)
    LOOPS[loop](plain)


def test_plain_model_in_a_callback_of_a_bound_one():
    plain, model = compile_(sequential()), bound(mirrored(2))
    expected = plain.predict(X, verbose=0)
    seen = []

    class Asking(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(plain.predict(X, verbose=0))

    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[Asking()])
    np.testing.assert_array_equal(seen, [expected])
    assert_plain(plain)


@pytest.mark.parametrize(
    ("where", "loop", "replicas"),
    combine(
        ["inside", "outside"],
        ["predict", "predict_on_batch"],
        [1, 2, 3, 8],
        every=3,
    ),
)
def test_predict_without_compile(where, loop, replicas):
    strategy = mirrored(replicas)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = sequential()
        if where == "inside":
            found = LOOPS[loop](model)
    if where == "outside":
        found = LOOPS[loop](model)
    keras.utils.set_random_seed(1)
    np.testing.assert_allclose(found, LOOPS[loop](sequential()), rtol=1e-6)
    assert_on_mesh(model, strategy)
    compile_(model)
    fit(model)
    assert_close(state_of(model), trained_plain(1))


class Writer(keras.Sequential):
    """Whose `predict` takes texts and calls Keras's."""

    def predict(self, texts, scale=1.0):
        rows = X[: len(texts)]
        return scale * super().predict(rows, batch_size=3, verbose=0)


@pytest.mark.parametrize("replicas", combine([1, 2, 3], every=2))
def test_a_predict_of_other_arguments_is_called_as_it_is(replicas):
    def check():
        found = model.predict(["a"] * 5, scale=2.0)
        np.testing.assert_allclose(found, 2 * np.asarray(model(X[:5])), 1e-5)

    with mirrored(replicas).scope():
        model = compile_(Writer([keras.Input((3,)), dense(1)]))
        check()
        fit(model)
        check()
    fit(model)
    check()
    assert_on_mesh(model, find_binding(model).owner)


_random = np.random.default_rng(0)
IMAGES = _random.random((37, 4)).astype("float32")
LABELS = IMAGES.sum(1, keepdims=True)
_GIVEN = {"batch_size": 8, "verbose": 0}


class OfImages(keras.Sequential):
    """Loops with arguments of its own, that call Keras's."""

    def fit(self, images, labels, times=2):
        return super().fit(images, labels, epochs=times, **_GIVEN)

    def evaluate(self, images, labels):
        return super().evaluate(images, labels, **_GIVEN)

    def predict(self, images):
        return super().predict(images, **_GIVEN)


def _images_seen(steps, is_built):
    """A function that does all with a new model, and what it found."""
    keras.utils.set_random_seed(3)
    inputs = [keras.Input((4,))] if is_built else []
    model = OfImages([*inputs, keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile("adam", "mse", steps_per_execution=steps)

    def act():
        losses = model.fit(IMAGES, LABELS).history["loss"]
        losses += [model.evaluate(IMAGES, LABELS)]
        return losses, model.predict(IMAGES)

    return act


@pytest.mark.parametrize(
    ("is_built", "replicas", "steps", "where"),
    cover((True, False), (1, 2, 3), (1, 2, 3), ("inside", "outside")),
)
def test_loops_of_other_arguments_train_as_on_one_device(
    is_built, replicas, steps, where
):
    with mirrored(replicas).scope():
        act = _images_seen(steps, is_built)
        found = act() if where == "inside" else None
    found = found or act()
    expected = _images_seen(steps, is_built)()
    for ours, plain in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)


def test_loops_of_other_arguments_are_refused_in_another_scope():
    model = bound(mirrored(2), lambda: Writer([keras.Input((3,)), dense(1)]))
    with mirrored(3).scope(), pytest.raises(RuntimeError, match="Mixing"):
        model.predict(["a"])


class PassingOn(keras.Sequential):
    def fit(self, x, y, **kwargs):
        return super().fit(x, y, **kwargs)


def test_what_a_class_does_not_name_is_as_in_keras(tmp_path):
    def losses(**more):
        model = PassingOn([keras.Input((4,)), dense(3), dense(1)])
        model.compile("sgd", "mse")
        np.random.seed(5)
        given = {"batch_size": 8, "epochs": 3, "verbose": 0} | more
        return model.fit(IMAGES, LABELS, **given).history["loss"]

    expected = losses()
    with mirrored(2).scope():
        np.testing.assert_allclose(losses(), expected, rtol=1e-5)
        # Going on: fit is told the first epoch.
        kept = {"callbacks": [ks.callbacks.Checkpoint(tmp_path)]}
        losses(epochs=2, **kept)
        found = losses(callbacks=[ks.callbacks.Checkpoint(tmp_path)])
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("value", [None, property(lambda model: 3)])
def test_a_predict_that_is_no_method_is_left_alone(value):
    kind = type("Odd", (keras.Sequential,), {"predict": value})
    model = bound(mirrored(2), lambda: kind([keras.Input((3,)), dense(1)]))
    fit(model)
    assert model.predict == (3 if isinstance(value, property) else None)


class Agent(keras.Sequential):
    """Whose `predict` is not Keras's."""

    def predict(self, state):
        return int(np.argmax(self(state[None])[0]))

    def predict_on_batch(self, x, scale=1.0):
        return scale * super().predict_on_batch(x)


def test_a_predict_of_the_users_own_is_called_as_it_is():
    strategy = mirrored(2)
    with strategy.scope():
        agent = Agent([keras.Input((3,)), dense(2)])
        assert agent.predict(X[0]) in (0, 1)
        found = agent.predict_on_batch(X, scale=2.0)
    np.testing.assert_allclose(found, 2 * np.asarray(agent(X)), 1e-6)
    assert_on_mesh(agent, strategy)
    assert agent.predict(X[0]) in (0, 1)


def test_a_class_called_with_a_model_that_is_not_bound():
    with mirrored(2).scope():
        model = sequential()
        with pytest.raises(RuntimeError, match="on the unbound model"):
            keras.Model.predict(model, X)


def test_attach_without_a_scope():
    strategy = mirrored(2)
    model = compile_(sequential())
    assert strategy.attach(model) is model
    assert rows_seen(fit, model) == 4
    assert_on_mesh(model, strategy)
    assert_close(state_of(model), trained_plain(1))


def test_attach_of_a_trained_model_keeps_its_state():
    model = compile_(sequential())
    fit(model)
    before = state_of(model)
    mirrored(2).attach(model)
    assert_close(state_of(model), before)
    fit(model)
    assert_close(state_of(model), trained_plain(2))


def test_attach_does_not_touch_the_arrays_a_user_holds():
    model = compile_(sequential())
    held = [v.value for v in model.variables]
    numbers = [np.array(a) for a in held]
    mirrored(2).attach(model)
    fit(model)
    assert_close([np.asarray(a) for a in held], numbers)


def test_attach_before_compile():
    strategy = mirrored(2)
    model = strategy.attach(sequential())
    assert rows_seen(LOOPS["predict"], model) == 4
    compile_(model)
    assert rows_seen(fit, model) == 4
    assert_on_mesh(model, strategy)


def test_attach_twice_is_attach_once():
    strategy = mirrored(2)
    model = bound(strategy)
    fit(model)
    strategy.attach(model)
    fit(model)
    assert_close(state_of(model), trained_plain(2))


def test_detach_gives_a_plain_model_with_its_state():
    strategy = mirrored(2)
    model = bound(strategy)
    fit(model)
    before = state_of(model)
    assert strategy.detach(model) is model
    assert_plain(model)
    assert model.fit.__func__ is keras.Sequential.fit
    assert_close(state_of(model), before)
    assert rows_seen(fit, model) == NOT_OURS
    # Momentum and the number of iterations went on where they were.
    assert_close(state_of(model), trained_plain(2))
    assert rows_seen(LOOPS["predict"], model) == NOT_OURS


def test_detached_model_can_go_to_another_strategy():
    first, second = mirrored(2), mirrored(4)
    model = bound(first)
    fit(model)
    first.detach(model)
    second.attach(model)
    assert rows_seen(fit, model) == 2
    assert_on_mesh(model, second)
    assert_close(state_of(model), trained_plain(2))


# Compiling, training, again.


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_recompiled(where):
    strategy = mirrored(2)
    model = bound(strategy)
    fit(model)
    if where == "inside":
        with strategy.scope():
            compile_(model)
    else:
        compile_(model)
    assert rows_seen(fit, model) == 4
    assert_on_mesh(model, strategy)
    plain = compile_(sequential())
    fit(plain)
    compile_(plain)
    fit(plain)
    assert_close(state_of(model), state_of(plain))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_built_outside_and_compiled_inside(is_compiled):
    strategy = mirrored(2)
    model = sequential()
    if is_compiled:
        fit(compile_(model))
    with strategy.scope():
        compile_(model)
    assert rows_seen(fit, model) == 4
    assert_on_mesh(model, strategy)
    assert_replicated(model)


def test_made_in_a_scope_and_compiled_after_it():
    strategy = mirrored(2)
    with strategy.scope():
        model = sequential()
    plain = sequential()
    compile_(model)
    assert find_binding(compile_(plain)) is None
    assert rows_seen(fit, model) == 4
    assert_on_mesh(model, strategy)
    assert_close(state_of(model), trained_plain(1))
    assert_plain(strategy.detach(model))
    assert find_binding(compile_(model)) is None


def test_a_model_made_in_a_scope_is_saved_and_copied_as_ever(tmp_path):
    with mirrored(2).scope():
        model = sequential()
    model.save(tmp_path / "model.keras")
    for other in (
        keras.saving.load_model(tmp_path / "model.keras"),
        keras.models.clone_model(model),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model),
    ):
        assert "compile" not in vars(other)
        assert find_binding(compile_(other)) is None


def test_optimizer_made_outside_of_the_scope():
    strategy = mirrored(2)
    optimizer = momentum()
    optimizer.build(sequential().trainable_variables)
    model = sequential()
    optimizer = momentum()
    with strategy.scope():
        model.compile(optimizer, "mse")
    fit(model)
    assert_on_mesh(model, strategy)


def deferred():
    layers = sequential().layers
    return keras.Sequential(layers, name="model")


def unbuilt():
    return keras.Sequential(
        [RowsSeen(name="model"), dense(4, activation="tanh"), dense(1, seed=2)],
        name="model",
    )


def functional():
    inputs = keras.Input((3,))
    hidden = dense(4, activation="tanh")(RowsSeen(name="model")(inputs))
    return keras.Model(inputs, dense(1, seed=2)(hidden), name="model")


def nested():
    inputs = keras.Input((3,))
    part = keras.Sequential([dense(4, activation="tanh")])
    hidden = part(RowsSeen(name="model")(inputs))
    return keras.Model(inputs, dense(1, seed=2)(hidden), name="model")


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__(name="model")
        self.rows = RowsSeen(name="model")
        self.hidden = dense(4, activation="tanh")
        self.out = dense(1, seed=2)

    def call(self, inputs):
        return self.out(self.hidden(self.rows(inputs)))


@pytest.mark.parametrize(
    "build",
    combine([deferred, unbuilt, functional, nested, Subclassed], every=2),
    ids=lambda build: build.__name__,
)
@pytest.mark.parametrize(
    "first", combine(["fit", "evaluate", "predict"], every=2)
)
def test_kinds_of_models(build, first):
    strategy = mirrored(2)
    model, plain = bound(strategy, build), compile_(build())
    assert rows_seen(LOOPS[first], model) == 4
    LOOPS[first](plain)
    assert_on_mesh(model, strategy)
    # What is built from the first batch is made in the scope, too.
    for variable in model.variables:
        assert strategy.extended.variable_created_in_scope(variable)
    if first != "fit":
        fit(model)
        fit(plain)
    weights, expected = model.get_weights(), plain.get_weights()
    assert_close(weights, expected)


def test_class_that_overrides_fit_and_passes_all_on():
    calls = []

    class Own(keras.Sequential):
        def fit(self, *args, **kwargs):
            calls.append(sorted(kwargs))
            return super().fit(*args, **kwargs)

    with mirrored(2).scope():
        model = compile_(Own(sequential().layers, name="model"))
    assert rows_seen(fit, model) == 4
    model.fit(X, Y, 8, 1, 0, shuffle=False)
    assert len(calls) == 2
    assert_close(state_of(model), trained_plain(2))


def test_clear_session_inside_the_scope():
    strategy = mirrored(2)
    with strategy.scope():
        keras.utils.clear_session()
        model = compile_(sequential())
    assert rows_seen(fit, model) == 4
    assert_on_mesh(model, strategy)
    assert keras.distribution.distribution() is None


def test_two_strategies_train_in_turns():
    first, second = bound(mirrored(2)), bound(mirrored(4))
    assert rows_seen(fit, first) == 4
    assert rows_seen(fit, second) == 2
    fit(first)
    fit(second)
    expected = trained_plain(2)
    assert_close(state_of(first), expected)
    assert_close(state_of(second), expected)


@pytest.mark.parametrize("order", [1, -1])
def test_variables_of_another_strategy_can_be_assigned(order):
    first, second = bound(mirrored(2)), bound(mirrored(4))
    fit(first)
    for mine, other in zip(second.weights, first.weights, strict=True):
        mine.assign(other)
    # A move to other devices shares the buffers on the common ones.
    for model in (first, second)[::order]:
        fit(model)
    assert_close(state_of(first), trained_plain(2))
    assert_replicated(second)


def test_arrays_that_were_assigned_stay_readable():
    model = bound(mirrored(2))
    plain = compile_(sequential())
    arrays = [jnp.asarray(w) for w in model.get_weights()]
    for _ in range(2):
        for variable, array in zip(model.weights, arrays, strict=True):
            variable.assign(array)
        fit(model)
    assert_close([np.asarray(a) for a in arrays], plain.get_weights())
    for mine, other in zip(model.weights, plain.weights, strict=True):
        mine.assign(other)
    fit(model)
    assert_close(plain.get_weights(), compile_(sequential()).get_weights())
    fit(plain)
    assert_close(state_of(plain), trained_plain(1))


# Saving and copying.


def test_loaded_in_a_scope_is_bound_and_outside_plain(tmp_path):
    strategy = mirrored(2)
    model = bound(strategy)
    fit(model)
    path = tmp_path / "model.keras"
    model.save(path)
    with strategy.scope():
        inside = keras.saving.load_model(path)
    outside = keras.saving.load_model(path)
    assert_plain(outside)
    assert rows_seen(fit, inside) == 4
    assert_on_mesh(inside, strategy)
    assert rows_seen(fit, outside) == NOT_OURS
    expected = trained_plain(2)
    assert_close(inside.get_weights(), expected[: len(inside.weights)])
    assert_close(state_of(inside), state_of(outside))
    strategy.attach(outside)
    assert rows_seen(fit, outside) == 4


def test_weights_files_go_both_ways(tmp_path):
    ours, plain = bound(mirrored(2)), compile_(sequential())
    fit(ours)
    fit(plain)
    ours.save_weights(tmp_path / "ours.weights.h5")
    plain.load_weights(tmp_path / "ours.weights.h5")
    assert_close(plain.get_weights(), ours.get_weights())
    plain.set_weights([w + 1 for w in plain.get_weights()])
    plain.save_weights(tmp_path / "plain.weights.h5")
    ours.load_weights(tmp_path / "plain.weights.h5")
    assert_close(ours.get_weights(), plain.get_weights())
    fit(ours)
    assert_replicated(ours)


def test_config_is_that_of_a_plain_model():
    ours, plain = bound(mirrored(2)), compile_(sequential())
    assert ours.get_config() == plain.get_config()
    assert ours.get_compile_config() == plain.get_compile_config()
    assert type(ours) is keras.Sequential


def test_cloned():
    strategy = mirrored(2)
    model = bound(strategy)
    clone = keras.models.clone_model(model)
    assert_plain(clone)
    assert rows_seen(fit, compile_(clone)) == NOT_OURS
    with strategy.scope():
        inside = compile_(keras.models.clone_model(model))
    assert rows_seen(fit, inside) == 4
    assert_on_mesh(inside, strategy)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
def test_copied(duplicate):
    model = bound(mirrored(2))
    fit(model)
    other = duplicate(model)
    assert_plain(other)
    assert_close(other.get_weights(), model.get_weights())
    assert rows_seen(fit, other) == NOT_OURS
    fit(model)
    assert_close(other.get_weights(), model.get_weights())


# Arrays that are shared or held.


def test_arrays_taken_before_training_stay_readable():
    model = bound(mirrored(2))
    for _ in range(2):
        held = [v.value for v in model_variables.all_variables(model)]
        views = [np.asarray(a) for a in held]
        numbers = [np.array(a) for a in held]
        fit(model, epochs=2)
        assert_close([np.asarray(a) for a in held], numbers)
        assert_close(views, numbers)


def test_target_network_that_shares_arrays():
    strategy = mirrored(2)
    source, target = bound(strategy), bound(strategy)
    fit(source)
    for mine, other in zip(target.weights, source.weights, strict=True):
        mine.assign(other)
    before = target.get_weights()
    fit(source)
    assert_close(target.get_weights(), before)
    fit(target)
    # Both had the same weights; their momenta differ.
    assert_replicated(target)
    assert_replicated(source)


def test_two_variables_of_one_model_that_share_an_array():
    def build():
        return keras.Sequential(
            [keras.Input((3,)), dense(3), dense(3, seed=2), dense(1, seed=3)]
        )

    def act(model):
        model.layers[1].kernel.assign(model.layers[0].kernel)
        fit(model)
        return model.get_weights()

    plain = compile_(build())
    plain.layers[1].kernel.assign(plain.layers[0].kernel.numpy())
    fit(plain)
    assert_close(act(bound(mirrored(2), build)), plain.get_weights())


# `trainable`.


def test_trainable_flipped_before_the_first_fit():
    models = [bound(mirrored(2)), compile_(sequential())]
    for model in models:
        kernel = model.get_layer("hidden").kernel.numpy()
        model.get_layer("hidden").trainable = False
        fit(model)
        np.testing.assert_array_equal(
            model.get_layer("hidden").kernel.numpy(), kernel
        )
    ours, plain = models
    assert_close(state_of(ours), state_of(plain))


def test_trainable_flipped_between_compiles():
    models = [bound(mirrored(2)), compile_(sequential())]
    for model in models:
        fit(model)
        model.get_layer("hidden").trainable = False
        compile_(model)
        fit(model)
        model.get_layer("hidden").trainable = True
        compile_(model)
        fit(model)
    ours, plain = models
    assert_close(state_of(ours), state_of(plain))


def test_trainable_flipped_after_fit_is_refused_as_in_keras():
    model, plain = bound(mirrored(2)), compile_(sequential())
    errors = []
    for each in (model, plain):
        fit(each)
        each.get_layer("hidden").trainable = False
        with pytest.raises(ValueError, match="trainable") as raised:
            fit(each)
        errors.append(str(raised.value).splitlines()[0])
    assert errors[0] == errors[1]
    # Keras has lost the plain model's weights; ours goes on.
    model.get_layer("hidden").trainable = True
    fit(model)
    assert_close(state_of(model), trained_plain(2))


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_is_compiled_once(count, caplog):
    with mirrored(count).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
    x = np.ones((8, 3), "float32")
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        model.fit(x, x[:, :1], batch_size=4, epochs=3, verbose=0)
        model.fit(x, x[:, :1], batch_size=4, verbose=0)
    lines = [
        text
        for text in caplog.messages
        if "XLA compilation" in text and "step" in text
    ]
    assert len(lines) == 1, lines


def test_a_model_knows_its_strategy():
    strategy = mirrored(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    assert model.distribute_strategy is strategy
    model.compile("sgd", "mse")
    assert model.distribute_strategy is strategy
    strategy.detach(model)
    assert not hasattr(model, "distribute_strategy")
    strategy.attach(model)
    assert model.distribute_strategy is strategy
    copy = keras.models.clone_model(model)
    assert not hasattr(copy, "distribute_strategy")


class WithOwnMetrics(keras.Model):
    """Makes its metric after Keras's `compile`, as keras-io's GANs do."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.tracker = keras.metrics.Mean(name="of_class")

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x, y, y_pred, *args, **kwargs):
        loss = keras.ops.mean((y - y_pred) ** 2)
        self.tracker.update_state(loss)
        return loss


def test_metrics_that_a_class_makes_after_kerass_compile_are_placed():
    strategy = mirrored(4)
    with strategy.scope():
        model = WithOwnMetrics()
        model.compile(optimizer="sgd")
    history = model.fit(X, Y, batch_size=8, verbose=0).history
    assert history["of_class"][0] > 0
    assert_on_mesh(model, strategy)
