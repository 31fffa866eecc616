"""Which metrics are sums over rows, and how the others are updated."""

import inspect
import warnings

import keras
import numpy as np
import pytest
from keras import ops

from keras_strategies.hooks import metric_rules
from tests.support.combinations import combine
from tests.support.plain_keras import assert_same, dense, run_both

ROWS = 8


def floats(*shape):
    return np.random.default_rng(0).uniform(0.1, 0.9, shape).astype("float32")


def integers(*shape):
    return np.random.default_rng(1).integers(0, 2, shape)


SCORES = (integers(ROWS, 1), floats(ROWS, 1))
VECTORS = (floats(ROWS, 3), floats(ROWS, 3))
ONE_HOT = (
    np.eye(3, dtype="float32")[[0, 1, 2, 0, 1, 2, 0, 1]],
    floats(ROWS, 3),
)
SPARSE = (integers(ROWS), floats(ROWS, 3))
CLASSES = (integers(ROWS), integers(ROWS))

SAMPLES = {
    "Accuracy": ({}, (integers(ROWS, 1), integers(ROWS, 1))),
    "BinaryIoU": ({"target_class_ids": [0, 1]}, SCORES),
    "CategoricalAccuracy": ({}, ONE_HOT),
    "CategoricalCrossentropy": ({}, ONE_HOT),
    "CategoricalHinge": ({}, ONE_HOT),
    "ConcordanceCorrelation": ({}, VECTORS),
    "CosineSimilarity": ({}, VECTORS),
    "F1Score": ({}, ONE_HOT),
    "FBetaScore": ({}, ONE_HOT),
    "IoU": ({"num_classes": 2, "target_class_ids": [1]}, CLASSES),
    "KLDivergence": ({}, VECTORS),
    "LogCoshError": ({}, VECTORS),
    "Mean": ({}, (floats(ROWS, 2),)),
    "MeanAbsoluteError": ({}, VECTORS),
    "MeanAbsolutePercentageError": ({}, VECTORS),
    "MeanIoU": ({"num_classes": 2}, CLASSES),
    "MeanMetricWrapper": ({"fn": keras.losses.mean_squared_error}, VECTORS),
    "MeanSquaredError": ({}, VECTORS),
    "MeanSquaredLogarithmicError": ({}, VECTORS),
    "OneHotIoU": ({"num_classes": 3, "target_class_ids": [1]}, ONE_HOT),
    "OneHotMeanIoU": ({"num_classes": 3}, ONE_HOT),
    "PearsonCorrelation": ({}, VECTORS),
    "Poisson": ({}, VECTORS),
    "PrecisionAtRecall": ({"recall": 0.5}, SCORES),
    "R2Score": ({}, VECTORS),
    "RecallAtPrecision": ({"precision": 0.5}, SCORES),
    "RootMeanSquaredError": ({}, VECTORS),
    "SensitivityAtSpecificity": ({"specificity": 0.5}, SCORES),
    "SparseCategoricalAccuracy": ({}, SPARSE),
    "SparseCategoricalCrossentropy": ({}, SPARSE),
    "SparseTopKCategoricalAccuracy": ({"k": 2}, SPARSE),
    "SpecificityAtSensitivity": ({"sensitivity": 0.5}, SCORES),
    "Sum": ({}, (floats(ROWS, 2),)),
    "TopKCategoricalAccuracy": ({"k": 2}, ONE_HOT),
}
OF_SCORES = (
    *("AUC", "BinaryAccuracy", "BinaryCrossentropy", "FalseNegatives"),
    *("FalsePositives", "Hinge", "Precision", "Recall"),
    *("SquaredHinge", "TrueNegatives", "TruePositives"),
)
SAMPLES |= {name: ({}, SCORES) for name in OF_SCORES}

ALL = {
    name
    for name, thing in vars(keras.metrics).items()
    if inspect.isclass(thing) and issubclass(thing, keras.metrics.Metric)
} - {"Metric"}


def update_of(metric, args, kwargs=None):
    """An update of one of two replicas."""
    return metric_rules.Update(
        metric=metric, args=args, kwargs=kwargs or {}, num_replicas=2
    )


