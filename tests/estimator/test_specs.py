"""TrainSpec, EvalSpec, EstimatorSpec and exporters: every check."""

import dataclasses
import functools
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.estimator import (
    exporters,
    exporting,
    records,
    train_callback,
)
from tests.support.pipes import read_a_pipe

pytestmark = pytest.mark.quick

EvalSpec = ks.estimator.EvalSpec
EstimatorSpec = ks.estimator.EstimatorSpec
ModeKeys = ks.estimator.ModeKeys
TrainSpec = ks.estimator.TrainSpec


def input_fn():
    return np.zeros((2, 1)), np.zeros((2, 1))


class SessionRunHook:
    """As tf's, whose methods they all have."""

    def begin(self):
        pass

    def after_create_session(self, session, coord):
        pass

    def before_run(self, run_context):
        pass

    def after_run(self, run_context, run_values):
        pass

    def end(self, session):
        pass


class Listener(ks.estimator.CheckpointSaverListener):
    pass


class Own(ks.estimator.Exporter):
    def __init__(self, name):
        self._name = name

    @property
    def name(self):
        return self._name

    def export(self, *args):
        return None


def test_modes_are_those_of_tf():
    modes = (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT)
    assert modes == ("train", "eval", "infer")


def test_train_spec():
    spec = TrainSpec(input_fn)
    assert (spec.max_steps, spec.hooks, spec.saving_listeners) == (None, (), ())
    hook, listener = keras.callbacks.TerminateOnNaN(), Listener()
    spec = TrainSpec(input_fn, 5, [hook], [listener])
    assert spec.input_fn is input_fn
    assert spec.max_steps == 5
    assert spec.hooks == (hook,)
    assert spec.saving_listeners == (listener,)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.max_steps = 6


def test_eval_spec():
    spec = EvalSpec(input_fn)
    assert dataclasses.asdict(spec) | {"input_fn": None} == {
        "input_fn": None,
        "steps": 100,
        "name": None,
        "hooks": (),
        "exporters": (),
        "start_delay_secs": 120,
        "throttle_secs": 600,
    }
    one, two = Own("a"), Own("b")
    assert EvalSpec(input_fn, exporters=one).exporters == (one,)
    assert EvalSpec(input_fn, exporters=iter([one, two])).exporters == (
        one,
        two,
    )
    spec = EvalSpec(input_fn, None, "test", None, [], 0, 0.5)
    assert (spec.steps, spec.name, spec.exporters) == (None, "test", ())
    assert (spec.start_delay_secs, spec.throttle_secs) == (0, 0.5)


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "text"),
    [
        (TrainSpec, {"input_fn": 3}, TypeError, "must be callable"),
        (TrainSpec, {"input_fn": input_fn()}, TypeError, "Wrap the data"),
        (TrainSpec, {"max_steps": 0}, ValueError, "`max_steps` must be > 0"),
        (TrainSpec, {"max_steps": -1}, ValueError, "`max_steps` must be > 0"),
        (TrainSpec, {"max_steps": 1.5}, TypeError, "must be an integer"),
        (TrainSpec, {"max_steps": True}, TypeError, "must be an integer"),
        (TrainSpec, {"hooks": [3]}, TypeError, "be Keras callbacks"),
        (TrainSpec, {"hooks": 3}, TypeError, "`hooks` must be a list"),
        (
            TrainSpec,
            {"hooks": [keras.callbacks.History]},
            TypeError,
            "`hooks` must be Keras callbacks",
        ),
        (
            TrainSpec,
            {"saving_listeners": [3]},
            TypeError,
            "`saving_listeners` must be `CheckpointSaverListener`s",
        ),
        (TrainSpec, {"saving_listeners": [Listener]}, TypeError, "a subclass"),
        (EvalSpec, {"input_fn": None}, TypeError, "must be callable"),
        (EvalSpec, {"steps": 0}, ValueError, "`steps` must be > 0"),
        (EvalSpec, {"steps": "1"}, TypeError, "must be an integer"),
        (EvalSpec, {"name": 3}, TypeError, "must be a str"),
        (EvalSpec, {"name": "../a"}, ValueError, "directory's name"),
        (EvalSpec, {"hooks": [3]}, TypeError, "`hooks` must be Keras"),
        (EvalSpec, {"start_delay_secs": -1}, ValueError, "must be >= 0"),
        (EvalSpec, {"start_delay_secs": None}, TypeError, "of seconds"),
        (EvalSpec, {"throttle_secs": -1}, ValueError, "secs` must be >= 0"),
        (EvalSpec, {"throttle_secs": float("nan")}, ValueError, "finite"),
        (EvalSpec, {"exporters": 3}, TypeError, "must be an Exporter"),
        (EvalSpec, {"exporters": "best"}, TypeError, "must be an Exporter"),
        (EvalSpec, {"exporters": [None]}, TypeError, "must be an Exporter"),
        (EvalSpec, {"exporters": [Own("a"), 3]}, TypeError, "an Exporter"),
        (EvalSpec, {"exporters": Own("")}, TypeError, "that is not empty"),
        (EvalSpec, {"exporters": Own(None)}, TypeError, "must be a str"),
        (EvalSpec, {"exporters": Own(3)}, TypeError, "must be a str"),
        (EvalSpec, {"exporters": Own("a/b")}, ValueError, "directory's name"),
        (EvalSpec, {"exporters": Own("..")}, ValueError, "directory's name"),
        (EvalSpec, {"exporters": [Own("a")] * 2}, ValueError, "unique names"),
    ],
)
def test_wrong_argument_of_a_spec_is_refused(kind, arguments, error, text):
    with pytest.raises(error, match=text) as raised:
        kind(**{"input_fn": input_fn} | arguments)
    assert "Received: " in str(raised.value)


