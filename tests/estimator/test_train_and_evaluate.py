"""train_and_evaluate, exporters, early stopping, model_to_estimator."""

import json
import os
import pathlib

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.estimator import records, train_callback, train_evaluate
from keras_strategies.estimator.contrib import early_stopping
from tests.estimator import models
from tests.estimator.models import (
    X,
    Y,
    arrays,
    batches,
    estimator_of,
    infinite,
    weights_of,
)
from tests.support.combinations import combine, few

experimental = ks.estimator.experimental
CLUSTER = {"chief": ["a:1"], "worker": ["b:1"]}


def eval_spec(**fields):
    given = {"steps": None, "start_delay_secs": 0, "throttle_secs": 0}
    return ks.estimator.EvalSpec(arrays, **given | fields)


def run(estimator, max_steps=5, hooks=None, listeners=None, **fields):
    train_spec = ks.estimator.TrainSpec(infinite, max_steps, hooks, listeners)
    return ks.estimator.train_and_evaluate(
        estimator, train_spec, eval_spec(**fields)
    )


def evaluated(estimator):
    return list(records.read(estimator.eval_dir()))


class Notes(ks.estimator.Exporter):
    """Notes what it is called with."""

    def __init__(self, name="notes"):
        self.name_ = name
        self.calls = []

    @property
    def name(self):
        return self.name_

    def export(
        self,
        estimator,
        export_path,
        checkpoint_path,
        eval_result,
        is_the_final_export,
    ):
        step = int(pathlib.Path(checkpoint_path).name)
        assert eval_result["global_step"] == step
        assert export_path == os.path.join(
            estimator.model_dir, "export", self.name
        )
        self.calls.append((step, is_the_final_export))
        return f"{self.name}-{step}"


@pytest.mark.parametrize("position", range(3))
def test_wrong_argument_is_refused(tmp_path, position):
    arguments = [
        estimator_of(tmp_path),
        ks.estimator.TrainSpec(infinite, 1),
        eval_spec(),
    ]
    arguments[position] = None
    names = ["Estimator", "TrainSpec", "EvalSpec"]
    with pytest.raises(TypeError, match=f"ks.estimator.{names[position]}`"):
        ks.estimator.train_and_evaluate(*arguments)


def test_each_checkpoint_is_evaluated_and_exported(tmp_path):
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    estimator = estimator_of(
        tmp_path, save_checkpoints_steps=2, train_distribute=strategy
    )
    one, two = Notes("one"), Notes("two")
    metrics, exports = run(estimator, exporters=[one, two])
    assert evaluated(estimator) == [2, 4, 5]
    assert one.calls == two.calls == [(2, False), (4, False), (5, True)]
    assert exports == ["one-5", "two-5"]
    assert metrics == estimator.evaluate(arrays)
    # Again: nothing is trained, and what was exported last is again.
    assert run(estimator, exporters=[one]) == (metrics, ["one-5"])
    assert one.calls[-2:] == [(5, True), (5, True)]
    # It goes on.
    metrics, _ = run(estimator, max_steps=7)
    assert metrics["global_step"] == 7
    assert evaluated(estimator) == [2, 4, 5, 6, 7]


def test_evaluations_are_no_more_often_than_asked_for(tmp_path):
    estimator = estimator_of(tmp_path, save_checkpoints_steps=1)
    exporter = Notes()
    run(estimator, exporters=exporter, throttle_secs=1000)
    assert exporter.calls == [(1, False), (5, True)]


def test_without_max_steps_it_trains_on_all_data(tmp_path):
    estimator = estimator_of(tmp_path)
    exporter = Notes()
    metrics, _ = ks.estimator.train_and_evaluate(
        estimator,
        ks.estimator.TrainSpec(batches),
        eval_spec(exporters=exporter),
    )
    assert metrics["global_step"] == 3
    assert exporter.calls == [(3, False)]


