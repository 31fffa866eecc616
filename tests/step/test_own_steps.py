"""Own train steps, losses and metrics: one device's numbers, or an error."""

import functools
import warnings

import jax
import keras
import numpy as np
import pytest
from keras import ops
from keras.src.losses.losses import LossFunctionWrapper

import keras_strategies as ks
from keras_strategies.fit.binding import find_binding
from keras_strategies.step.lower_step import lower_step
from keras_strategies.step.record import StepTracer
from tests.support.combinations import combine, few
from tests.support.models import chain, compiled_in
from tests.support.plain_keras import (
    assert_same,
    check_same,
    dense,
    mirrored,
    run_both,
)

_random = np.random.default_rng(5)
X = _random.normal(size=(44, 3)).astype("float32")
Y = _random.normal(size=(44, 2)).astype("float32")
SIGNS = np.where(_random.uniform(size=(44, 2)) < 0.4, 0, -1).astype("float32")
ROW_SCALARS = _random.uniform(size=44).astype("float32")
WEIGHTS = _random.uniform(size=44).astype("float32")


def train(model, x=X, y=Y, sample_weight=None, batch_size=16):
    """Two epochs of even and uneven batches, then an evaluation."""
    options = {"sample_weight": sample_weight, "batch_size": batch_size}
    history = model.fit(x, y, epochs=2, shuffle=False, verbose=0, **options)
    result = model.evaluate(x, y, return_dict=True, verbose=0, **options)
    return history.history, result


def two_outputs(kind=keras.Sequential):
    return kind([keras.Input((3,)), dense(2)])


def check(build, act=train, **options):
    """`check_same` of models that are compiled with "sgd" and "mse"."""
    check_same(build, act, **{"optimizer": "sgd", "loss": "mse"} | options)


class OwnStep(keras.Model):
    """A model whose step is written in `update`, and its logs in `logs`."""

    def __init__(self):
        super().__init__()
        self.layer = dense(2)
        self.layer.build((None, 3))
        self.tracker = keras.metrics.Mean(name="tracker")
        self.built = True

    def call(self, x):
        return self.layer(x)

    def loss_of(self, x, y):
        return ops.mean(ops.square(self(x) - y))

    def logs(self, x, y, loss):
        raise NotImplementedError

    def apply(self, grads, weights, state, loss):
        return self.optimizer.stateless_apply(state, grads, weights)

    def train_step(self, state, data):
        weights, others, slots, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

        def loss_of(values):
            mapping = zip(self.trainable_variables, values, strict=True)
            with keras.StatelessScope(state_mapping=mapping):
                return self.loss_of(x, y)

        loss, grads = jax.value_and_grad(loss_of)(weights)
        new_weights, slots = self.apply(grads, weights, slots, loss)
        variables = (*self.trainable_variables, *self.metrics_variables)
        mapping = zip(variables, (*weights, *metrics), strict=True)
        with keras.StatelessScope(state_mapping=mapping) as scope:
            logs = self.logs(x, y, loss)
        metrics = [scope.get_current_value(v) for v in self.metrics_variables]
        return logs, (new_weights, others, slots, metrics)


def fit_own(model):
    history = model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return history.history


def check_own(model_class, *, warns=None, replicas=2, **compile_args):
    """Asserts one device's numbers; and one warning, if any is due."""
    compile_args = {"optimizer": "sgd"} | compile_args
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain, ours = run_both(
            model_class, fit_own, replicas=replicas, **compile_args
        )
    assert_same(plain, ours)
    told = [w for w in caught if "global batch" in str(w.message)]
    assert len(told) == (1 if warns else 0)
    assert not warns or warns in str(told[0].message)


# Metrics that a step reads.


class Perplexity(OwnStep):
    def logs(self, x, y, loss):
        # Of rows, so that the replicas' own results differ much.
        self.tracker.update_state(ops.mean(ops.square(self(x) - y), axis=1))
        return {"perplexity": ops.exp(self.tracker.result())}


