"""Classes that have loops of their own, as keras-hub's `PipelineModel` has."""

import functools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_strategies.fit.binding import find_binding
from keras_strategies.fit.scope_hooks import (
    LOOPS,
    get_keras_loop,
)
from keras_strategies.keras_bridge.keras_names import TRAINER
from tests.support.combinations import combine, few
from tests.support.plain_keras import dense, mirrored, on_batch

WORDS = [f"{'a' * (i % 5)}{'b' * (i * 7 % 11)}" for i in range(37)]
ROWS = np.random.default_rng(0).random((37, 3)).astype("float32")
LABELS = ROWS.sum(1, keepdims=True)
KERASS = {name: get_keras_loop(name) for name in LOOPS}


def count_words(texts):
    """How often two letters are in each, and how long it is."""
    letters = [tf.strings.regex_replace(texts, f"[^{c}]", "") for c in "ab"]
    counts = [tf.strings.length(t) for t in (*letters, texts)]
    return tf.cast(tf.stack(counts, axis=-1), "float32") / 8


class Pipeline(keras.Sequential):
    """Maps a preprocessor over what it is given."""

    def prepare(self, x, *others):
        x = count_words(x) if x.dtype == tf.string else x * 2 - 1
        return keras.utils.pack_x_y_sample_weight(x, *others)

    def dataset(self, data, size):
        if not isinstance(data[0], tf.data.Dataset):
            data = tuple(d for d in data if d is not None)
            data = (tf.data.Dataset.from_tensor_slices(data).batch(size or 8),)
        return data[0].map(self.prepare).prefetch(tf.data.AUTOTUNE)

    def fit(self, x=None, y=None, batch_size=None, sample_weight=None, **more):
        if (held_out := more.get("validation_data")) is not None:
            more["validation_data"] = self.held_out(held_out, batch_size)
        data = self.dataset((x, y, sample_weight), batch_size)
        return super().fit(data, shuffle=False, **more)

    def held_out(self, data, size):
        is_data = isinstance(data, tf.data.Dataset)
        return self.dataset((data,) if is_data else data, size)

    def evaluate(
        self, x=None, y=None, batch_size=None, sample_weight=None, **more
    ):
        if not more.get("_use_cached_eval_dataset"):
            x = self.dataset((x, y, sample_weight), batch_size)
        return super().evaluate(x, **more)

    def predict(self, x=None, batch_size=None, **more):
        return super().predict(self.dataset((x,), batch_size), **more)

    def train_on_batch(self, x, y=None, **more):
        return super().train_on_batch(*self.on_batch(x, y), **more)

    def test_on_batch(self, x, y=None, **more):
        return super().test_on_batch(*self.on_batch(x, y), **more)

    def predict_on_batch(self, x):
        return super().predict_on_batch(*self.on_batch(x))

    def on_batch(self, x, y=None):
        data = self.prepare(
            tf.convert_to_tensor(x), *([] if y is None else [y])
        )
        data = data if isinstance(data, tuple) else (data,)
        return [keras.ops.convert_to_tensor(np.asarray(d)) for d in data]


class Lazy(Pipeline):
    """Reads the data of every evaluation, as Keras hands it on."""

    def fit(self, x=None, y=None, batch_size=None, **more):
        if (data := more.get("validation_data")) is not None:
            assert isinstance(data, tuple)
        data = self.dataset((x, y), batch_size)
        return keras.Sequential.fit(self, data, shuffle=False, **more)

    def evaluate(self, x=None, y=None, **more):
        assert isinstance(x, np.ndarray)
        more |= {"_use_cached_eval_dataset": False, "batch_size": None}
        more.pop("sample_weight", None)
        data = self.dataset((x, y), 8)
        return keras.Sequential.evaluate(self, data, **more)


def trained(x, *, kind=Pipeline, steps=1, weights=None):
    """What every loop finds, and the weights at the end."""
    keras.utils.set_random_seed(3)
    model = kind([keras.Input((3,)), dense(4, activation="tanh"), dense(1)])
    model.compile("adam", "mse", steps_per_execution=steps)
    data = {"x": x, "y": LABELS}
    if isinstance(x, tf.data.Dataset):
        data = {"x": x}
    given = {"verbose": 0} | ({} if weights is None else weights)
    held_out = (x[:9], LABELS[:9]) if isinstance(x, np.ndarray | list) else x
    fitted = model.fit(**data, **given, epochs=2, validation_data=held_out)
    found = [*fitted.history.values()]
    found += [model.evaluate(**data, **given)]
    words = x if isinstance(x, list) else ROWS
    for batch in (8, 5):
        rows, labels = words[:batch], LABELS[:batch]
        found += [on_batch(model, "train_on_batch", rows, labels)]
        found += [on_batch(model, "test_on_batch", rows, labels)]
        found += [on_batch(model, "predict_on_batch", rows)]
    found += [model.predict(words, verbose=0)]
    return found + model.get_weights()


def batches():
    return tf.data.Dataset.from_tensor_slices((WORDS, LABELS)).batch(8)