def test_a_session_run_hook_is_refused():
    with pytest.raises(TypeError, match="docs/estimator.md lists"):
        TrainSpec(input_fn, hooks=[SessionRunHook()])


def model(is_compiled=False):
    made = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    if is_compiled:
        made.compile("sgd", "mse", metrics=["mae"])
    return made


def spec_of(mode=ModeKeys.TRAIN, is_compiled=False, **fields):
    return EstimatorSpec(mode, model=model(is_compiled), **fields)


def test_estimator_spec_has_the_fields_of_tf():
    names = [field.name for field in dataclasses.fields(EstimatorSpec)]
    assert names == [
        *("mode", "predictions", "loss", "train_op", "eval_metric_ops"),
        *("export_outputs", "training_chief_hooks", "training_hooks"),
        *("scaffold", "evaluation_hooks", "prediction_hooks", "model"),
    ]


@pytest.mark.parametrize(
    ("mode", "fields"),
    [
        ("train", {"loss": "mse", "train_op": "sgd"}),
        ("train", {"is_compiled": True}),
        ("eval", {"loss": keras.losses.MeanSquaredError()}),
        ("eval", {"loss": lambda y, p: (y - p) ** 2}),
        ("eval", {"is_compiled": True}),
        ("infer", {"predictions": "dense"}),
        ("infer", {"predictions": ["a", "b"]}),
        ("infer", {"predictions": np.argmax}),
        ("infer", {"predictions": {"class": np.argmax, "logits": None}}),
        ("eval", {"loss": "mse", "eval_metric_ops": {"a": "mae"}}),
        (
            "eval",
            {
                "loss": "mse",
                "eval_metric_ops": {"a": keras.metrics.MeanAbsoluteError()},
            },
        ),
    ],
)
def test_good_estimator_spec(mode, fields):
    spec = spec_of(mode, **fields)
    assert spec.mode == mode
    assert spec.training_hooks == spec.evaluation_hooks == ()


TENSOR = np.zeros(3)