def choose(metric, args, kwargs, rows):
    return update_of(metric, args, kwargs).choose_rule(rows)


def made(name):
    arguments, data = SAMPLES[name]
    metric = getattr(keras.metrics, name)(**arguments)
    metric.update_state(*data)
    metric.reset_state()
    return metric, data


def test_every_metric_of_keras_has_a_sample():
    assert set(SAMPLES) == ALL


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning")
@pytest.mark.parametrize("name", combine(sorted(ALL), every=5))
def test_kerass_own_metrics_are_sums_over_rows(name):
    metric, data = made(name)
    # What is claimed of all of them without analysis, and what is so.
    rule = choose(metric, data, {}, ROWS)
    looks_at_all_labels = name in ("Hinge", "SquaredHinge")
    if looks_at_all_labels:
        assert rule == metric_rules.SAME
        assert not update_of(metric, data)._adds_up()
        return
    assert rule == metric_rules.SUM
    assert update_of(metric, data)._adds_up()


class Highest(keras.metrics.Metric):
    """The highest prediction."""

    def __init__(self, name="highest"):
        super().__init__(name=name)
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.max(y_pred)))

    def result(self):
        return self.value + 0.0


class Last(Highest):
    """The last prediction."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.sum(y_pred[-1]))


class Smooth(Highest):
    """A moving mean of the predictions."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(0.9 * self.value + 0.1 * ops.mean(y_pred))


class HasSeen(keras.metrics.Metric):
    """Whether any prediction was above a half; a boolean."""

    def __init__(self, name="has_seen"):
        super().__init__(name=name)
        self.value = self.add_variable((), "zeros", dtype="bool", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.logical_or(self.value, ops.any(y_pred > 0.5)))

    def result(self):
        return ops.cast(self.value, "float32")


class Errors(Highest):
    """A sum of squares: additive, and a user's own."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign_add(ops.sum(ops.square(y_true - y_pred)))


class Variance(keras.metrics.Mean):
    """A mean over batches of what mixes rows."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(ops.var(y_pred))


def rule_of(metric):
    return choose(metric, VECTORS, {}, ROWS)


NOT_ADDITIVE = {
    "highest": Highest,
    "last": lambda: Last("last"),
    "smooth": lambda: Smooth("smooth"),
    "has_seen": HasSeen,
    "variance": lambda: Variance(name="variance"),
}


@pytest.mark.parametrize("name", NOT_ADDITIVE)
def test_a_users_metric_that_is_no_sum_is_found_with_one_warning(name):
    metric = NOT_ADDITIVE[name]()
    with pytest.warns(UserWarning, match=f"'{name}'.*not shown") as caught:
        rule = rule_of(metric)
    assert len(caught) == 1
    # Warnings are errors here: a second one would show.
    again = rule_of(metric)
    assert (rule, again) == (metric_rules.SAME, metric_rules.SAME)


def test_analysis_leaves_the_metric_as_it_was():
    metric = Highest()
    metric.value.assign(0.25)
    with pytest.warns(UserWarning, match="not shown"):
        rule_of(metric)
    assert float(metric.value) == 0.25


def test_a_users_sum_is_found_without_a_warning():
    rule = rule_of(Errors())
    assert rule == metric_rules.SUM


def row_error(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred), axis=-1)


def spread(y_true, y_pred):
    return ops.var(y_pred)


@pytest.mark.parametrize(
    ("function", "rule"),
    [(row_error, metric_rules.SUM), (spread, metric_rules.SAME)],
)
def test_a_users_function_of_a_row_is_a_sum_and_one_of_rows_is_none(
    function, rule
):
    assert rule_of(keras.metrics.MeanMetricWrapper(function)) == rule


