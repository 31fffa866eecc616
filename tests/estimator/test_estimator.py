"""Estimator: training, evaluation and prediction from checkpoints."""

import collections
import functools
import os
import pathlib
import random
import re
import shutil
import sys
import types

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.estimator import records
from keras_strategies.estimator.estimator import Estimator
from keras_strategies.estimator.inputs import call_input_fn, make_symbols
from tests.estimator import models
from tests.estimator.models import (
    X,
    Y,
    arrays,
    assert_equal_weights,
    batches,
    estimator_of,
    infinite,
    plain,
    weights_of,
    with_spec,
)

ModeKeys = ks.estimator.ModeKeys


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


def strategy_of(replicas):
    if replicas is None:
        return None
    return ks.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])


def step_of(estimator):
    return int(pathlib.Path(estimator.latest_checkpoint()).name)


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


# Arguments.


def needs_nothing():
    pass


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"model_fn": None}, TypeError, "model_fn must be a function"),
        ({"model_fn": 3}, TypeError, "model_to_estimator"),
        (
            {"model_fn": keras.Sequential()},
            TypeError,
            "model, call `ks.estimator.model_to_estimator`",
        ),
        (
            {"model_fn": lambda features: 0, "params": {}},
            ValueError,
            "does not include an argument",
        ),
        ({"config": 3}, TypeError, "a `ks.estimator.RunConfig`"),
        ({"model_dir": "/other"}, ValueError, "different values"),
        ({"warm_start_from": 3}, TypeError, "warm_start_from"),
    ],
)
def test_wrong_argument_of_an_estimator_is_refused(
    tmp_path, arguments, error, text
):
    given = {
        "model_fn": plain,
        "config": models.config_of(tmp_path),
        "params": {},
    }
    if arguments.get("model_fn", plain) is not plain:
        given.pop("params")
    with pytest.raises(error, match=text) as raised:
        Estimator(**given | arguments)
    assert "Received: " in str(raised.value)


def test_model_dir_is_that_of_the_argument_or_of_the_config(tmp_path):
    config = models.config_of(tmp_path)
    assert Estimator(needs_nothing, config=config).model_dir == str(tmp_path)
    assert Estimator(needs_nothing, tmp_path, config).model_dir == str(tmp_path)
    made = Estimator(needs_nothing, tmp_path)
    assert made.model_dir == made.config.model_dir == str(tmp_path)
    temporary = Estimator(needs_nothing)
    assert os.path.isdir(temporary.model_dir)
    shutil.rmtree(temporary.model_dir)


def test_an_estimator_has_the_names_of_tf_alone():
    assert {name for name in dir(Estimator) if not name.startswith("_")} == {
        *("config", "eval_dir", "evaluate", "export_saved_model"),
        *("get_variable_names", "get_variable_value", "latest_checkpoint"),
        *("model_dir", "model_fn", "params", "predict", "train"),
    }


def test_parameters_are_copied(tmp_path):
    params = {"rate": [1]}
    estimator = estimator_of(tmp_path, params=params)
    params["rate"].append(2)
    estimator.params["rate"].append(3)
    assert estimator.params == {"rate": [1]}
    assert estimator.model_fn is plain


@pytest.mark.parametrize(
    ("method", "arguments", "error", "text"),
    [
        ("train", {"steps": 1, "max_steps": 1}, ValueError, "both steps and"),
        ("train", {"steps": 0}, ValueError, "`steps` must be > 0"),
        ("train", {"max_steps": -1}, ValueError, "`max_steps` must be > 0"),
        ("train", {"steps": 1.5}, TypeError, "integer"),
        ("train", {"input_fn": 3}, TypeError, "`input_fn` must be callable"),
        ("train", {"hooks": [3]}, TypeError, "`hooks` must be Keras callbacks"),
        ("train", {"saving_listeners": [3]}, TypeError, "saving_listeners"),
        ("evaluate", {"steps": 0}, ValueError, "`steps` must be > 0"),
        ("evaluate", {"input_fn": None}, TypeError, "must be callable"),
        ("evaluate", {"name": 3}, TypeError, "`name` must be a str"),
        ("evaluate", {"hooks": [3]}, TypeError, "must be Keras callbacks"),
        ("predict", {"input_fn": "a"}, TypeError, "must be callable"),
    ],
)
def test_wrong_argument_of_a_method_is_refused(
    tmp_path, method, arguments, error, text
):
    estimator = estimator_of(tmp_path)
    with pytest.raises(error, match=text):
        getattr(estimator, method)(**{"input_fn": arrays} | arguments)
    assert estimator.latest_checkpoint() is None