class ReadBetween(OwnStep):
    def logs(self, x, y, loss):
        error = ops.mean(ops.square(self(x) - y), axis=1)
        self.tracker.update_state(error)
        between = self.tracker.result()
        self.tracker.update_state(2 * error)
        return {"between": between, "after": self.tracker.result()}


class OneBatch(OwnStep):
    def logs(self, x, y, loss):
        self.tracker.reset_state()
        self.tracker.update_state(ops.mean(ops.square(self(x) - y), axis=1))
        return {"of_batch": self.tracker.result()}


class ResetOnly(OwnStep):
    def logs(self, x, y, loss):
        self.tracker.update_state(ops.mean(x, axis=1))
        self.tracker.reset_state()
        return {"nothing": self.tracker.result()}


@pytest.mark.parametrize(
    ("model_class", "replicas"),
    [
        (Perplexity, 2),
        (ReadBetween, 8),
        (OneBatch, 2),
        (ResetOnly, 8),
        pytest.param(Perplexity, 8, marks=pytest.mark.slow),
        pytest.param(ReadBetween, 2, marks=pytest.mark.slow),
        pytest.param(OneBatch, 8, marks=pytest.mark.slow),
        pytest.param(ResetOnly, 2, marks=pytest.mark.slow),
    ],
)
def test_results_that_a_step_computes_with(model_class, replicas):
    check_own(model_class, replicas=replicas)


class FromLogs(keras.Sequential):
    def get_metrics_result(self):
        logs = super().get_metrics_result()
        return logs | {"root": ops.sqrt(logs["loss"])}


def test_logs_computed_from_results():
    check(lambda: two_outputs(FromLogs))


def test_results_are_reduced_with_the_rest_of_the_step():
    """One collective: the gradients and all that metrics added."""
    strategy = mirrored(2)
    model = compiled_in(
        strategy, two_outputs, "sgd", "mse", metrics=["mae", "mape"]
    )
    model.fit(X[:16], Y[:16], batch_size=16, verbose=0)
    build = find_binding(model).build_for_shapes
    batch = X[:16], Y[:16]
    text = lower_step(model, strategy.mesh, "train", batch, build).as_text()
    assert text.count("stablehlo.all_reduce") == 1


# Metrics fed with what has no rows.


class SumOfScalar(OwnStep):
    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Sum(name="tracker")

    def logs(self, x, y, loss):
        self.tracker.update_state(ops.sum(ops.abs(x)))
        return {"sum": self.tracker.result()}


class CountOfRows(SumOfScalar):
    def logs(self, x, y, loss):
        self.tracker.update_state(x.shape[0])
        return {"rows": self.tracker.result()}


class SumOfFeatures(SumOfScalar):
    def logs(self, x, y, loss):
        # Three features, perhaps three rows.
        self.tracker.update_state(ops.mean(x, axis=0))
        return {"features": self.tracker.result()}


class CountOfSteps(SumOfScalar):
    def logs(self, x, y, loss):
        self.tracker.update_state(1)
        return {"steps": self.tracker.result()}


class MeanOfLoss(OwnStep):
    def logs(self, x, y, loss):
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


@pytest.mark.parametrize(
    ("model_class", "replicas", "steps"),
    [
        (SumOfScalar, 2, 1),
        (CountOfRows, 2, 1),
        (CountOfRows, 8, 2),
        (SumOfFeatures, 2, 1),
        (SumOfFeatures, 8, 1),
    ],
)
def test_sums_of_what_has_no_rows_are_exact(model_class, replicas, steps):
    check_own(
        model_class,
        warns="metric 'tracker' (Sum)",
        replicas=replicas,
        steps_per_execution=steps,
    )


class ConstantWeight(OwnStep):
    def logs(self, x, y, loss):
        self.tracker.update_state(loss, sample_weight=0.5)
        return {"mean": self.tracker.result()}


@pytest.mark.parametrize(
    "model_class", [CountOfSteps, MeanOfLoss, ConstantWeight]
)
def test_constants_and_mean_losses_are_mapped_over_replicas(model_class):
    check_own(model_class)