GIVEN = {"arrays": lambda: ROWS, "strings": lambda: WORDS, "tf.data": batches}


@functools.cache
def compute_expected(kind):
    """What plain Keras finds on one device."""
    return trained(GIVEN[kind]())


@pytest.mark.parametrize(
    ("kind", "replicas"),
    few(
        [
            *combine(GIVEN, (2, 3), every=2),
            ("strings", 1),
            pytest.param("strings", 8, marks=pytest.mark.slow),
        ],
        every=4,
    ),
)
def test_a_pipeline_model_is_as_on_one_device(kind, replicas):
    with mirrored(replicas).scope():
        found = trained(GIVEN[kind]())
    check(found, compute_expected(kind))


def test_a_pipeline_model_that_is_attached():
    class Attached(Pipeline):
        def compile(self, *args, **kwargs):
            super().compile(*args, **kwargs)
            mirrored(3).attach(self)

    check(trained(WORDS, kind=Attached), compute_expected("strings"))


def check(found, expected):
    for ours, plain in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("replicas", "steps"), few([(2, 3), (3, 2)], every=2))
def test_several_steps_an_execution(replicas, steps):
    expected = trained(WORDS, steps=steps)
    with mirrored(replicas).scope():
        check(trained(WORDS, steps=steps), expected)


def test_an_evaluate_sees_the_data_that_fit_was_given():
    expected = trained(ROWS, kind=Lazy)
    with mirrored(3).scope():
        check(trained(ROWS, kind=Lazy), expected)


def test_what_it_sets_itself_counts():
    class Sets(keras.Sequential):
        def fit(self, x, y, **more):
            assert isinstance(x, np.ndarray)
            more |= {"batch_size": 5, "shuffle": False}
            super().fit(x, y, epochs=1, **more)
            return super().fit(x, y, epochs=2, **more)

    def losses():
        model = Sets([keras.Input((3,)), dense(1)])
        model.compile("sgd", "mse")
        history = model.fit(ROWS, LABELS, verbose=0, batch_size=16)
        return history.history["loss"]

    expected = losses()
    with mirrored(2).scope():
        np.testing.assert_allclose(losses(), expected, rtol=1e-6)


def test_predict_before_compile_runs_on_the_replicas():
    strategy = mirrored(2)
    with strategy.scope():
        model = Pipeline([keras.Input((3,)), dense(1)])
        found = model.predict(WORDS, verbose=0)
    assert model.distribute_strategy is strategy
    plain = Pipeline([keras.Input((3,)), dense(1)])
    np.testing.assert_allclose(found, plain.predict(WORDS, verbose=0), 1e-6)


def test_keras_is_as_it_was_also_after_an_error():
    class Fails(Pipeline):
        def fit(self, *args, **kwargs):
            assert get_keras_loop("fit") is not KERASS["fit"]
            raise OSError("no data")

    with mirrored(2).scope():
        model = Fails([keras.Input((3,)), dense(1)])
        model.compile("sgd", "mse")
        inside = get_keras_loop("fit")
    with pytest.raises(OSError, match="no data"):
        model.fit(ROWS, LABELS)
    assert inside is not KERASS["fit"]
    assert {n: get_keras_loop(n) for n in LOOPS} == KERASS
    assert TRAINER.compile is keras.Model.compile


def test_loops_that_are_no_methods_of_the_model():
    class Odd(keras.Sequential):
        @staticmethod
        def fit(x):
            return x

        @classmethod
        def evaluate(cls, x):
            return cls, x

    with mirrored(2).scope():
        model = Odd([keras.Input((3,)), dense(1)])
        model.compile("sgd", "mse")
    assert model.fit(3) == 3
    assert model.evaluate(3) == (Odd, 3)


def test_a_plain_model_in_an_override_is_left_alone():
    class Holds(Pipeline):
        def fit(self, *args, **kwargs):
            plain.fit(ROWS, LABELS, verbose=0, batch_size=8, shuffle=False)
            return super().fit(*args, **kwargs)

    def made():
        model = keras.Sequential([keras.Input((3,)), dense(1)])
        model.compile("sgd", "mse")
        return model

    plain, expected = made(), made()
    with mirrored(2).scope():
        model = Holds([keras.Input((3,)), dense(1)])
        model.compile("sgd", "mse")
    model.fit(WORDS, LABELS, verbose=0)
    expected.fit(ROWS, LABELS, verbose=0, batch_size=8, shuffle=False)
    check(plain.get_weights(), expected.get_weights())
    assert find_binding(plain) is None


def test_overrides_in_several_threads():
    expected = compute_expected("strings")
    results, errors = {}, []

    def run(replicas):
        try:
            with mirrored(replicas).scope():
                model = Pipeline([keras.Input((3,)), dense(1)])
                model.compile("sgd", "mse")
            for _ in range(5):
                model.fit(WORDS, LABELS, verbose=0)
            results[replicas] = model.get_weights()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    check(results[2], results[1])
    check(results[3], results[1])
    assert {n: get_keras_loop(n) for n in LOOPS} == KERASS
    check(trained(WORDS), expected)