def test_an_evaluation_changes_nothing_of_the_training(tmp_path):
    alone = estimator_of(tmp_path / "a", save_checkpoints_steps=2)
    alone.train(infinite, max_steps=5)
    estimator = estimator_of(tmp_path / "b", save_checkpoints_steps=2)
    run(estimator)
    models.assert_equal_weights(weights_of(estimator), weights_of(alone))


# Exporters.


def test_exports_are_models_that_keras_loads(tmp_path):
    estimator = estimator_of(tmp_path / "model")
    estimator.train(infinite, steps=2)
    base = tmp_path / "export"
    paths = [
        estimator.export_saved_model(base, saved_model=False) for _ in range(2)
    ]
    assert len(set(paths)) == 2
    assert sorted(map(str, base.iterdir())) == sorted(paths)
    assert [len(os.path.basename(path)) for path in paths] == [10, 10]
    model = keras.saving.load_model(os.path.join(paths[0], "model.keras"))
    rows = np.stack(list(estimator.predict(arrays)))
    found = model.predict({"a": X}, verbose=0)
    np.testing.assert_allclose(found, rows, atol=1e-6)
    # Another process knows no data.
    fresh = estimator_of(tmp_path / "model")
    for mask in (0o077, 0o027, 0):
        before = os.umask(mask)
        try:
            path = fresh.export_saved_model(base, saved_model=False)
        finally:
            os.umask(before)
        assert modes_of(path) == {
            "": 0o755 & ~mask,
            "model.keras": 0o666 & ~mask,
        }


def modes_of(directory):
    found = {"": directory} | {
        os.path.relpath(path, directory): path
        for path in pathlib.Path(directory).rglob("*")
    }
    return {name: os.stat(path).st_mode & 0o777 for name, path in found.items()}


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"assets_extra": {"a": "b"}}, ValueError, "`assets_extra` is not"),
        ({"as_text": True}, ValueError, "`as_text` is not"),
        ({"serving_input_receiver_fn": arrays}, ValueError, "not supported"),
        ({"experimental_mode": "a"}, ValueError, "must be one of"),
        (
            {"checkpoint_path": "/nowhere/3"},
            ValueError,
            "the directory does not exist",
        ),
    ],
)
def test_wrong_export_is_refused_and_leaves_nothing(
    tmp_path, arguments, error, text
):
    estimator = estimator_of(tmp_path)
    with pytest.raises(error, match=text):
        estimator.export_saved_model(tmp_path / "export", **arguments)
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("base", ["file", "file/export"])
def test_export_into_a_file_is_refused(tmp_path, base):
    estimator = estimator_of(tmp_path / "model")
    estimator.train(infinite, steps=1)
    (tmp_path / "file").write_text("mine")
    with pytest.raises((FileExistsError, NotADirectoryError), match="file"):
        estimator.export_saved_model(tmp_path / base, saved_model=False)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.slow
def test_a_saved_model_is_served_by_tensorflow(tmp_path):
    tensorflow = pytest.importorskip("tensorflow")
    estimator = estimator_of(tmp_path)
    estimator.train(infinite, steps=2)
    before = os.umask(0o077)
    try:
        path = estimator.export_saved_model(tmp_path / "export")
    finally:
        os.umask(before)
    assert not [mode for mode in modes_of(path).values() if mode & 0o077]
    served = tensorflow.saved_model.load(path)
    rows = np.stack(list(estimator.predict(arrays)))
    np.testing.assert_allclose(served.serve({"a": X}), rows, atol=1e-6)


