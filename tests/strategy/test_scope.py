"""Scopes: what is current, what is refused, what is left behind: nothing."""

import sys
import threading
import types

import jax
import keras
import numpy as np
import pytest
from jax.sharding import AxisType
from keras.src.losses import loss as loss_module

import keras_strategies as ks
from keras_strategies.fit import scope_hooks
from keras_strategies.fit.binding import find_binding
from keras_strategies.keras_bridge.keras_names import TRAINER
from tests.support.combinations import combine
from tests.support.plain_keras import mirrored
from tests.support.rows_seen import (
    RowsSeen,
    X,
    Y,
    assert_close,
    compile_,
    fit,
    rows_seen,
    sequential,
    state_of,
    trained_plain,
)

LOOPS_OWNER = scope_hooks.find_loop_owner("fit")


def places_of_ours():
    """Where `keras.src` holds a function that this project wrote."""
    found = []
    for name, module in list(sys.modules.items()):
        if not name.startswith("keras.src") or module is None:
            continue
        for key, value in list(vars(module).items()):
            if _is_ours(value):
                found.append(f"{name}.{key}")
            if isinstance(value, type) and value.__module__ == name:
                found += [
                    f"{name}.{key}.{attribute}"
                    for attribute, member in list(vars(value).items())
                    if _is_ours(member)
                ]
    return sorted(set(found))


def _is_ours(value):
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    if not isinstance(value, types.FunctionType):
        return False
    return "keras_strategies/" in value.__code__.co_filename


def hooked_attributes():
    return (
        TRAINER.__init__,
        TRAINER.compile,
        keras.layers.BatchNormalization.__init__,
        keras.Variable.__init__,
        keras.Variable.assign,
        keras.StatelessScope.get_current_value,
        loss_module.reduce_values,
        loss_module.apply_mask,
        loss_module.Loss.__call__,
        keras.optimizers.Optimizer.apply,
        keras.optimizers.Optimizer.stateless_apply,
        keras.optimizers.Optimizer.scale_loss,
        keras.optimizers.Optimizer.add_variable_from_reference,
        keras.optimizers.LossScaleOptimizer.stateless_apply,
        keras.metrics.Mean.update_state,
        keras.metrics.Mean.result,
        keras.metrics.Metric.reset_state,
        keras.Model.fit,
    )


IN_SCOPE = [
    f"keras.src.{place}"
    for place in (
        "backend.Variable.__init__",
        *sorted(
            f"backend.jax.trainer.{LOOPS_OWNER.__name__}.{loop}"
            for loop in scope_hooks.LOOPS
        ),
        "layers.normalization.batch_normalization.BatchNormalization.__init__",
        "optimizers.base_optimizer.BaseOptimizer.add_variable_from_reference",
        f"trainers.trainer.{TRAINER.__name__}.__init__",
        f"trainers.trainer.{TRAINER.__name__}.compile",
    )
]
BEFORE = hooked_attributes()


def assert_nothing_is_left():
    assert not ks.has_strategy()
    assert keras.distribution.distribution() is None
    assert places_of_ours() == []
    for now, before in zip(hooked_attributes(), BEFORE, strict=True):
        assert now is before


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    assert_nothing_is_left()


# Nothing is left.


def test_the_search_finds_what_an_open_scope_holds():
    with mirrored(2).scope():
        places = places_of_ours()
    assert places == IN_SCOPE


def test_import_holds_nothing():
    assert_nothing_is_left()


def test_exception_in_a_scope():
    def fails():
        with mirrored(2).scope():
            sequential()
            raise KeyError

    with pytest.raises(KeyError):
        fails()


def test_fit_in_a_scope_and_after_it():
    with mirrored(2).scope():
        model = compile_(sequential())
        fit(model)
        assert len(places_of_ours()) == len(IN_SCOPE)
    fit(model)
    model.predict(X, verbose=0)


@pytest.mark.parametrize("is_inside", combine([False, True], every=2))
def test_exception_while_a_step_is_traced(is_inside):
    failed = []

    def failing(y_true, y_pred):
        # First for a replica's rows, then for the batch's.
        if isinstance(y_pred, jax.core.Tracer) and (
            y_pred.shape[0] == 4 or failed
        ):
            failed.append(y_pred.shape[0])
            raise ArithmeticError("in the trace")
        return keras.ops.mean(keras.ops.square(y_pred), axis=-1)

    with mirrored(2).scope():
        model = sequential()
        model.compile("sgd", failing)
        weights = model.get_weights()
        if is_inside:
            with pytest.raises(ArithmeticError, match="in the trace"):
                fit(model)
            assert len(places_of_ours()) == len(IN_SCOPE)
    with pytest.raises(ArithmeticError, match="in the trace"):
        fit(model)
    assert failed[:2] == [4, 8]
    assert_nothing_is_left()
    assert_close(model.get_weights(), weights)
    compile_(model)
    fit(model)