class SumWithoutWeights(Highest):
    """Adds up rows, or the weighted mean of a batch."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        rows = ops.mean(ops.abs(y_true - y_pred), axis=-1)
        if sample_weight is not None:
            weight = ops.reshape(sample_weight, (-1,))
            rows = ops.sum(rows * weight) / ops.sum(weight)
        self.value.assign_add(ops.sum(rows))


def test_asks_for_each_form_of_a_call():
    metric = SumWithoutWeights()
    weight = {"sample_weight": floats(ROWS)}
    assert choose(metric, VECTORS, {}, ROWS) == metric_rules.SUM
    with pytest.warns(UserWarning, match="not shown to add"):
        assert choose(metric, VECTORS, weight, ROWS) == metric_rules.SAME
    # Warnings are errors here: a second one would show.
    assert choose(metric, VECTORS, {}, ROWS) == metric_rules.SUM
    assert choose(metric, VECTORS, weight, ROWS) == metric_rules.SAME


class Varied(Highest):
    """A sum of errors, or their maximum."""

    max_rows = 99

    def update_state(self, y_true, y_pred, kind="sum"):
        errors = ops.mean(ops.abs(y_true - y_pred), axis=-1)
        is_sum = kind == "sum" and y_pred.shape[0] <= self.max_rows
        self.value.assign_add((ops.sum if is_sum else ops.max)(errors))


def change_attribute(metric):
    metric.max_rows = 7
    return VECTORS


VARIATIONS = {
    "attribute": change_attribute,
    "constant": lambda metric: (*VECTORS, "max"),
    "rows": lambda metric: (floats(80, 3), floats(80, 3)),
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_asks_again_when_something_changed(name):
    metric = Varied()
    assert choose(metric, VECTORS, {}, ROWS) == metric_rules.SUM
    data = VARIATIONS[name](metric)
    with pytest.warns(UserWarning, match="not shown to add"):
        rule = choose(metric, data, {}, len(data[0]))
    assert rule == metric_rules.SAME


def test_metric_that_fails_with_other_rows_is_no_sum():
    class Picky(Highest):
        def update_state(self, y_true, y_pred, sample_weight=None):
            if y_pred.shape[0] != 4:
                raise ValueError("Only four rows.")

    with pytest.warns(UserWarning, match="not shown"):
        rule = rule_of(Picky())
    assert rule == metric_rules.SAME


@pytest.mark.parametrize(
    ("metric", "args", "kwargs", "rule"),
    [
        (keras.metrics.Mean(), (np.float32(1),), {}, "mean"),
        (
            keras.metrics.Mean(),
            (np.float32(1), np.float32(2)),
            {},
            "global batch",
        ),
        (keras.metrics.Mean(), (np.float32(1), 2), {}, "mean"),
        (keras.metrics.Mean(), (np.float32(1),), {"sample_weight": 4}, "sum"),
        (keras.metrics.Sum(), (np.float32(1),), {}, "global batch"),
        (Errors(), (np.float32(1), np.float32(1)), {}, "global batch"),
        (Errors(), (VECTORS[0][:4], np.float32(1)), {}, "sum"),
        # A constant of the program is told to every replica. That it counts
        # no rows is for a probe to confirm.
        (keras.metrics.Mean(), (1.0,), {}, "same"),
        (keras.metrics.Sum(), (3,), {}, "same"),
        (keras.metrics.Sum(), (4,), {}, "same"),
        (keras.metrics.Sum(), (True,), {}, "same"),
    ],
)
def test_updates_without_rows_follow_a_rule_or_need_the_whole(
    metric, args, kwargs, rule
):
    assert choose(metric, args, kwargs, 4) == rule


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (keras.losses.Dice(), True),
        (keras.losses.Tversky(), True),
        (keras.losses.Circle(), True),
        (keras.losses.dice, True),
        (keras.losses.Hinge(), True),
        (keras.losses.squared_hinge, True),
        (keras.losses.Dice(axis=-1), False),
        (keras.losses.Tversky(axis=(0, 1)), True),
        (keras.losses.MeanSquaredError(), False),
        (keras.losses.mean_squared_error, False),
        (lambda y, p: p, False),
        (keras.losses.CosineSimilarity(), False),
        (keras.losses.CosineSimilarity(axis=1), False),
        (keras.losses.CosineSimilarity(axis=0), True),
        (keras.losses.CosineSimilarity(axis=-2), True),
        (keras.metrics.PearsonCorrelation(axis=(0, 1)), True),
        (keras.metrics.PearsonCorrelation(axis=1), False),
    ],
)
def test_losses_that_mix_rows_are_known(loss, expected):
    if inspect.isfunction(loss):
        loss = keras.metrics.MeanMetricWrapper(loss)
    is_circle = isinstance(loss, keras.losses.Circle)
    y_true, y_pred = SPARSE if is_circle else VECTORS
    assert metric_rules.mixes_rows(loss, (y_true, y_pred), {}) is expected
    # Arguments by name are in another order.
    kwargs = {"y_pred": y_pred, "y_true": y_true, "sample_weight": floats(ROWS)}
    assert metric_rules.mixes_rows(loss, (), kwargs) is expected


def test_arrays_of_rows_alone_have_no_other_axis_to_reduce():
    def mixes(loss):
        return metric_rules.mixes_rows(loss, CLASSES, {})

    assert mixes(keras.losses.MeanSquaredError())
    assert not mixes(keras.metrics.MeanMetricWrapper(lambda y, p: p))
    assert not mixes(keras.metrics.Accuracy())


_random = np.random.default_rng(3)
X = _random.normal(size=(22, 3)).astype("float32")
Y = _random.uniform(size=(22, 2)).astype("float32")


def all_no_sums():
    return [make() for make in NOT_ADDITIVE.values()] + [Errors("errors")]


def two_outputs():
    return keras.Sequential([keras.Input((3,)), dense(2, activation="sigmoid")])


@pytest.mark.parametrize("replicas", combine([2, 8], every=2))
def test_every_users_metric_is_that_of_one_device(replicas):
    def act(model):
        options = {"batch_size": 8, "verbose": 0}
        history = model.fit(X, Y, epochs=2, shuffle=False, **options).history
        return history, model.evaluate(X, Y, return_dict=True, **options)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain, ours = run_both(
            two_outputs,
            act,
            replicas=replicas,
            is_fresh=True,
            optimizer="sgd",
            loss="mse",
            metrics=all_no_sums,
        )
    assert_same(plain, ours)
    texts = [str(w.message) for w in caught]
    told = [text for text in texts if "not shown to add" in text]
    assert len(told) == len(NOT_ADDITIVE)


class Rounded(Highest):
    """A sum that is cut to an integer in each update."""

    def __init__(self):
        super().__init__("rounded")
        self.count = self.add_variable((), "zeros", dtype="int32", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        total = ops.cast(self.count, "float32") + ops.sum(y_pred)
        self.count.assign(ops.cast(total, "int32"))


class Decayed(Highest):
    """Adds less, the larger the sum is."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign_add(ops.sum(y_pred) - 0.1 * self.value)


class Updates(Highest):
    """Counts updates, not rows."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign_add(1.0)


class Rows(Highest):
    """Counts rows, and the entries in them."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign_add(ops.cast(ops.shape(y_pred)[0], "float32"))
        self.value.assign_add(ops.sum(ops.ones_like(y_pred)))


class Difference(Highest):
    """Subtracts a sum from its state."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign_sub(ops.sum(y_pred))


class Reversed(Highest):
    """Subtracts its state from a sum."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.sum(y_pred) - self.value)


class Drawn(Highest):
    """Adds up rows that are drawn, the same ones each time."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        drawn = keras.random.uniform((y_pred.shape[0], 1), seed=3) < 0.5
        self.value.assign_add(ops.sum(ops.where(drawn, y_pred, 0.0)))


@pytest.mark.parametrize(
    ("made_by", "is_sum"),
    [
        (Drawn, False),
        (Rounded, False),
        (Decayed, False),
        (Updates, False),
        (Reversed, False),
        (Rows, True),
        (Difference, True),
    ],
)
def test_what_an_update_adds_is_analyzed(made_by, is_sum):
    assert update_of(made_by(), VECTORS)._adds_up() is is_sum