def test_best_exporter_keeps_the_best_also_after_a_restart(tmp_path):
    estimator = estimator_of(tmp_path / "model")
    estimator.train(infinite, steps=1)
    path = estimator.latest_checkpoint()

    def export(exporter, loss, step):
        result = {"loss": loss, "global_step": step}
        records.append(estimator.eval_dir(), step, result)
        base = str(tmp_path / "best")
        return exporter.export(estimator, base, path, result, False)

    def made(**arguments):
        return ks.estimator.BestExporter(
            exports_to_keep=2, saved_model=False, **arguments
        )

    exporter = made()
    exported = [export(exporter, loss, 1) for loss in (0.5, 0.7, 0.4, 0.3)]
    assert [bool(path) for path in exported] == [True, False, True, True]
    kept = {str(path) for path in (tmp_path / "best").iterdir()}
    assert kept == set(exported[2:])
    # Another process.
    assert export(made(), 0.35, 2) is None
    assert export(made(), 0.2, 3)
    assert export(made(event_file_pattern=None), 0.9, 4)
    assert export(made(event_file_pattern="eval_other/*"), 0.9, 5)


def test_final_and_latest_exporters(tmp_path):
    estimator = estimator_of(tmp_path / "model", save_checkpoints_steps=1)
    (tmp_path / "model").mkdir()
    latest = ks.estimator.LatestExporter(
        "latest", exports_to_keep=1, saved_model=False
    )
    final = ks.estimator.FinalExporter("final", saved_model=False)
    _, exports = run(estimator, max_steps=2, exporters=[latest, final])
    for exporter, path in zip((latest, final), exports, strict=True):
        directory = tmp_path / "model" / "export" / exporter.name
        assert [str(entry) for entry in directory.iterdir()] == [path]


# Roles of TF_CONFIG.


def in_role(monkeypatch, kind, index=0):
    task = {"type": kind, "index": index}
    config = json.dumps({"cluster": CLUSTER, "task": task})
    monkeypatch.setenv("TF_CONFIG", config)


def test_an_evaluator_follows_until_the_last_step(tmp_path, monkeypatch):
    estimator_of(tmp_path, save_checkpoints_steps=2).train(
        infinite, max_steps=5
    )
    in_role(monkeypatch, "evaluator")
    estimator = estimator_of(tmp_path)
    exporter = Notes()
    metrics, exports = run(estimator, max_steps=5, exporters=exporter)
    assert metrics["global_step"] == 5
    assert exports == ["notes-5"]
    assert exporter.calls == [(5, True)]


def test_an_evaluator_ends_with_a_training_that_stops_early(
    tmp_path, monkeypatch
):
    trainer = estimator_of(tmp_path)
    trainer.train(infinite, max_steps=2)
    in_role(monkeypatch, "evaluator")
    estimator = estimator_of(tmp_path)
    monkeypatch.setattr(train_evaluate, "_POLL_S", 0.0)

    class Goes(Notes):
        """The training goes on, and stops, while it is exported."""

        def export(self, **arguments):
            if arguments["eval_result"]["global_step"] == 2:
                trainer.train(infinite, steps=1)
            return super().export(**arguments)

    exporter = Goes()
    run(estimator, max_steps=100, exporters=exporter)
    assert exporter.calls == [(2, False), (3, False)]


def test_an_evaluator_waits_no_longer_than_asked_for(tmp_path, monkeypatch):
    trainer = estimator_of(tmp_path)
    in_role(monkeypatch, "evaluator")
    estimator = estimator_of(tmp_path, session_creation_timeout_secs=0.01)
    with pytest.raises(RuntimeError, match="no checkpoint in"):
        run(estimator)
    trainer.train(infinite, steps=1)
    # Of an earlier training, which nobody goes on with.
    metrics, _ = run(estimator, max_steps=100)
    assert metrics["global_step"] == 1


@pytest.mark.parametrize(
    ("cluster", "is_evaluated", "count"),
    few(
        [
            ({"worker": ["a:1"]}, False, 1),
            ({"chief": ["a:1"]}, False, 1),
            # As by an evaluator that is none of the cluster.
            ({"chief": ["a:1"]}, True, 0),
            ({"worker": ["a:1"], "evaluator": ["b:1"]}, False, 0),
        ],
        every=2,
    ),
)
def test_a_cluster_without_an_evaluator_is_reported_once(
    tmp_path, monkeypatch, caplog, cluster, is_evaluated, count
):
    task = {"type": next(iter(cluster)), "index": 0}
    text = json.dumps({"cluster": cluster, "task": task})
    monkeypatch.setenv("TF_CONFIG", text)
    strategy = ks.MultiWorkerMirroredStrategy()
    estimator = estimator_of(tmp_path, train_distribute=strategy)
    if is_evaluated:
        pathlib.Path(estimator.eval_dir()).mkdir(parents=True)
    assert run(estimator, max_steps=1) == (None, [])
    assert caplog.text.count("No evaluator was found") == count


