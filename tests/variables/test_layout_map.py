"""Keys of a `layout_map` that match no variable."""

import warnings

import keras
import numpy as np
import pytest

import keras_strategies as ks
from tests.strategy.test_tpu import make_assignment
from tests.support.combinations import combine

X, Y = np.ones((4, 6), "float32"), np.ones((4, 4), "float32")
KERNEL = ".*dense_a/kernel"
TYPO = ".*dens_a/kernel"

USES = {
    "fit": lambda model, _: model.fit(X, Y, verbose=0),
    "evaluate": lambda model, _: model.evaluate(X, Y, verbose=0),
    "predict": lambda model, _: model.predict(X, verbose=0),
    "train_on_batch": lambda model, _: model.train_on_batch(X, Y),
    "test_on_batch": lambda model, _: model.test_on_batch(X, Y),
    "predict_on_batch": lambda model, _: model.predict_on_batch(X),
    "compile_step": lambda model, s: s.compile_step(model, (X, Y)),
    "run": lambda model, s: s.run(model, args=(ks.Mirrored(X),)),
}
each_use = pytest.mark.parametrize("use", USES)


def strategy_of(*keys):
    return ks.TPUStrategy(
        device_assignment=make_assignment(2, 2),
        layout_map={key: (None, "model") for key in keys},
    )


def make_model(strategy, name="dense_a", **kwargs):
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(4, name=name)], **kwargs
        )
        model.compile("adam", "mse")
    return model


def warned(act):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(w.message) for w in caught if "layout_map" in str(w.message)]


@pytest.mark.parametrize("use", combine(USES, every=2))
def test_a_key_that_matches_nothing_is_named_once(use):
    strategy = strategy_of(KERNEL, TYPO)
    model = make_model(strategy, name="dense_a")
    (message,) = warned(lambda: USES[use](model, strategy))
    assert TYPO in message
    assert "dense_a/kernel'" in message.partition(TYPO)[2]
    assert KERNEL not in message
    assert warned(lambda: USES["fit"](model, strategy)) == []


@each_use
def test_keys_of_which_none_matches_are_refused_before_a_step(use):
    strategy = strategy_of(TYPO)
    model = make_model(strategy)
    weights = model.get_weights()
    with pytest.raises(ValueError, match="no variable would be") as caught:
        USES[use](model, strategy)
    assert "dense_a/kernel'" in str(caught.value)
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)


def test_a_key_may_match_another_model_of_the_strategy():
    strategy = strategy_of(KERNEL, ".*dense_b/kernel")
    first, second = (make_model(strategy, name=f"dense_{n}") for n in "ab")
    assert warned(lambda: USES["fit"](first, strategy)) == []
    assert warned(lambda: USES["fit"](second, strategy)) == []


def test_programs_without_weights_need_no_match():
    strategy = strategy_of(TYPO)
    with strategy.scope():
        count = keras.Variable(0, trainable=False)
    strategy.run(lambda: count.assign_add(1))
    assert int(count) == 1


def test_a_layout_map_of_replicas_with_one_core_is_not_looked_at():
    strategy = ks.TPUStrategy(
        device_assignment=make_assignment(1, 2),
        layout_map={TYPO: (None, "model")},
    )
    model = make_model(strategy)
    assert warned(lambda: USES["fit"](model, strategy)) == []