def test_hooks_are_there_only_while_a_step_is_traced():
    places = []

    class Looks(keras.Sequential):
        def train_step(self, state, data):
            places.append(places_of_ours())
            return super().train_step(state, data)

    with mirrored(2).scope():
        model = compile_(Looks(sequential().layers))
    fit(model)
    # A user's step is traced again, to be compared.
    assert len(places) == 2
    for place in places:
        assert "keras.src.losses.loss.reduce_values" in place


# Nesting.


def _patched_fit(was):
    def fit(self, *args, **kwargs):
        return was(self, *args, **kwargs)

    return fit


@pytest.mark.parametrize(
    "owner", combine([keras.Model, LOOPS_OWNER, TRAINER], every=2)
)
def test_what_others_patch_while_a_scope_is_open_is_theirs(owner):
    name = "compile" if owner is TRAINER else "fit"
    before = vars(owner).get(name)
    try:
        with mirrored(2).scope():
            theirs = _patched_fit(getattr(owner, name))
            setattr(owner, name, theirs)
        assert vars(owner)[name] is theirs
        model = compile_(sequential())
        assert find_binding(model) is None
        fit(model)
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
    with mirrored(2).scope():
        fit(compile_(sequential()))


def test_what_others_have_patched_may_go_while_a_scope_is_open():
    theirs = _patched_fit(keras.Model.fit)
    keras.Model.fit = theirs
    with mirrored(2).scope():
        del keras.Model.fit
        fit(compile_(sequential()))
    assert "fit" not in vars(keras.Model)


@pytest.mark.parametrize("is_loaded", [True, False])
@pytest.mark.parametrize(
    "strategy", [ks.OneDeviceStrategy("cpu:0"), mirrored(3)]
)
def test_what_others_have_patched_before_trains_in_a_scope(
    strategy, is_loaded, tmp_path
):
    with mirrored(2).scope():
        saved = compile_(sequential())
    fit(saved)
    saved.save(tmp_path / "model.keras")

    def train():
        keras.utils.set_random_seed(1)
        with strategy.scope():
            if is_loaded:
                model = keras.models.load_model(tmp_path / "model.keras")
            else:
                model = compile_(keras.models.clone_model(saved))
                model.set_weights(saved.get_weights())
            for _ in range(2):
                model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
                model.evaluate(X, Y, verbose=0)
        return model.get_weights()

    expected = train()
    keras.Model.fit = _patched_fit(keras.Model.fit)
    try:
        found = train()
    finally:
        del keras.Model.fit
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_nested_scopes_of_one_strategy():
    strategy = mirrored(2)
    with strategy.scope() as outer:
        with strategy.scope() as inner:
            assert outer is inner is strategy is ks.get_strategy()
        assert ks.get_strategy() is strategy
        model = compile_(sequential())
    assert rows_seen(fit, model) == 4


def test_scope_object_entered_again():
    strategy = mirrored(2)
    scope = strategy.scope()
    for _ in range(2):
        with scope, scope:
            assert ks.get_strategy() is strategy
            model = compile_(sequential())
        assert not ks.has_strategy()
    assert find_binding(model).owner is strategy


def test_scope_of_another_strategy_inside_is_refused():
    outer, inner = mirrored(2), mirrored(3)
    with outer.scope():
        with pytest.raises(RuntimeError, match="Mixing"), inner.scope():
            pytest.fail("entered")
        assert ks.get_strategy() is outer
        model = compile_(sequential())
    assert rows_seen(fit, model) == 4


def test_variables_of_another_strategy_in_the_default_scope_are_refused():
    strategy = mirrored(2)
    default = ks.get_strategy().scope()
    for _ in range(2):
        with default, default, strategy.scope():
            with pytest.raises(RuntimeError, match="Mixing different"):
                keras.Variable(1.0)
            with pytest.raises(RuntimeError, match="Mixing different"):
                sequential()
    with strategy.scope():
        keras.Variable(1.0)


def same(next_creator, **kwargs):
    return next_creator(**kwargs)


def test_leaving_a_scope_while_one_in_it_is_open_is_refused():
    strategy = mirrored(1)
    scope, inner = strategy.scope(), strategy.scope()
    scope.__enter__()
    for other in (ks.variable_creator_scope(same), inner):
        with other, pytest.raises(RuntimeError, match="nesting error"):
            scope.__exit__(None, None, None)
    scope.__exit__(None, None, None)


# The current strategy.


def test_default_strategy():
    default = ks.get_strategy()
    assert default is ks.get_strategy()
    assert isinstance(default, ks.Strategy)
    assert default.num_replicas_in_sync == 1
    assert not ks.has_strategy()
    with default.scope():
        assert not ks.has_strategy()
        model = compile_(sequential())
    assert find_binding(model) is None
    seen = []
    ks.get_replica_context().merge_call(
        lambda strategy: seen.append((strategy, ks.has_strategy()))
    )
    with ks.get_replica_context():
        assert not ks.has_strategy()
    assert seen == [(default, False)]