@pytest.mark.parametrize(
    ("kind", "index", "text"),
    [
        ("evaluator", 1, "only be one `evaluator`"),
        ("worker", 0, "MultiWorkerMirroredStrategy"),
        ("chief", 0, "MultiWorkerMirroredStrategy"),
    ],
)
def test_role_that_has_no_part_is_refused(
    tmp_path, monkeypatch, kind, index, text
):
    in_role(monkeypatch, kind, index)
    with pytest.raises(ValueError, match=text):
        run(estimator_of(tmp_path))


def test_a_parameter_server_is_refused(tmp_path, monkeypatch):
    cluster = CLUSTER | {"ps": ["c:1"]}
    task = {"type": "ps", "index": 0}
    text = json.dumps({"cluster": cluster, "task": task})
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match="Task type ps is not supported"):
        run(estimator_of(tmp_path))


# Early stopping.

NO_SECS = {"run_every_secs": None}
RISING = {0: {"a": 1.0}, 10: {"a": 3.0}, 20: {"a": 2.0}, 30: {"a": 3.0}}


@pytest.mark.parametrize(
    ("threshold", "min_steps", "expected"),
    [(2.5, 0, True), (3.0, 0, False), (2.5, 31, False), (2.5, 30, True)],
)
def test_threshold(threshold, min_steps, expected):
    higher = lambda a, b: a > b  # noqa: E731
    values = early_stopping.iter_values(RISING, "a", min_steps)
    found = early_stopping._make_threshold_rule(threshold, higher)(values)
    assert found is expected


@pytest.mark.parametrize(
    ("max_steps", "min_steps", "expected"),
    [(20, 0, True), (21, 0, False), (10, 20, False), (10, 10, True), (0, 0, 1)],
)
def test_no_improvement(max_steps, min_steps, expected):
    higher = lambda a, b: a > b  # noqa: E731
    values = early_stopping.iter_values(RISING, "a", min_steps)
    found = early_stopping.has_stalled(values, max_steps, higher)
    assert found == bool(expected)


@pytest.mark.parametrize(
    ("hook", "arguments"),
    [
        ("stop_if_higher_hook", ("loss", 0.0)),
        ("stop_if_lower_hook", ("loss", 1e9)),
        ("stop_if_no_decrease_hook", ("global_step", 2)),
        ("stop_if_no_increase_hook", ("epoch", 2)),
    ],
)
def test_training_ends_when_results_say_so(tmp_path, hook, arguments):
    estimator = estimator_of(tmp_path, save_checkpoints_steps=1)
    # Of this kind there is one that never changes.
    for step in (1, 2, 3):
        result = {"epoch": 1.0, "loss": 0.5, "global_step": step}
        records.append(estimator.eval_dir(), step, result)
    made = getattr(experimental, hook)(
        estimator, *arguments, run_every_secs=None, run_every_steps=2
    )
    estimator.train(infinite, steps=9, hooks=[made])
    # It is asked after the first step, as in tf, and not only after two.
    assert int(estimator.get_variable_value("global_step")) == 1


def test_whether_to_stop_is_asked_every_so_many_steps(tmp_path):
    estimator = estimator_of(tmp_path)
    asked = []
    made = experimental.make_early_stopping_hook(
        estimator,
        lambda: asked.append(train_callback.find_global_step(made.model)),
        run_every_secs=None,
        run_every_steps=3,
    )
    estimator.train(infinite, steps=8, hooks=[made])
    assert asked == [1, 4, 7]