@pytest.mark.parametrize(
    ("mode", "fields", "error", "text"),
    [
        ("training", {}, ValueError, "`mode` must be one of"),
        ("train", {"train_op": "sgd"}, ValueError, "Missing loss"),
        ("train", {"loss": "mse"}, ValueError, "Missing train_op"),
        ("eval", {}, ValueError, "Missing loss"),
        ("infer", {}, ValueError, "Missing predictions"),
        ("infer", {"is_compiled": True}, ValueError, "Missing predictions"),
        (
            "train",
            {"is_compiled": True, "loss": "mse"},
            ValueError,
            "must not set the loss",
        ),
        (
            "eval",
            {"is_compiled": True, "eval_metric_ops": {"a": "mae"}},
            ValueError,
            "must not set the loss",
        ),
        ("eval", {"loss": TENSOR}, TypeError, "Graph tensors"),
        (
            "train",
            {"loss": "mse", "train_op": TENSOR},
            TypeError,
            "Graph tensors",
        ),
        ("infer", {"predictions": TENSOR}, TypeError, "Graph tensors"),
        ("infer", {"predictions": {"a": TENSOR}}, TypeError, "Graph tensors"),
        (
            "eval",
            {"loss": "mse", "eval_metric_ops": ["mae"]},
            TypeError,
            "`eval_metric_ops` must be a dict",
        ),
        (
            "eval",
            {"loss": "mse", "eval_metric_ops": {"a": (TENSOR, TENSOR)}},
            TypeError,
            "Graph tensors",
        ),
        (
            "infer",
            {"predictions": "a", "export_outputs": {"serving": 1}},
            ValueError,
            "export_outputs` is not supported",
        ),
        (
            "eval",
            {"loss": "mse", "scaffold": object()},
            ValueError,
            "`scaffold` is not supported",
        ),
        (
            "eval",
            {"loss": "mse", "eval_metric_ops": {"loss": "mae"}},
            ValueError,
            "name 'loss' is not allowed",
        ),
    ],
)
def test_wrong_estimator_spec_is_refused(mode, fields, error, text):
    with pytest.raises(error, match=text):
        spec_of(mode, **fields)


@pytest.mark.parametrize(
    "kind", ["training", "training_chief", "evaluation", "prediction"]
)
def test_hooks_of_an_estimator_spec_are_callbacks(kind):
    text = f"`{kind}_hooks` must be Keras callbacks"
    with pytest.raises(TypeError, match=text):
        spec_of("eval", loss="mse", **{f"{kind}_hooks": [SessionRunHook()]})


@pytest.mark.parametrize("given", [None, 3, keras.Sequential])
def test_an_estimator_spec_has_a_model(given):
    with pytest.raises(TypeError, match="`model` must be a Keras model"):
        EstimatorSpec("train", loss="mse", train_op="sgd", model=given)


@pytest.mark.parametrize(
    "name", ["DNNClassifier", "LinearRegressor", "BinaryClassHead"]
)
def test_canned_estimators_are_told_of(name):
    with pytest.raises(
        AttributeError, match=f"`ks.estimator.{name}`.*model_to"
    ):
        getattr(ks.estimator, name)
    assert not hasattr(ks.estimator, name)
    assert name not in dir(ks.estimator)


def test_exporters_have_the_defaults_of_tf():
    assert exporters.BestExporter().name == "best_exporter"
    assert exporters.LatestExporter("a")._exports_to_keep == 5
    assert exporters.FinalExporter("a").name == "a"


def best(best_eval_result, current_eval_result, more):
    return bool(more)


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "text"),
    [
        ("BestExporter", {"exports_to_keep": 0}, ValueError, "> 0"),
        ("BestExporter", {"exports_to_keep": 0.5}, TypeError, "integer"),
        ("LatestExporter", {"exports_to_keep": -1}, ValueError, "> 0"),
        ("BestExporter", {"compare_fn": None}, TypeError, "callable"),
        (
            "BestExporter",
            {"compare_fn": lambda best_eval_result: True},
            TypeError,
            "argument 'current_eval_result'",
        ),
        ("BestExporter", {"compare_fn": best}, TypeError, "'more'"),
        (
            "FinalExporter",
            {"assets_extra": {"a": "b"}},
            ValueError,
            "`assets_extra` is not supported",
        ),
        ("FinalExporter", {"as_text": True}, ValueError, "`as_text` is not"),
        (
            "FinalExporter",
            {"serving_input_receiver_fn": input_fn},
            ValueError,
            "is not supported",
        ),
        (
            "LatestExporter",
            {"serving_input_receiver_fn": input_fn},
            ValueError,
            "is not supported",
        ),
        ("BestExporter", {"as_text": True}, ValueError, "`as_text` is not"),
    ],
)
def test_wrong_argument_of_an_exporter_is_refused(kind, arguments, error, text):
    with pytest.raises(error, match=text):
        getattr(ks.estimator, kind)(**{"name": "a"} | arguments)