@pytest.mark.parametrize(
    ("path", "text"),
    [("7", "the directory does not exist"), ("", "named after its step")],
)
@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_wrong_path_of_a_checkpoint_is_refused(tmp_path, method, path, text):
    call = getattr(estimator_of(tmp_path), method)
    with pytest.raises(ValueError, match=text):
        call(arrays, checkpoint_path=f"/nowhere/{path}")


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("export_saved_model", ("a",)),
        ("get_variable_names", ()),
        ("get_variable_value", ("a",)),
    ],
)
def test_an_untrained_model_is_refused(tmp_path, method, arguments):
    call = getattr(estimator_of(tmp_path), method)
    with pytest.raises(ValueError, match="Could not find a trained"):
        call(*arguments)


# Training.


def test_steps_add_and_max_steps_are_absolute(tmp_path, caplog):
    estimator = estimator_of(tmp_path)
    assert estimator.train(infinite, steps=2) is estimator
    assert step_of(estimator) == 2
    estimator.train(infinite, steps=3)
    assert step_of(estimator) == 5
    weights = weights_of(estimator)
    # Done already: not even input_fn is called.
    estimator.train(needs_nothing, max_steps=5)
    estimator.train(needs_nothing, max_steps=4)
    assert warnings_of(caplog) == [
        f"No step is trained, because the training in {tmp_path} has already "
        f"reached step 5, and max_steps={asked}. Pass a larger `max_steps`, or "
        "another `model_dir`."
        for asked in (5, 4)
    ]
    assert_equal_weights(weights_of(estimator), weights)
    estimator.train(infinite, max_steps=6)
    assert step_of(estimator) == 6
    # Another Estimator goes on, too.
    other = estimator_of(tmp_path)
    other.train(batches)
    assert step_of(other) == 9


def test_data_begin_anew_with_each_call(tmp_path):
    seen = []

    def input_fn():
        for batch in batches():
            seen.append(batch[1][0, 0])
            yield batch

    estimator = estimator_of(tmp_path)
    estimator.train(input_fn, steps=2)
    first = seen[0]
    seen.clear()
    estimator.train(input_fn, steps=2)
    assert seen[0] == first


def test_data_that_end_at_a_checkpoint_begin_anew(tmp_path):
    """The last save is in the middle of the call, for all it knows."""
    estimator = estimator_of(tmp_path, save_checkpoints_steps=1)
    estimator.train(batches)
    assert step_of(estimator) == 3
    estimator.train(batches)
    assert step_of(estimator) == 6


@pytest.mark.parametrize("replicas", [slow(None), slow(1), 2, slow(4)])
def test_numbers_are_those_of_one_device(tmp_path, replicas):
    """Batches of 8, 8 and 6 rows, in training and in evaluation."""
    with ks.OneDeviceStrategy("cpu:0").scope():
        x = keras.Input((3,), name="a")
        model = plain({"a": x}, None, None, {})
    model.fit(batches(), shuffle=False, verbose=0, steps_per_epoch=3)
    expected = model.evaluate({"a": X}, Y, return_dict=True, verbose=0)

    strategy = strategy_of(replicas)
    estimator = estimator_of(
        tmp_path, train_distribute=strategy, eval_distribute=strategy
    )
    estimator.train(batches)
    results = estimator.evaluate(arrays)
    assert results.pop("global_step") == 3
    assert results.keys() == expected.keys()
    for name in results:
        np.testing.assert_allclose(results[name], expected[name], rtol=1e-5)
    predictions = np.stack(list(estimator.predict(arrays)))
    np.testing.assert_allclose(
        predictions, model.predict({"a": X}, verbose=0), atol=1e-5
    )


