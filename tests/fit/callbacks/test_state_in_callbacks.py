"""A callback may read and write the model's state at any time.

Keras lends the state to the running loop; a callback that asks for the model
gets it back. Everything here is compared with plain Keras on one device.
"""

import keras
import numpy as np
import pytest

from keras_strategies.fit.binding import find_binding
from tests.fit.callbacks.test_callbacks import (
    MOMENTUM,
    MOMENTUM_3,
    X_VAL,
    Y_VAL,
    build,
    check,
    fit,
    momentum,
)
from tests.support.combinations import combine
from tests.support.plain_keras import mirrored, on_batch, run_both


def is_bound(model):
    return find_binding(model) is not None


class OnBatch(keras.callbacks.Callback):
    """Does `act(model, batch)` after every train batch; keeps the results."""

    def __init__(self, act):
        super().__init__()
        self.act = act
        self.results = []

    def on_train_batch_end(self, batch, logs=None):
        self.results.append(self.act(self.model, batch))


class OnEpoch(OnBatch):
    """The same after every epoch."""

    on_train_batch_end = keras.callbacks.Callback.on_train_batch_end

    def on_epoch_end(self, epoch, logs=None):
        self.results.append(self.act(self.model, epoch))


def reads_weights(model, index):
    return model.get_weights()


def reads_slots(model, index):
    return [v.numpy() for v in model.optimizer.variables]


def reads_metrics(model, index):
    return model.get_metrics_result()


def sets_weights(model, index):
    if index == 2:
        model.set_weights([w * 0.5 for w in model.get_weights()])


def assigns_one_weight(model, index):
    model.layers[0].bias.assign_add(np.full(4, 0.1, "float32"))


def changes_learning_rate(model, index):
    model.optimizer.learning_rate = 0.01 * (index + 1)
    return model.optimizer.iterations.numpy()


def evaluates(model, index):
    return model.evaluate(X_VAL, Y_VAL, batch_size=4, verbose=0)


def predicts(model, index):
    return model.predict(X_VAL, batch_size=4, verbose=0)


def predicts_on_batch(model, index):
    return on_batch(model, "predict_on_batch", X_VAL)


def evaluates_on_batch(model, index):
    return on_batch(model, "test_on_batch", X_VAL, Y_VAL)


def trains_on_batch(model, index):
    return on_batch(model, "train_on_batch", X_VAL, Y_VAL)


def calls_the_model(model, index):
    return np.asarray(model(X_VAL))


def resets_metrics(model, index):
    model.reset_metrics()


ACTS = [
    *(reads_weights, reads_slots, reads_metrics, sets_weights),
    *(assigns_one_weight, changes_learning_rate, evaluates, predicts),
    *(predicts_on_batch, evaluates_on_batch, trains_on_batch),
    *(calls_the_model, resets_metrics),
]
acting = pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)


def run_with(kind, act):
    def run(model):
        acting = kind(act)
        facts, numbers = fit(model, acting, epochs=2)
        return facts, (numbers, acting.results)

    return run


@pytest.mark.parametrize(
    "compile_args", combine([MOMENTUM, MOMENTUM_3], every=6)
)
@acting
def test_after_a_batch(act, compile_args):
    check(run_with(OnBatch, act), compile_args)


@pytest.mark.parametrize(
    "act", combine(ACTS, every=2), ids=lambda act: act.__name__
)
def test_after_an_epoch(act):
    check(run_with(OnEpoch, act), replicas=3)


@pytest.mark.parametrize(
    "act",
    combine([sets_weights, evaluates], every=2),
    ids=lambda act: act.__name__,
)
def test_after_a_batch_on_eight_replicas(act):
    check(run_with(OnBatch, act), replicas=8)


@pytest.mark.parametrize("compile_args", [MOMENTUM, MOMENTUM_3])
@pytest.mark.parametrize("replicas", [2, 3])
def test_stopping_within_an_epoch(compile_args, replicas):
    def stops(model, batch):
        if batch >= 1:
            model.stop_training = True

    (events, epochs, _), _ = check(
        run_with(OnBatch, stops), compile_args, replicas=replicas
    )
    assert epochs == [0]
    assert events[-1][0] == "on_train_end"


def test_training_goes_on_after_a_stop():
    def act(model):
        def stops(model, batch):
            model.stop_training = True

        first = run_with(OnBatch, stops)(model)
        second = fit(model)
        return (first[0], second[0]), (first[1], second[1])

    check(act)


@pytest.mark.parametrize("compile_args", [MOMENTUM, MOMENTUM_3])
@pytest.mark.parametrize("replicas", [2, 3])
def test_arrays_taken_within_an_epoch_stay_readable(compile_args, replicas):
    def act(model):
        held, copies = [], []

        def holds(model, batch):
            arrays = [v.value for v in model.variables]
            held.append(arrays)
            copies.append([np.array(a) for a in arrays])

        fit(model, OnBatch(holds))
        return held, copies

    (_, plain_copies), (held, copies) = (
        result
        for result, _ in run_both(build, act, replicas=replicas, **compile_args)
    )
    for arrays, values, plain in zip(held, copies, plain_copies, strict=True):
        for array, value, other in zip(arrays, values, plain, strict=True):
            np.testing.assert_array_equal(np.asarray(array), value)
            np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
def test_numpy_views_taken_within_an_epoch_keep_their_numbers(replicas):
    views, copies = [], []

    def views_weights(model, batch):
        for variable in model.trainable_variables:
            view = np.asarray(variable.value)
            views.append(view)
            copies.append(view.copy())

    with mirrored(replicas).scope():
        model = build()
        model.compile(momentum(), "mse")
    fit(model, OnBatch(views_weights), validation_data=None)
    for view, copy in zip(views, copies, strict=True):
        np.testing.assert_array_equal(view, copy)


def test_arrays_can_be_set_back_later():
    def act(model):
        held = []

        def holds(model, batch):
            variables = model.trainable_variables
            if batch == 0 and is_bound(model):
                held[:] = [v.value for v in variables]
            elif batch == 0:
                # Plain Keras lets its next step delete arrays one holds.
                held[:] = [v.numpy() for v in variables]
            if batch == 3:
                for variable, array in zip(variables, held, strict=True):
                    variable.assign(array)

        return fit(model, OnBatch(holds))

    check(act)


def test_target_network_updated_in_a_callback():
    def act(model):
        target = build()
        if is_bound(model):
            find_binding(model).owner.attach(target)

        def copies(model, batch):
            # `assign` shares the buffer between the two variables, which
            # plain Keras does not survive.
            for mine, other in zip(
                target.variables, model.trainable_variables, strict=True
            ):
                mine.assign(other if is_bound(model) else other.numpy())
            return target.predict(X_VAL, batch_size=4, verbose=0)

        copying = OnBatch(copies)
        facts, numbers = fit(model, copying)
        return facts, (numbers, copying.results, target.get_weights())

    check(act)


def test_exception_in_a_callback_keeps_the_weights_of_its_batch():
    def act(model):
        def raises(model, batch):
            if batch == 2:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            fit(model, OnBatch(raises))
        weights = model.get_weights()
        return fit(model)[0], (weights, model.get_weights())

    check(act)


def test_state_written_before_training_is_used():
    class SetsUp(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.set_weights(
                [np.full_like(w, 0.1) for w in self.model.get_weights()]
            )

        def on_epoch_begin(self, epoch, logs=None):
            self.model.layers[0].bias.assign(np.full(4, epoch, "float32"))

        def on_train_batch_begin(self, batch, logs=None):
            self.model.layers[1].bias.assign([0.25 * batch])

    check(lambda model: fit(model, SetsUp()))