def test_scope_of_the_default_strategy_inside_another_is_refused():
    default = ks.get_strategy()
    with (
        mirrored(2).scope(),
        pytest.raises(RuntimeError, match="Mixing"),
        default.scope(),
    ):
        pytest.fail("entered")


def test_set_strategy_holds_until_it_is_left():
    first, second = mirrored(2), mirrored(3)
    ks.experimental_set_strategy(first)
    try:
        assert ks.has_strategy()
        assert ks.get_strategy() is first
        model = compile_(sequential())
        with first.scope():
            assert ks.get_strategy() is first
        with pytest.raises(RuntimeError, match="Mixing"), second.scope():
            pytest.fail("entered")
        ks.experimental_set_strategy(second)
        assert ks.get_strategy() is second
    finally:
        ks.experimental_set_strategy(None)
    assert not ks.has_strategy()
    assert rows_seen(fit, model) == 4


def test_set_strategy_twice_is_left_at_once():
    strategy = mirrored(2)
    for _ in range(2):
        ks.experimental_set_strategy(strategy)
        assert ks.get_strategy() is strategy
    ks.experimental_set_strategy(None)
    ks.experimental_set_strategy(None)
    assert not ks.has_strategy()


def test_setting_the_default_strategy_enters_none():
    ks.experimental_set_strategy(ks.get_strategy())
    assert not ks.has_strategy()


@pytest.mark.parametrize("is_set_before", [False, True])
def test_set_strategy_is_refused_in_a_scope(is_set_before):
    strategy = mirrored(2)
    if is_set_before:
        ks.experimental_set_strategy(strategy)
    try:
        for given in (mirrored(3), strategy, None):
            with (
                strategy.scope(),
                pytest.raises(RuntimeError, match="must not be called"),
            ):
                ks.experimental_set_strategy(given)
        assert ks.has_strategy() is is_set_before
    finally:
        ks.experimental_set_strategy(None)


# Threads.


def in_thread(work):
    results, errors = [], []

    def run():
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results, errors


def test_new_thread_sees_no_strategy():
    strategy = mirrored(2)
    with strategy.scope():
        thread, results, errors = in_thread(
            lambda: (ks.has_strategy(), ks.get_strategy())
        )
        thread.join()
    assert errors == []
    assert results == [(False, ks.get_strategy())]


def test_scope_of_another_strategy_in_another_thread():
    def work():
        with mirrored(3).scope() as strategy:
            assert ks.get_strategy() is strategy
            model = compile_(sequential("other"))
        return find_binding(model).owner.num_replicas_in_sync

    with mirrored(2).scope():
        thread, results, errors = in_thread(work)
        thread.join()
        assert ks.get_strategy().num_replicas_in_sync == 2
        assert len(places_of_ours()) == len(IN_SCOPE)
    assert errors == []
    assert results == [3]


def test_two_threads_train_models_of_two_strategies_at_once():
    ready = threading.Barrier(2, timeout=60)

    def train(replicas):
        def work():
            with mirrored(replicas).scope():
                model = compile_(sequential(f"model{replicas}"))
            ready.wait()
            rows = rows_seen_by_name(model)
            fit(model, epochs=2)
            return rows, state_of(model)

        return work

    def rows_seen_by_name(model):
        fit(model)
        return min(n for name, n in RowsSeen.noted if name == model.name)

    threads = [in_thread(train(replicas)) for replicas in (2, 4)]
    for thread, _, _ in threads:
        thread.join(120)
        assert not thread.is_alive()
    expected = trained_plain(3)
    for (_, results, errors), rows in zip(threads, (4, 2), strict=True):
        assert errors == []
        assert results[0][0] == rows
        assert_close(results[0][1], expected)


def test_bound_model_trained_in_another_thread():
    with mirrored(2).scope():
        model = compile_(sequential())
        thread, results, errors = in_thread(lambda: rows_seen(fit, model))
        thread.join()
    assert errors == []
    assert results == [4]
    assert all(np.isfinite(w).all() for w in model.get_weights())


def compile_dense(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_set_by_the_user_is_refused(kind):
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    model = compile_dense(strategy)
    x, y = np.zeros((4, 3), "float32"), np.zeros((4, 2), "float32")
    model.fit(x, y, verbose=0)
    calls = (
        lambda: model.fit(x, y, verbose=0),
        lambda: model.evaluate(x, y, verbose=0),
        lambda: model.predict(x, verbose=0),
        lambda: model.train_on_batch(x, y),
        lambda: strategy.run(lambda: None),
        lambda: compile_dense(strategy),
    )
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    message = r"Received: a mesh of shape \{'x': 4\}, set by `jax.set_mesh`"
    for call in calls:
        with jax.set_mesh(mesh), pytest.raises(RuntimeError, match=message):
            call()
        call()


def test_a_mesh_set_in_a_scope_is_refused():
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = compile_dense(strategy)
        with (
            jax.set_mesh(jax.make_mesh((4,), ("x",))),
            pytest.raises(RuntimeError, match="Leave its block"),
        ):
            model.fit(np.zeros((4, 3)), np.zeros((4, 2)), verbose=0)