class Failing(keras.callbacks.Callback):
    """Fails after some steps."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def on_train_batch_end(self, batch, logs=None):
        self.after -= 1
        if not self.after:
            raise InterruptedError("as told")


@pytest.mark.parametrize("limit", [{"max_steps": 10}, slow({"steps": 6})])
def test_an_interrupted_call_is_completed_bit_for_bit(tmp_path, limit):
    def made(directory):
        return estimator_of(
            tmp_path / directory,
            save_checkpoints_steps=2,
            train_distribute=strategy_of(2),
        )

    reference = made("reference")
    reference.train(infinite, steps=4)
    reference.train(infinite, **limit)
    estimator = made("interrupted")
    estimator.train(infinite, steps=4)
    with pytest.raises(InterruptedError):
        estimator.train(infinite, hooks=[Failing(after=3)], **limit)
    assert step_of(estimator) == 6
    made("interrupted").train(infinite, **limit)
    assert step_of(estimator) == 10
    assert_equal_weights(weights_of(estimator), weights_of(reference))


def test_seed_determines_the_weights_and_leaves_the_caller_s_states(tmp_path):
    def model_fn(features):
        model = keras.Sequential(
            [keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
        return model

    def trained(name, seed):
        estimator = Estimator(
            model_fn,
            config=models.config_of(tmp_path / name, tf_random_seed=seed),
        )
        estimator.train(lambda: (X, Y))
        estimator.evaluate(lambda: (X, Y))
        return weights_of(estimator)

    random.seed(5)
    np.random.seed(5)
    first = trained("a", 7)
    after = random.random(), np.random.rand()
    random.seed(5)
    np.random.seed(5)
    assert (random.random(), np.random.rand()) == after
    assert_equal_weights(first, trained("b", 7))
    other = trained("c", -8)
    assert any(not np.array_equal(first[n], other[n]) for n in first)


@pytest.mark.parametrize("steps", [4, 6, 7])
def test_several_steps_an_execution_end_at_the_step_asked_for(tmp_path, steps):
    def model_fn(features):
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=3)
        return model

    def input_fn():
        while True:
            yield X[:8], Y[:8]

    estimator = Estimator(model_fn, config=models.config_of(tmp_path))
    estimator.train(input_fn, steps=steps)
    assert step_of(estimator) == steps
    assert estimator.get_variable_value("optimizer/sgd/iteration") == steps


class Notes(ks.estimator.CheckpointSaverListener):
    def __init__(self, stop_at=None):
        self.notes = []
        self.stop_at = stop_at

    def begin(self):
        self.notes.append("begin")

    def before_save(self, session, global_step_value):
        assert session is None
        self.notes.append(("before", global_step_value))

    def after_save(self, session, global_step_value):
        self.notes.append(("after", global_step_value))
        return global_step_value == self.stop_at

    def end(self, session, global_step_value):
        self.notes.append(("end", global_step_value))


def test_listeners_are_told_of_checkpoints_that_are_complete(tmp_path):
    estimator = estimator_of(tmp_path, save_checkpoints_steps=2)
    listener = Notes()
    complete = []

    class Looks(Notes):
        def after_save(self, session, global_step_value):
            complete.append(step_of(estimator))

    estimator.train(infinite, steps=5, saving_listeners=[listener, Looks()])
    assert complete == [2, 4, 5]
    assert listener.notes == [
        "begin",
        ("before", 2),
        ("after", 2),
        ("before", 4),
        ("after", 4),
        ("before", 5),
        ("after", 5),
        ("end", 5),
    ]


def test_a_listener_can_end_the_training(tmp_path):
    estimator = estimator_of(tmp_path, save_checkpoints_steps=2)
    estimator.train(infinite, steps=9, saving_listeners=[Notes(stop_at=4)])
    assert step_of(estimator) == 4
    # That was the end of the call: the next one begins.
    estimator.train(infinite, steps=9)
    assert step_of(estimator) == 13


def test_as_many_checkpoints_are_kept_as_asked_for(tmp_path):
    estimator = estimator_of(
        tmp_path, save_checkpoints_steps=1, keep_checkpoint_max=2
    )
    estimator.train(infinite, steps=5)
    kept = {path.name for path in tmp_path.iterdir() if path.name.isdigit()}
    assert kept == {"4", "5"}


def test_another_model_s_directory_is_refused_naming_what_differs(tmp_path):
    estimator_of(tmp_path, params={"units": 4}).train(batches, steps=1)
    other = estimator_of(tmp_path, params={"units": 5})
    text = r"another model.*dense\.kernel: float32\[3, 4\] in the checkpoint, "
    for method in (other.train, other.evaluate):
        with pytest.raises(ValueError, match=text + r"float32\[3, 5\] here"):
            method(batches)
    assert step_of(other) == 1


def test_metrics_may_change_between_calls(tmp_path):
    estimator_of(tmp_path).train(batches, steps=1)
    other = estimator_of(tmp_path, params={"metrics": ["mse", "mape"]})
    other.train(batches, steps=1)
    assert step_of(other) == 2
    assert {"mse", "mape"} < set(other.evaluate(batches))


def test_a_damaged_checkpoint_is_left_out(tmp_path):
    estimator = estimator_of(tmp_path, save_checkpoints_steps=1)
    estimator.train(infinite, steps=3)
    before = estimator.evaluate(arrays, checkpoint_path=str(tmp_path / "2"))
    file = max(
        (p for p in (tmp_path / "3" / "state").rglob("*") if p.is_file()),
        key=lambda path: path.stat().st_size,
    )
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert estimator.evaluate(arrays) == before
    with pytest.raises(ValueError, match="checksum"):
        estimator.evaluate(arrays, checkpoint_path=str(tmp_path / "3"))


# What input_fn may be.


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return list(batches())[index]


def with_weights():
    return {"a": X}, Y, np.ones(len(X), "float32")


def of_tensorflow():
    tensorflow = pytest.importorskip("tensorflow")
    return tensorflow.data.Dataset.from_tensor_slices(({"a": X}, Y)).batch(8)


def of_tensorflow_infinite():
    return of_tensorflow().repeat()


def of_torch():
    import torch

    rows = [({"a": x}, y) for x, y in zip(X, Y, strict=True)]
    return torch.utils.data.DataLoader(rows, batch_size=8)


def of_grain():
    grain = pytest.importorskip("grain")
    source = grain.MapDataset.source(range(len(X)))
    return source.map(lambda i: ({"a": X[i]}, Y[i])).batch(8)


@pytest.mark.parametrize(
    "input_fn",
    [
        slow(with_weights),
        batches,
        slow(infinite),
        Batches,
        of_grain,
        slow(of_tensorflow),
        slow(of_tensorflow_infinite),
        slow(of_torch),
    ],
)
def test_input_may_be_what_fit_takes(tmp_path, input_fn):
    estimator = estimator_of(tmp_path)
    estimator.train(input_fn, max_steps=1)
    assert step_of(estimator) == 1
    results = estimator.evaluate(input_fn, steps=3)
    whole = estimator.evaluate(arrays)
    if input_fn not in (infinite, of_tensorflow_infinite):
        for name in whole:
            np.testing.assert_allclose(results[name], whole[name], rtol=1e-5)
    predictions = estimator.predict(input_fn)
    rows = np.stack([next(predictions) for _ in range(len(X))])
    np.testing.assert_allclose(
        rows, np.stack(list(estimator.predict(arrays))), atol=1e-6
    )


@pytest.mark.parametrize(
    ("made", "error", "text"),
    [
        (None, TypeError, "Received: None"),
        (3, TypeError, "Received: 3"),
        ("a", TypeError, "Received: 'a'"),
        (iter([]), ValueError, "yields no batches"),
        ((X, Y, Y, Y), ValueError, "4 entries"),
        (({"a": X.tolist()}, Y.tolist()), TypeError, "of type tuple"),
        (({"a": X, "b": np.array(["b"] * 22)}, Y), TypeError, "strings in 'b'"),
        (({"a": X}, np.float32(1)), ValueError, "a scalar"),
        ({"a": X}, ValueError, "has no labels"),
        ((None, Y), TypeError, "None for the features"),
    ],
)
def test_input_that_is_none_is_refused(tmp_path, made, error, text):
    estimator = estimator_of(tmp_path)
    for method in (estimator.train, estimator.evaluate):
        with pytest.raises(error, match=text):
            method(lambda: made)
    assert estimator.latest_checkpoint() is None


def test_nested_features_have_names_of_their_own():
    features, _ = make_symbols(({"p": {"a": X}, "q": {"a": (X, X)}}, Y))
    names = [feature.name for feature in keras.tree.flatten(features)]
    assert names == ["p_a", "q_a_0", "q_a_1"]


def test_features_in_other_mappings_are_in_a_dict():
    features = collections.UserDict(a=X, b=collections.UserDict(c=X))
    made = call_input_fn(
        lambda: (features, Y),
        mode="train",
        params={},
        config=None,
        strategy=None,
    )
    symbols, _ = make_symbols(made.example)
    assert [symbols["a"].name, symbols["b"]["c"].name] == ["a", "b_c"]
    assert type(made.x) is dict


class Unknown:
    """As TensorFlow's `TensorShape(None)`."""

    def __len__(self):
        raise ValueError("unknown shape")