def test_arguments_of_a_partial_function_are_given():
    exporters.BestExporter(compare_fn=functools.partial(best, more=1))


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [(1, 0.5, True), (1, 1, False), (0, 1, False)],
)
def test_the_smaller_loss_is_better(before, now, expected):
    results = ({"loss": before}, {"loss": now, "a": 1})
    assert exporters.has_smaller_loss(*results) is expected


def test_results_of_evaluations_are_read_back(tmp_path, caplog):
    directory = str(tmp_path / "eval")
    assert records.read(directory) == {}
    records.append(directory, 20, {"loss": np.float32(0.5), "name": "x"})
    records.append(directory, 10, {"loss": 0.1, "mean": np.zeros(3)})
    records.append(directory, 20, {"mae": 1})
    file = tmp_path / "eval" / records.FILE
    with file.open("ab") as opened:
        opened.write(b'{"global_step": 30, "met')  # Killed.
    records.append(directory, 40, {"loss": float("nan")})
    found = records.read(directory)
    assert list(found) == [10, 20, 40]
    assert found[20] == {"loss": 0.5, "mae": 1.0}
    assert found[10] == {"loss": 0.1}
    assert np.isnan(found[40]["loss"])
    assert "Line 4" in caplog.text


FOREIGN = [
    b"",
    b"[" * 100_000,
    b"\xff\xfe",
    b"null",
    b"3",
    b"[1]",
    b'{"a": 1}',
    b'{"ended_at_step": "7"}',
    b'{"ended_at_step": 1e999}',
    b'{"ended_at_step": true}',
    b'{"global_step": 1, "metrics": [1]}',
    b'{"global_step": 1e999, "metrics": {}}',
    b'{"global_step": 1, "metrics": {"loss": "1"}}',
    b'{"global_step": 1, "metrics": {"loss": 1' + b"0" * 4000 + b"}}",
    b'{"named": "os:system", "items": [{"dtype": "int8", "shape": []}]}',
    b" " * (2 << 20),
]


@pytest.mark.parametrize("text", FOREIGN, ids=lambda text: str(text[:30]))
def test_files_that_others_wrote_are_left_out(tmp_path, caplog, text):
    directory = str(tmp_path)
    (tmp_path / exporting.FEATURES).write_bytes(text)
    (tmp_path / train_callback.MARK).write_bytes(text)
    (tmp_path / records.FILE).write_bytes(text + b"\n")
    if text != b"null":
        # What `null` says is that there are no features.
        assert exporting.read_features(directory) is None
        assert exporting.FEATURES in caplog.text
    assert train_callback.read_end_step(directory) is None
    assert records.read(directory) == {}
    records.append(directory, 3, {"loss": 0.5})
    assert records.read(directory) == {3: {"loss": 0.5}}


def test_pipes_in_the_place_of_files_are_not_waited_for(tmp_path):
    directory = str(tmp_path)

    def noted():
        return exporting.read_features(directory)

    def ended():
        return train_callback.read_end_step(directory)

    def evaluated():
        with pytest.raises(OSError, match="must be a regular file"):
            records.read(directory)

    for name, read in (
        (exporting.FEATURES, noted),
        (train_callback.MARK, ended),
        (records.FILE, evaluated),
    ):
        assert read_a_pipe(tmp_path / name, read) is None
    exporting.write_features(directory, {"x": keras.Input((3,))})
    assert noted()["x"].shape == (0, 3)


@pytest.mark.parametrize("text", [b"\xff\xfe", b"", b"[" * 9999])
def test_damaged_features_are_written_anew(tmp_path, text):
    (tmp_path / exporting.FEATURES).write_bytes(text)
    exporting.write_features(str(tmp_path), {"x": keras.Input((3,))})
    assert exporting.read_features(str(tmp_path))["x"].shape == (0, 3)


def test_features_of_a_class_are_not_written_down(tmp_path):
    features = Features(keras.Input((3,)))
    exporting.write_features(str(tmp_path), features)
    assert not (tmp_path / exporting.FEATURES).exists()
    exporting.write_features(str(tmp_path), {"x": keras.Input((3,))})
    assert exporting.read_features(str(tmp_path))["x"].shape == (0, 3)


class Features(NamedTuple):
    x: Any