def test_early_stopping_in_train_and_evaluate(tmp_path):
    estimator = estimator_of(tmp_path, save_checkpoints_steps=2)
    hook = experimental.stop_if_lower_hook(
        estimator, "loss", 1e9, min_steps=4, run_every_secs=0
    )
    metrics, _ = run(estimator, max_steps=20, hooks=[hook])
    # The fourth step is evaluated after it; the fifth one sees that.
    assert metrics["global_step"] == 5
    assert train_callback.read_end_step(estimator.model_dir) == 5


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"estimator": 3}, TypeError, "be a `ks.estimator.Estimator`"),
        ({"run_every_steps": 3}, ValueError, "Exactly one of"),
        (NO_SECS, ValueError, "Exactly one of"),
        ({**NO_SECS, "run_every_steps": 0}, ValueError, "steps` must be > 0"),
        ({"run_every_secs": -1}, ValueError, ">= 0"),
    ],
)
def test_wrong_hook_is_refused(tmp_path, arguments, error, text):
    given = {
        "estimator": estimator_of(tmp_path),
        "should_stop_fn": lambda: True,
    }
    with pytest.raises(error, match=text):
        experimental.make_early_stopping_hook(**given | arguments)


def test_result_that_is_not_there_is_named(tmp_path):
    estimator = estimator_of(tmp_path)
    records.append(estimator.eval_dir(), 1, {"loss": 1.0})
    hook = experimental.stop_if_lower_hook(estimator, "color", 1)
    with pytest.raises(ValueError, match="'color'; the results are .'loss'"):
        estimator.train(infinite, steps=2, hooks=[hook])
    for arguments in ((3, 1), ("loss", "a")):
        with pytest.raises(TypeError):
            experimental.stop_if_lower_hook(estimator, *arguments)


@pytest.mark.parametrize(
    "replicas", [pytest.param(1, marks=pytest.mark.slow), 2]
)
def test_in_memory_evaluation_is_that_of_a_checkpoint(tmp_path, replicas):
    devices = [f"cpu:{i}" for i in range(replicas)]
    estimator = estimator_of(
        tmp_path,
        save_checkpoints_steps=2,
        train_distribute=ks.MirroredStrategy(devices),
    )
    hook = experimental.InMemoryEvaluatorHook(
        estimator, arrays, name="memory", every_n_iter=2
    )
    estimator.train(infinite, steps=5, hooks=[hook])
    found = records.read(estimator.eval_dir("memory"))
    assert list(found) == [0, 2, 4, 5]
    for step in (2, 4, 5):
        path = str(tmp_path / str(step))
        expected = estimator.evaluate(arrays, checkpoint_path=path)
        assert found[step] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"estimator": 3}, TypeError, "be a `ks.estimator.Estimator`"),
        ({"input_fn": 3}, TypeError, "must be callable"),
        ({"every_n_iter": None}, TypeError, "`every_n_iter` must be an int"),
        ({"every_n_iter": 0}, ValueError, "`every_n_iter` must be > 0"),
        ({"steps": 0}, ValueError, "`steps` must be > 0"),
        ({"hooks": [3]}, TypeError, "`hooks` must be Keras callbacks"),
    ],
)
def test_wrong_in_memory_hook_is_refused(tmp_path, arguments, error, text):
    given = {"estimator": estimator_of(tmp_path), "input_fn": arrays}
    with pytest.raises(error, match=text):
        experimental.InMemoryEvaluatorHook(**given | arguments)


# model_to_estimator.