class TwoKinds(SumOfScalar):
    def logs(self, x, y, loss):
        self.tracker.update_state(x[:, 0])
        self.tracker.update_state(0.5)
        return {"sum": self.tracker.result()}


class WeightedScalar(OwnStep):
    def logs(self, x, y, loss):
        self.tracker.update_state(loss, sample_weight=ops.sum(x[:, 0] ** 2))
        return {"mean": self.tracker.result()}


@pytest.mark.parametrize("model_class", [TwoKinds, WeightedScalar])
def test_updates_of_which_no_rule_is_sure_are_exact(model_class):
    check_own(model_class, warns="metric 'tracker'")


class Follows(OwnStep):
    """Writes a weight by hand; the optimizer gets no gradient for it."""

    def __init__(self):
        super().__init__()
        self.center = self.add_weight(shape=(3,), initializer="zeros")

    def train_step(self, state, data):
        weights, others, slots, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        places = [v is self.center for v in self.trainable_variables]

        def loss_of(weights):
            outputs, _ = self.stateless_call(weights, others, x)
            return ops.mean(ops.square(outputs - y))

        loss, grads = jax.value_and_grad(loss_of)(weights)
        grads = [None if p else g for g, p in zip(grads, places, strict=True)]
        weights = [
            w + ops.mean(x, 0) if p else w
            for w, p in zip(weights, places, strict=True)
        ]
        weights, slots = self.optimizer.stateless_apply(slots, grads, weights)
        return {"loss": loss}, (weights, others, slots, metrics)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_an_optimizer_does_not_make_values_equal_that_it_leaves():
    check(Follows)


class Tracks(keras.Sequential):
    """A marked `compute_loss` that updates a metric."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = keras.metrics.Sum(name="seen")

    @ks.global_batch_loss
    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        self.seen.update_state(ops.abs(y[:, 0]))
        return ops.sum(ops.square(y - y_pred)) / ops.sum(ops.abs(y))


@pytest.mark.parametrize("replicas", combine([2, 8], every=2))
def test_metrics_in_a_marked_function_count_once(replicas):
    check(lambda: two_outputs(Tracks), replicas=replicas)


class AddsLoss(keras.layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(ops.square(x)))
        return x


def tied(y_true, y_pred):
    ops.reshape(y_pred, (44, 2))
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


def test_added_losses_survive_a_step_that_is_run_whole():
    def act(model):
        options = {"batch_size": 44, "verbose": 0}
        history = model.fit(X, Y, epochs=2, shuffle=False, **options).history
        return history, model.evaluate(X, Y, **options)

    with pytest.warns(UserWarning, match="global batch"):
        check(lambda: chain((3,), dense(2), AddsLoss()), act, loss=lambda: tied)


def test_a_failed_fit_says_nothing_of_the_next():
    model = compiled_in(mirrored(2), two_outputs, "sgd", "mse")
    for _ in range(2):
        with pytest.raises(ValueError, match="incompatible"):
            model.fit(X[:, :2], Y, batch_size=16, verbose=0)
        # Warnings are errors here; the tail is run whole, without one.
        model.fit(X[:43], Y[:43], batch_size=16, verbose=0)


# Losses that mix rows.


class OwnCall(keras.losses.Loss):
    """A loss that does all in `__call__`, with a denominator of its own."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        error = ops.square(y_true - y_pred)
        if sample_weight is not None:
            error = error * sample_weight[:, None]
        return ops.sum(error) / (1.0 + ops.sum(ops.abs(y_true)))


@ks.global_batch_loss
class MarkedCall(OwnCall):
    pass


@ks.global_batch_loss
def ratio(y_true, y_pred):
    return ops.sum(ops.square(y_true - y_pred)) / ops.sum(ops.abs(y_true))


class InStep(OwnStep):
    def loss_of(self, x, y):
        return ratio(y, self(x))

    def logs(self, x, y, loss):
        return {"loss": loss}