def test_data_without_a_shape_are_refused(tmp_path):
    class Shapeless:
        element_spec = types.SimpleNamespace(
            shape=Unknown(), dtype=np.dtype("float32")
        )

        def __iter__(self):
            return batches()

    with pytest.raises(ValueError, match="unknown shape"):
        estimator_of(tmp_path).train(Shapeless)


def test_arrays_that_end_before_the_steps_are_told_of(tmp_path):
    estimator = estimator_of(tmp_path)
    with pytest.warns(UserWarning, match="1 batches of rows for 4 steps"):
        estimator.train(arrays, steps=4)
    assert step_of(estimator) == 1


def test_a_distributed_dataset_is_predicted(tmp_path):
    class Read:
        def __iter__(self):
            return batches()

    strategy = strategy_of(2)
    estimator = estimator_of(tmp_path, eval_distribute=strategy)
    predictions = estimator.predict(
        lambda: strategy.experimental_distribute_dataset(Read())
    )
    np.testing.assert_allclose(
        np.stack(list(predictions)),
        np.stack(list(estimator.predict(batches))),
        atol=1e-6,
    )


def test_a_model_that_was_there_before_is_refused(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    estimator = Estimator(lambda mode: model, config=models.config_of(tmp_path))
    for method in (estimator.train, estimator.evaluate):
        with pytest.raises(ValueError, match="model_to_estimator"):
            method(lambda: (X, Y))


def test_functions_are_given_what_they_ask_for(tmp_path):
    calls = []

    def input_fn(params, config, mode):
        calls.append((params, config.model_dir, mode))
        return arrays()

    def model_fn(labels, features, mode, config):
        shapes = {name: f.shape for name, f in features.items()}
        calls.append(
            (shapes, getattr(labels, "shape", None), mode, config.model_dir)
        )
        return plain(features, labels, mode, {})

    estimator = Estimator(
        model_fn, config=models.config_of(tmp_path), params=None
    )
    estimator.train(input_fn, steps=1)
    estimator.evaluate(functools.partial(input_fn, params=7))
    next(estimator.predict(input_fn))
    directory, shapes = str(tmp_path), {"a": (None, 3)}
    assert calls == [
        ({}, directory, "train"),
        (shapes, (None, 1), "train", directory),
        (7, directory, "eval"),
        (shapes, (None, 1), "eval", directory),
        ({}, directory, "infer"),
        (shapes, None, "infer", directory),
    ]


class Batches:
    def __iter__(self):
        return models.batches_of(X[:16], Y[:16], size=4)


@pytest.mark.parametrize("replicas", [1, 2])
def test_input_context_makes_batches_of_a_replica(tmp_path, replicas):
    seen = []

    def input_fn(input_context, params):
        assert params == {}
        seen.append(input_context)
        return Batches()

    estimator = estimator_of(tmp_path, train_distribute=strategy_of(replicas))
    estimator.train(input_fn)
    context = seen[0]
    assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
    assert context.num_replicas_in_sync == replicas
    assert step_of(estimator) == 4 // replicas
    with pytest.raises(ValueError, match="must return a dataset"):
        estimator.train(lambda input_context: arrays())
    with pytest.raises(ValueError, match="can be read again"):
        estimator.train(lambda input_context: batches())


@pytest.mark.parametrize(
    ("model_fn", "text"),
    [
        (lambda features, labels: None, "must return an EstimatorSpec"),
        (
            lambda features, labels: keras.Sequential([keras.layers.Dense(1)]),
            "must be compiled",
        ),
        (
            lambda features, labels: ks.estimator.EstimatorSpec(
                "infer", model=models.Unbuilt(), predictions="a"
            ),
            "must have the mode",
        ),
    ],
)
def test_model_fn_returns_a_model(tmp_path, model_fn, text):
    estimator = Estimator(model_fn, config=models.config_of(tmp_path))
    with pytest.raises(ValueError, match=text):
        estimator.train(arrays)


def unbuilt(features, labels):
    model = models.Unbuilt()
    model.compile("adam", "mse")
    return model


def test_a_model_may_learn_its_inputs_from_the_data(tmp_path):
    estimator = Estimator(
        unbuilt,
        config=models.config_of(tmp_path, train_distribute=strategy_of(2)),
    )
    estimator.train(batches)
    weights = weights_of(estimator)
    (kernel,) = [w for name, w in weights.items() if "kernel" in name]
    (bias,) = [w for name, w in weights.items() if "bias" in name]
    expected = X @ kernel + bias
    results = estimator.evaluate(arrays)
    assert results["loss"] == pytest.approx(((expected - Y) ** 2).mean(), 1e-5)
    rows = np.stack(list(estimator.predict(arrays)))
    np.testing.assert_allclose(rows, expected, atol=1e-5)
    path = estimator.export_saved_model(tmp_path / "export", saved_model=False)
    assert os.path.exists(os.path.join(path, "model.keras"))


# EstimatorSpec.


class Answers(keras.callbacks.Callback):
    """Notes what it is told."""

    def __init__(self):
        super().__init__()
        self.told = []

    def on_train_begin(self, logs=None):
        self.told.append("train")

    def on_test_begin(self, logs=None):
        self.told.append("test")

    def on_predict_begin(self, logs=None):
        self.told.append("predict")

    def on_predict_batch_end(self, batch, logs=None):
        self.told.append((batch, logs["outputs"].shape))

    def on_predict_end(self, logs=None):
        self.told.append("end")


def both():
    return {"a": X}, np.concatenate([Y, -Y], axis=1)


def test_spec_names_metrics_and_has_hooks_by_mode(tmp_path):
    names = (
        "training_hooks",
        "training_chief_hooks",
        "evaluation_hooks",
        "prediction_hooks",
    )
    given = Answers()
    told = {name: Answers() for name in names}
    # Copies of parameters would be other callbacks.
    model_fn = lambda features, labels, mode, config: with_spec(  # noqa: E731
        features, labels, mode, {n: [told[n]] for n in names}, config
    )
    estimator = Estimator(model_fn, config=models.config_of(tmp_path))
    estimator.train(both, hooks=[given], steps=1)
    results = estimator.evaluate(both, hooks=[given])
    assert set(results) == {"loss", "mean_error", "own", "mae", "global_step"}
    assert results["mean_error"] == pytest.approx(results["mae"])
    list(estimator.predict(both, hooks=[given]))
    assert given.told == ["train", "test", "predict", (0, (22, 2)), "end"]
    assert [told[name].told for name in names] == [
        ["train"],
        ["train"],
        ["test"],
        ["predict", (0, (22, 2)), "end"],
    ]


def logits_of(estimator):
    weights = weights_of(estimator)
    return X @ weights["dense/kernel"] + weights["dense/bias"]


def symbols(features, labels, mode):
    outputs = keras.layers.Dense(2)(features["a"])
    return ks.estimator.EstimatorSpec(
        mode,
        model=keras.Model(features, outputs),
        predictions={
            "class": keras.ops.argmax(outputs, -1),
            "twice": outputs * 2,
        },
        loss="mse",
        train_op="sgd",
    )


@pytest.mark.parametrize(
    ("predictions", "expected"),
    [
        ("dense", lambda y: y),
        (["dense"], lambda y: {"dense": y}),
        (lambda y: y.sum(-1), lambda y: y.sum(-1)),
        (
            {"sum": lambda y: y.sum(-1), "all": None, "one": "dense"},
            lambda y: {"sum": y.sum(-1), "all": y, "one": y},
        ),
        (None, lambda y: {"class": y.argmax(-1), "twice": 2 * y}),
    ],
)
def test_predictions_are_what_the_spec_says(tmp_path, predictions, expected):
    config = models.config_of(tmp_path, eval_distribute=strategy_of(4))
    model_fn = symbols
    if predictions is not None:
        model_fn = lambda features, labels, mode, config: with_spec(  # noqa: E731
            features, labels, mode, {"predictions": predictions}, config
        )
    estimator = Estimator(model_fn, config=config)
    estimator.train(both, steps=1)
    wanted = expected(logits_of(estimator))
    rows = list(estimator.predict(batches))
    assert len(rows) == len(X)
    (whole,) = estimator.predict(both, yield_single_examples=False)
    for found in (
        keras.tree.map_structure(lambda *r: np.stack(r), *rows),
        whole,
    ):
        keras.tree.assert_same_structure(found, wanted)
        keras.tree.map_structure(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
            found,
            wanted,
        )


def test_some_predictions_are_chosen_by_their_keys(tmp_path):
    estimator = estimator_of(tmp_path, with_spec)
    estimator.train(both, steps=1)
    for keys, expected in (
        ("sum", {"sum"}),
        (["sum", "other"], {"sum"}),
        ([], {"sum", "both"}),
        (None, {"sum", "both"}),
    ):
        assert set(next(estimator.predict(both, keys))) == expected
    with pytest.raises(ValueError, match="at least one output"):
        next(estimator.predict(both, ["other"]))
    plain_one = estimator_of(tmp_path / "plain")
    with pytest.raises(ValueError, match="non-dict"):
        next(plain_one.predict(both, "sum"))


@pytest.mark.parametrize(
    ("predictions", "text"),
    [
        ("other", "has .'dense'"),
        ({"a": "other"}, "has .'dense'"),
        ({"a": lambda y: y[:3], "b": None}, "same number of rows"),
        (lambda y: y.sum(), "of type float32"),
        (lambda y: (y, y), "of type tuple"),
    ],
)
def test_predictions_that_do_not_fit_are_refused(tmp_path, predictions, text):
    estimator = Estimator(
        lambda features, mode, config: with_spec(
            features, None, mode, {"predictions": predictions}, config
        ),
        config=models.config_of(tmp_path),
    )
    with pytest.raises(ValueError, match=text):
        list(estimator.predict(lambda: {"a": X}))


def test_predictions_are_computed_as_they_are_asked_for(tmp_path):
    read = []

    def input_fn():
        for batch in infinite():
            read.append(len(batch[1]))
            yield batch

    predictions = estimator_of(tmp_path).predict(input_fn)
    assert read == []
    for _ in range(9):
        next(predictions)
    assert len(read) == 2
    predictions.close()


def metrics_fn(metrics, outputs=1):
    def model_fn(features, labels, mode):
        heads = [keras.layers.Dense(1)(features["a"]) for _ in range(outputs)]
        return ks.estimator.EstimatorSpec(
            mode,
            model=keras.Model(features, heads),
            loss="mse",
            eval_metric_ops=metrics,
        )

    return model_fn


def test_metric_of_another_name_keeps_its_arguments(tmp_path):
    class Constant(keras.metrics.Metric):
        """Has no `get_config`, as many of users' own."""

        def __init__(self, value=1.0, name="constant"):
            super().__init__(name=name)
            self.value = value

        def update_state(self, y_true, y_pred, sample_weight=None):
            pass

        def result(self):
            return keras.ops.convert_to_tensor(self.value)

    model_fn = metrics_fn({"group/five": Constant(5.0)})
    estimator = Estimator(model_fn, config=models.config_of(tmp_path))
    assert estimator.evaluate(arrays)["group/five"] == 5.0


TWICE = keras.metrics.MeanAbsoluteError()


@pytest.mark.parametrize(
    ("metrics", "outputs", "text"),
    [
        ({"a": "mse", "b": "mae"}, 2, "with one output.*metrics={"),
        ({"a": TWICE, "b": TWICE}, 1, "must have one name"),
    ],
)
def test_metrics_that_cannot_be_named_are_refused(
    tmp_path, metrics, outputs, text
):
    model_fn = metrics_fn(metrics, outputs)
    estimator = Estimator(model_fn, config=models.config_of(tmp_path))
    with pytest.raises(ValueError, match=text):
        estimator.evaluate(arrays)


# Evaluation and what is left of it.


def test_initial_weights_are_told_of(tmp_path, caplog):
    estimator = estimator_of(tmp_path)
    told = (
        f"There is no good checkpoint in {tmp_path}, so the initial weights "
        "are used."
    )
    estimator.evaluate(arrays, steps=1)
    assert warnings_of(caplog) == [told]
    next(estimator.predict(arrays))
    assert warnings_of(caplog) == [told] * 2
    (tmp_path / "3").mkdir()
    next(estimator.predict(arrays))
    assert "There is no good checkpoint in" in warnings_of(caplog)[-1]


def test_evaluation_notes_its_results(tmp_path):
    estimator = estimator_of(tmp_path)
    untrained = estimator.evaluate(arrays)
    assert untrained["global_step"] == 0
    estimator.train(infinite, steps=2)
    trained = estimator.evaluate(arrays)
    named = estimator.evaluate(batches, steps=1, name="first")
    assert estimator.eval_dir() == str(tmp_path / "eval")
    assert estimator.eval_dir("first") == str(tmp_path / "eval_first")
    kept = records.read(estimator.eval_dir())
    assert kept == {0: untrained, 2: trained}
    assert records.read(estimator.eval_dir("first")) == {2: named}
    assert named["loss"] != trained["loss"]
    # A look at an old checkpoint.
    path = estimator.latest_checkpoint()
    estimator.train(infinite, steps=2)
    assert estimator.evaluate(arrays, checkpoint_path=path) == trained


def test_event_files_are_written_as_the_config_says(tmp_path, caplog):
    pytest.importorskip("tensorboardX")
    caplog.set_level("INFO", "keras_strategies")
    estimator = estimator_of(
        tmp_path, save_summary_steps=2, log_step_count_steps=3
    )
    estimator.train(infinite, steps=4)
    estimator.evaluate(arrays, name="first")
    files = {
        str(path.parent.relative_to(tmp_path))
        for path in tmp_path.rglob("events.out.tfevents.*")
    }
    assert files == {".", "eval_first"}
    lines = [text for text in caplog.messages if text.startswith("step ")]
    assert [line.split(":")[0] for line in lines] == ["step 3", "step 4"]


def test_without_tensorboard_lines_are_logged(
    tmp_path, caplog, monkeypatch, request
):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    records._can_write.cache_clear()
    request.addfinalizer(records._can_write.cache_clear)
    caplog.set_level("INFO", "keras_strategies")
    estimator = estimator_of(
        tmp_path, save_summary_steps=2, log_step_count_steps=3
    )
    estimator.train(infinite, steps=4)
    estimator.evaluate(arrays)
    assert not list(tmp_path.rglob("events.out.tfevents.*"))
    lines = [text for text in caplog.messages if text.startswith("step ")]
    assert [line.split(":")[0] for line in lines] == ["step 3", "step 4"]
    told = warnings_of(caplog)
    # Not again by evaluate.
    assert len(told) == 1
    assert "`pip install tensorboardX`" in told[0]


def test_variables_are_those_of_the_newest_checkpoint(tmp_path):
    estimator = estimator_of(tmp_path)
    estimator.train(infinite, steps=3)
    names = estimator.get_variable_names()
    assert {
        "dense/kernel",
        "dense/bias",
        "dense_1/kernel",
        "global_step",
        "optimizer/adam/learning_rate",
    } <= set(names)
    assert names == sorted(names)
    assert estimator.get_variable_value("dense/kernel").shape == (3, 4)
    assert estimator.get_variable_value("global_step") == 3
    rate = estimator.get_variable_value("optimizer/adam/learning_rate")
    assert rate == np.float32(0.05)
    with pytest.raises(ValueError, match="get_variable_names"):
        estimator.get_variable_value("dense/color")


def test_names_do_not_depend_on_what_was_made_before(tmp_path):
    keras.layers.Dense(1)
    estimator = estimator_of(tmp_path)
    estimator.train(infinite, steps=1)
    names = estimator.get_variable_names()
    estimator.train(infinite, steps=1)
    assert estimator.get_variable_names() == names


# Warm start.


def test_warm_start_takes_weights_once(tmp_path):
    source = estimator_of(tmp_path / "source")
    source.train(infinite, steps=3)
    weights = weights_of(source)
    # Steps without an effect.
    frozen = {"rate": 0.0}
    for given in (
        source.latest_checkpoint(),
        ks.estimator.WarmStartSettings(source.model_dir),
    ):
        directory = tmp_path / "target"
        target = estimator_of(directory, params=frozen, warm=given)
        target.train(infinite, steps=1)
        assert step_of(target) == 1
        assert_equal_weights(weights_of(target), weights)
        shutil.rmtree(directory)
    target = estimator_of(tmp_path / "target", params=frozen)
    target.train(infinite, steps=1)
    own = weights_of(target)
    # Where there is a checkpoint, it counts.
    target = estimator_of(
        tmp_path / "target", params=frozen, warm=source.model_dir
    )
    target.train(infinite, steps=1)
    assert_equal_weights(weights_of(target), own)


def test_warm_start_takes_some_weights(tmp_path):
    source = estimator_of(tmp_path / "source")
    source.train(infinite, steps=3)
    weights = weights_of(source)
    frozen = {"rate": 0.0}
    target = estimator_of(
        tmp_path / "target",
        params=frozen,
        warm=ks.estimator.WarmStartSettings(
            source.model_dir,
            vars_to_warm_start="dense_1/.*",
            var_name_to_prev_var_name={"dense_1/bias": "dense_1/bias"},
        ),
    )
    target.train(infinite, steps=1)
    found = weights_of(target)
    equal = {n for n in found if np.array_equal(found[n], weights[n])}
    assert equal == {"dense_1/kernel", "dense_1/bias"}


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"ckpt_to_initialize_from": ""}, ValueError, "MUST be set"),
        ({"ckpt_to_initialize_from": 3}, TypeError, "must be a path"),
        ({"vars_to_warm_start": [3]}, TypeError, "regular expressions"),
        ({"vars_to_warm_start": "*a"}, re.error, "nothing to repeat"),
        ({"var_name_to_prev_var_name": ["a"]}, TypeError, "must be a dict"),
        ({"var_name_to_vocab_info": {"a": 1}}, ValueError, "not supported"),
    ],
)
def test_wrong_settings_are_refused(settings, error, text):
    given = {"ckpt_to_initialize_from": "a"} | settings
    with pytest.raises(error, match=text):
        ks.estimator.WarmStartSettings(**given)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"vars_to_warm_start": "color"}, "matches none"),
        (
            {"var_name_to_prev_var_name": {"color": "dense/bias"}},
            r"\['color'\], which are not among",
        ),
        (
            {"var_name_to_prev_var_name": {"dense/bias": "color"}},
            "'color', which is not in",
        ),
        (
            {"var_name_to_prev_var_name": {"dense/bias": "dense/kernel"}},
            "must match",
        ),
    ],
)
def test_weights_that_are_not_there_are_refused(tmp_path, settings, text):
    source = estimator_of(tmp_path / "source")
    source.train(infinite, steps=1)
    target = estimator_of(
        tmp_path / "target",
        warm=ks.estimator.WarmStartSettings(source.model_dir, **settings),
    )
    with pytest.raises(ValueError, match=text):
        target.train(infinite, steps=1)


def test_warm_start_needs_a_checkpoint(tmp_path):
    target = estimator_of(tmp_path / "a", warm=str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="needs a checkpoint"):
        target.train(infinite, steps=1)


# Roles.


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ps", "does not train"),
        ("evaluator", "does not train"),
        ("chief", "MultiWorkerMirroredStrategy"),
    ],
)
def test_training_alone_in_a_cluster_is_refused(
    tmp_path, monkeypatch, kind, text
):
    cluster = '{"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}'
    task = f'{{"type": "{kind}", "index": 0}}'
    monkeypatch.setenv("TF_CONFIG", f'{{"cluster": {cluster}, "task": {task}}}')
    with pytest.raises(ValueError, match=text):
        estimator_of(tmp_path).train(arrays)