def keras_model():
    inputs = keras.Input((3,), name="a")
    outputs = keras.layers.Dense(1, name="out")(inputs)
    model = keras.Model({"a": inputs}, outputs)
    optimizer = keras.optimizers.Adam(0.01, name="adam")
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("by_path", combine([False, True], every=2))
def test_an_estimator_of_a_model_begins_with_its_weights(tmp_path, by_path):
    model = keras_model()
    model.fit({"a": X}, Y, verbose=0)
    before = model.get_weights()
    expected = model.evaluate({"a": X}, Y, return_dict=True, verbose=0)
    config = models.config_of(
        tmp_path / "run", train_distribute=ks.MirroredStrategy(["cpu:0"])
    )
    given = {"keras_model": model}
    if by_path:
        model.save(tmp_path / "model.keras")
        given = {"keras_model_path": tmp_path / "model.keras"}
    estimator = ks.estimator.model_to_estimator(**given, config=config)
    found = estimator.evaluate(arrays)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["mae"] == pytest.approx(expected["mae"], rel=1e-5)
    (first, *_) = estimator.predict(arrays)
    np.testing.assert_allclose(
        first["out"], model.predict({"a": X}, verbose=0)[0], atol=1e-6
    )
    estimator.train(infinite, steps=2)
    assert estimator.get_variable_value("optimizer/adam/iteration") == 3
    assert not np.array_equal(weights_of(estimator)["out/kernel"], before[0])
    for value, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, old)


def not_compiled():
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])


def not_built():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: {}, ValueError, "Either `keras_model` or"),
        (
            lambda: {"keras_model": keras_model(), "keras_model_path": "a"},
            ValueError,
            "Either `keras_model` or",
        ),
        (lambda: {"keras_model": not_compiled()}, ValueError, "be compiled"),
        (lambda: {"keras_model": not_built()}, ValueError, "no weights yet"),
        (lambda: {"keras_model": 3}, TypeError, "must be a Keras model"),
        (lambda: {"keras_model_path": 3}, TypeError, "must be a path"),
        (lambda: {"keras_model_path": "a.h5"}, ValueError, "`.keras` file"),
        (
            lambda: {"keras_model_path": "nowhere.keras"},
            FileNotFoundError,
            "nowhere",
        ),
        (
            lambda: {"keras_model": keras_model(), "export_outputs": {}},
            ValueError,
            "is not supported",
        ),
        (
            lambda: {"keras_model": keras_model(), "metric_names_map": {}},
            ValueError,
            "is not supported",
        ),
    ],
)
def test_wrong_argument_of_model_to_estimator(tmp_path, make, error, text):
    with pytest.raises(error, match=text):
        ks.estimator.model_to_estimator(**make(), model_dir=tmp_path)


def test_the_output_of_a_sequential_model_has_its_last_layer_s_name(tmp_path):
    layers = [keras.Input((3,)), keras.layers.Dense(1, name="price")]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    estimator = ks.estimator.model_to_estimator(
        model, config=models.config_of(tmp_path)
    )
    x = models.X[:4]
    found = list(estimator.predict(lambda: x))
    np.testing.assert_allclose(
        [row["price"] for row in found], model(x), atol=1e-6
    )


def test_public_names():
    names = {
        *("BestExporter", "CheckpointSaverListener", "Estimator"),
        *("EstimatorSpec", "EvalSpec", "Exporter", "FinalExporter"),
        *("LatestExporter", "ModeKeys", "RunConfig", "TrainSpec"),
        *("WarmStartSettings", "experimental"),
        *("model_to_estimator", "train_and_evaluate"),
    }
    assert set(ks.estimator._MODULES) == names
    assert names <= set(dir(ks.estimator))
    experimental_names = {
        "InMemoryEvaluatorHook",
        "make_early_stopping_hook",
        "stop_if_higher_hook",
        "stop_if_lower_hook",
        "stop_if_no_decrease_hook",
        "stop_if_no_increase_hook",
    }
    assert set(experimental._MODULES) == experimental_names
    for module, found in (
        (ks.estimator, names),
        (experimental, experimental_names),
    ):
        assert all(getattr(module, name).__doc__ for name in found)
        with pytest.raises(AttributeError, match="DNNClassifier"):
            module.DNNClassifier  # noqa: B018