class InStepPartially(InStep):
    def loss_of(self, x, y):
        return PARTIAL(y, self(x))


PARTIAL = ks.global_batch_loss(
    functools.partial(lambda k, y, p: k * ops.var(p - y), 2.0)
)


LOSSES = {
    "class": MarkedCall,
    "object": lambda: ks.global_batch_loss(OwnCall()),
    "function": lambda: ratio,
    "wrapped": lambda: LossFunctionWrapper(ratio),
    "cosine": lambda: keras.losses.CosineSimilarity(axis=0),
    "cosine_from_the_end": lambda: keras.losses.CosineSimilarity(axis=-2),
    "cosine_sum": lambda: keras.losses.CosineSimilarity(
        axis=0, reduction="sum"
    ),
}


@pytest.mark.parametrize("loss", combine(LOSSES, every=4))
def test_losses_that_mix_rows(loss):
    # CosineSimilarity over rows has no values of rows that could be weighted.
    weights = [None] if "cosine" in loss else [None, WEIGHTS]
    check(
        two_outputs,
        lambda model: [train(model, sample_weight=w) for w in weights],
        loss=LOSSES[loss],
    )


@pytest.mark.parametrize("loss", combine(["hinge", "squared_hinge"], every=2))
def test_hinge_losses_tell_labels_from_all_rows(loss):
    check(
        two_outputs,
        lambda model: train(model, y=SIGNS),
        loss=loss,
        metrics=lambda: ["hinge", "squared_hinge"],
    )


@pytest.mark.parametrize("model_class", [InStep, InStepPartially])
def test_a_marked_loss_in_an_own_step(model_class):
    check_own(model_class)


def test_only_losses_can_be_marked():
    for thing in ("dice", keras.layers.Dense):
        with pytest.raises(TypeError, match="must be a function or"):
            ks.global_batch_loss(thing)


def test_a_marked_function_keeps_its_name_and_works_without_a_strategy():
    assert ratio.__name__ == "ratio"
    assert float(ratio(np.ones((2, 1)), np.zeros((2, 1)))) == 1.0


def one_number():
    """Predictions of shape (rows,)."""
    return chain((3,), dense(1, activation="sigmoid"), keras.layers.Reshape(()))


def test_predictions_of_one_dimension():
    check(
        one_number,
        lambda model: [
            train(model, y=ROW_SCALARS, sample_weight=weight)
            for weight in (None, WEIGHTS)
        ],
        loss=lambda: keras.losses.MeanSquaredError(),
        metrics=lambda: [
            "mae",
            keras.metrics.BinaryCrossentropy(),
            keras.metrics.RootMeanSquaredError(),
        ],
    )


def test_metrics_over_the_axis_of_rows():
    check(
        two_outputs,
        metrics=lambda: [
            keras.metrics.CosineSimilarity(axis=0, name="cosine"),
            keras.metrics.PearsonCorrelation(axis=0, name="pearson"),
            keras.metrics.ConcordanceCorrelation(axis=(0, 1), name="ccc"),
        ],
    )


# Steps that cannot be mapped.


class Careful(OwnStep):
    """Updates only if its own rows' loss is low: another one on each."""

    def logs(self, x, y, loss):
        return {"loss": loss}

    def apply(self, grads, weights, state, loss):
        def update(weights, state):
            return self.optimizer.stateless_apply(state, grads, weights)

        return jax.lax.cond(
            loss < 2.0, update, lambda *same: same, weights, state
        )


@pytest.mark.parametrize(
    ("replicas", "steps_per_execution"),
    [
        (2, 2),
        (8, 1),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(8, 2, marks=pytest.mark.slow),
    ],
)
def test_an_optimizer_in_a_branch(replicas, steps_per_execution):
    check_own(
        Careful,
        warns="inside a `cond`",
        replicas=replicas,
        optimizer=lambda: keras.optimizers.SGD(0.1),
        steps_per_execution=steps_per_execution,
    )


def stateful():
    return keras.Sequential(
        [
            keras.Input((4, 3), batch_size=8),
            keras.layers.GRU(
                4,
                stateful=True,
                kernel_initializer=keras.initializers.GlorotUniform(seed=2),
                recurrent_initializer=keras.initializers.Orthogonal(seed=2),
            ),
            dense(1),
        ]
    )


SEQUENCES = _random.normal(size=(24, 4, 3)).astype("float32")


def train_and_predict(model):
    y = SEQUENCES.sum(axis=(1, 2))[:, None]
    result = train(model, x=SEQUENCES, y=y, batch_size=8)
    return result, model.predict(SEQUENCES, batch_size=8, verbose=0)


@pytest.mark.parametrize("replicas", combine([2, 3, 8], every=3))
def test_stateful_layers_hold_the_whole_batchs_state(replicas):
    check(stateful, train_and_predict, replicas=replicas)


class OfEight(keras.layers.Layer):
    """Works for the batch size that it was written for."""

    def call(self, x):
        return ops.reshape(x, (8, 12)) + ops.zeros((len(x), 1))


def fixed():
    return keras.Sequential(
        [keras.Input((4, 3), batch_size=8), OfEight(), dense(1)]
    )


def test_a_model_that_is_tied_to_its_batch_size_is_run_whole():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(fixed, train_and_predict)
    told = [str(w.message) for w in caught if "global batch" in str(w.message)]
    assert len(told) == 3  # fit, evaluate, predict
    assert all("Do not fix the batch size" in text for text in told)


class Wrong(OwnStep):
    def loss_of(self, x, y):
        return ops.mean(ops.matmul(x, y))


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("losses._verdict", "not callable"),
        ("interpreter._without_placing", "not callable"),
        ("marks.USED", "iterable"),
    ],
)
def test_a_problem_of_the_package_is_raised(name, error, monkeypatch):
    model = compiled_in(mirrored(2), two_outputs)
    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("error")
        patched.setattr(f"keras_strategies.passes.row_kinds.{name}", None)
        with pytest.raises(TypeError, match=error):
            train(model)
    train(model)


def test_errors_in_a_step_show_the_batchs_shapes():
    model = compiled_in(mirrored(2), Wrong, "sgd")
    for _ in range(2):
        with pytest.raises(TypeError, match=r"\(16,\)"):
            model.fit(X, Y, batch_size=16, verbose=0)


class OneSize(OwnStep):
    """A step that accepts a replica's rows only."""

    def loss_of(self, x, y):
        if x.shape[0] != 8:
            raise ValueError("eight rows are needed")
        return self.compute_loss(x=x, y=y, y_pred=self(x))

    def logs(self, x, y, loss):
        return {"loss": loss}


class OneSizeSummed(OneSize):
    def loss_of(self, x, y):
        return ops.sum(super().loss_of(x, y) * x) / 24


class AnySize(OneSize):
    def loss_of(self, x, y):
        return self.compute_loss(x=x, y=y, y_pred=self(x))


def fit_two_batches(model_class):
    model = compiled_in(mirrored(2), model_class, "sgd", "mse")
    return model.fit(X[:32], Y[:32], batch_size=16, shuffle=False, verbose=0)


def test_a_mean_loss_stays_mapped_if_the_step_accepts_one_number_of_rows():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = fit_two_batches(OneSize)
    assert_same(fit_two_batches(AnySize).history, ours.history)


def test_other_losses_of_a_step_that_accepts_one_number_of_rows():
    # The error of the user's step, with the global batch.
    with pytest.raises(ValueError, match="eight rows are needed"):
        fit_two_batches(OneSizeSummed)


# What is as large as the rows by chance.


class SumOfClasses(SumOfScalar):
    def logs(self, x, y, loss):
        # Eight sums over rows: as many as a replica of two has rows.
        classes = ops.sum(ops.one_hot(ops.argmax(x, axis=1), 8), axis=0)
        self.tracker.update_state(ops.square(classes))
        return {"classes": self.tracker.result()}


class ConstantCount(OwnStep):
    def logs(self, x, y, loss):
        self.tracker.update_state(loss, sample_weight=8)
        return {"mean": self.tracker.result()}


class SpreadOfRows(OwnStep):
    def loss_of(self, x, y):
        scales = ops.concatenate([ops.sum(x**2, axis=0)] * 3)[:8]
        return super().loss_of(x, y) * self.spread(scales)

    @staticmethod
    @ks.global_batch_loss
    def spread(scales):
        return ops.sum(scales) / ops.max(scales)

    def logs(self, x, y, loss):
        return {}


@pytest.mark.parametrize(
    ("model_class", "told"),
    few(
        [
            (SumOfClasses, "metric 'tracker' (Sum)"),
            (ConstantCount, "metric 'tracker' (Mean)"),
            (SpreadOfRows, "marked function"),
        ],
        every=2,
    ),
)
def test_sizes_that_equal_the_rows_by_chance(model_class, told):
    check_own(model_class, warns=told)


def test_a_metric_fed_with_rows_of_several_dimensions_stays_mapped():
    class Flat(SumOfScalar):
        def logs(self, x, y, loss):
            self.tracker.update_state(ops.reshape(x, (-1,)), sample_weight=0.5)
            return {"sum": self.tracker.result()}

    check_own(Flat, replicas=8)


def test_kerass_own_step_is_traced_once(monkeypatch):
    def fail(*args):
        raise AssertionError("a second trace")

    monkeypatch.setattr(StepTracer, "trace_again", fail)
    model = compiled_in(
        mirrored(2),
        two_outputs,
        "sgd",
        "mse",
        metrics=["mae", keras.metrics.R2Score()],
    )
    train(model)


class Gram(keras.Model):
    """Outputs that have as many rows as a replica, and are none."""

    def __init__(self):
        super().__init__()
        self.layer = dense(8)

    def call(self, x):
        y = self.layer(x)
        return ops.matmul(ops.transpose(y), y)


def test_outputs_with_as_many_entries_as_rows_by_chance():
    def act(model):
        return model.predict(X[:32], batch_size=16, verbose=0)

    plain, ours = run_both(Gram, act, replicas=2)
    assert_same(plain, ours)


# Results that look beyond their metric.


class SiblingRatio(keras.metrics.Metric):
    """The ratio of two metrics, one of which is not an attribute of it."""

    def __init__(self, other):
        super().__init__(name="ratio")
        self.total = self.add_weight(shape=(), initializer="zeros")
        self.ask = lambda: other.result()

    def update_state(self, values):
        self.total.assign_add(ops.sum(values))

    def result(self):
        return self.total / (1.0 + self.ask())


class ReadsSibling(OwnStep):
    def __init__(self):
        super().__init__()
        self.ratio = SiblingRatio(self.tracker)

    def logs(self, x, y, loss):
        error = ops.mean(ops.square(self(x) - y), axis=1)
        self.tracker.update_state(error)
        self.ratio.update_state(error)
        return {"log_ratio": ops.log(1.0 + self.ratio.result())}


class Reads(keras.metrics.Metric):
    """A metric that counts how often it was read."""

    def __init__(self):
        super().__init__(name="reads")
        self.total = self.add_weight(shape=(), initializer="zeros")
        self.count = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, values):
        self.total.assign_add(ops.sum(values))

    def result(self):
        self.count.assign_add(1)
        return self.total / self.count


class WritesInResult(OwnStep):
    def __init__(self):
        super().__init__()
        self.tracker = Reads()

    def logs(self, x, y, loss):
        self.tracker.update_state(ops.abs(x[:, 0]))
        return {"mean": self.tracker.result()}


@pytest.mark.parametrize(
    ("model_class", "told"),
    [(ReadsSibling, "metric 'ratio'"), (WritesInResult, "metric 'reads'")],
)
def test_results_that_look_beyond_their_metric(model_class, told):
    check_own(model_class, warns=told)
