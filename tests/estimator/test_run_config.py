"""RunConfig: every field, default, error, `replace` rule and property."""

import copy
import dataclasses
import json
import pathlib

import pytest

import keras_strategies as ks
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.estimator.config.run_config import RunConfig

pytestmark = pytest.mark.quick

DEFAULTS = {
    "model_dir": None,
    "tf_random_seed": None,
    "save_summary_steps": 100,
    "save_checkpoints_steps": None,
    "save_checkpoints_secs": 600,
    "session_config": None,
    "keep_checkpoint_max": 5,
    "keep_checkpoint_every_n_hours": 10000,
    "log_step_count_steps": 100,
    "train_distribute": None,
    "device_fn": None,
    "protocol": None,
    "eval_distribute": None,
    "experimental_distribute": None,
    "experimental_max_worker_delay_secs": None,
    "session_creation_timeout_secs": 7200,
    "checkpoint_save_graph_def": True,
}
OTHERS = {
    "model_dir": "/a",
    "tf_random_seed": -3,
    "save_summary_steps": 0,
    "save_checkpoints_steps": 7,
    "save_checkpoints_secs": 0.5,
    "keep_checkpoint_max": 0,
    "keep_checkpoint_every_n_hours": 0.25,
    "log_step_count_steps": 1,
    "experimental_max_worker_delay_secs": -1,
    "session_creation_timeout_secs": 1.5,
}
CAN_BE_NONE = set(DEFAULTS) - {"checkpoint_save_graph_def"}
CLUSTER = {
    "chief": ["host0:2222"],
    "ps": ["host1:2222", "host2:2222"],
    "worker": ["host3:2222", "host4:2222", "host5:2222"],
}


def config_of(monkeypatch, tf_config, **fields):
    monkeypatch.setenv("TF_CONFIG", json.dumps(tf_config))
    return RunConfig(**fields)


def task(kind, index=0, **more):
    return {"cluster": CLUSTER, "task": {"type": kind, "index": index}} | more


def saves(given):
    """The fields of when to save, by their ends."""
    return {f"save_checkpoints_{end}": value for end, value in given.items()}


def test_it_is_the_public_one():
    assert ks.estimator.RunConfig is RunConfig


@pytest.mark.parametrize(("name", "value"), DEFAULTS.items())
def test_default(name, value):
    assert getattr(RunConfig(), name) == value


def test_fields_are_in_the_order_of_tf():
    fields = [f.name for f in dataclasses.fields(RunConfig) if f.init]
    assert fields == list(DEFAULTS)
    assert len(fields) == 17


def test_fields_can_be_given_by_position():
    config = RunConfig("/a", 3, 50, None, 20)
    assert config.model_dir == "/a"
    assert config.tf_random_seed == 3
    assert config.save_summary_steps == 50
    assert config.save_checkpoints_secs == 20


@pytest.mark.parametrize(("name", "value"), OTHERS.items())
def test_field_is_what_was_given(name, value):
    assert getattr(RunConfig(**{name: value}), name) == value
    assert getattr(RunConfig().replace(**{name: value}), name) == value


@pytest.mark.parametrize("name", sorted(CAN_BE_NONE))
def test_none_is_taken(name):
    assert getattr(RunConfig(**{name: None}), name) is None


def test_it_never_changes():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().model_dir = "/a"
    with pytest.raises(AttributeError):
        RunConfig().is_chief = False


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (None, 600)),
        ({"steps": 5}, (5, None)),
        ({"secs": 5}, (None, 5)),
        ({"steps": None}, (None, None)),
        ({"secs": None}, (None, None)),
        ({"steps": None, "secs": None}, (None, None)),
        ({"steps": 5, "secs": None}, (5, None)),
        ({"steps": None, "secs": 5}, (None, 5)),
        ({"steps": 0}, (0, None)),
    ],
)
def test_when_checkpoints_are_saved(given, expected):
    config = RunConfig(**saves(given))
    saved = (config.save_checkpoints_steps, config.save_checkpoints_secs)
    assert saved == expected


@pytest.mark.parametrize(
    ("first", "changes", "expected"),
    [
        ({}, {"steps": 5}, (5, None)),
        ({}, {"steps": None}, (None, 600)),
        ({}, {"secs": None}, (None, None)),
        ({"steps": 5}, {"secs": 9}, (None, 9)),
        ({"steps": 5}, {}, (5, None)),
        ({"steps": 5}, {"steps": None, "secs": None}, (None, None)),
        ({}, {"steps": 3, "secs": None}, (3, None)),
    ],
)
def test_replace_switches_between_steps_and_seconds(first, changes, expected):
    config = RunConfig(**saves(first))
    before = copy.copy(config)
    made = config.replace(model_dir="/b", **saves(changes))
    assert config == before
    saved = (made.save_checkpoints_steps, made.save_checkpoints_secs)
    assert saved == expected


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        (
            {"save_checkpoints_steps": 1, "save_checkpoints_secs": 1},
            ValueError,
            "cannot both be set",
        ),
        ({"model_dir": ""}, ValueError, "model_dir should be non-empty"),
        ({"model_dir": 3}, TypeError, "`model_dir` must be a path"),
        ({"tf_random_seed": 1.0}, TypeError, "must be an integer"),
        ({"tf_random_seed": True}, TypeError, "must be an integer"),
        ({"save_summary_steps": -1}, ValueError, "must be >= 0"),
        ({"save_summary_steps": "9"}, TypeError, "must be an integer"),
        ({"save_checkpoints_steps": -1}, ValueError, "must be >= 0"),
        ({"save_checkpoints_steps": 1.5}, TypeError, "must be an integer"),
        ({"save_checkpoints_secs": -1}, ValueError, "must be >= 0"),
        ({"save_checkpoints_secs": float("nan")}, ValueError, "be finite"),
        ({"save_checkpoints_secs": "9"}, TypeError, "must be a number"),
        ({"keep_checkpoint_max": -1}, ValueError, "must be >= 0"),
        ({"keep_checkpoint_max": 0.5}, TypeError, "must be an integer"),
        ({"keep_checkpoint_every_n_hours": 0}, ValueError, "be > 0"),
        ({"keep_checkpoint_every_n_hours": []}, TypeError, "be a number"),
        ({"log_step_count_steps": 0}, ValueError, "must be >= 1"),
        ({"log_step_count_steps": "1"}, TypeError, "must be an integer"),
        (
            {"experimental_max_worker_delay_secs": 1.5},
            TypeError,
            "must be an integer",
        ),
        ({"session_creation_timeout_secs": 0}, ValueError, "be > 0"),
        ({"session_creation_timeout_secs": "1"}, TypeError, "be a number"),
        ({"session_config": object()}, ValueError, "not supported on JAX"),
        ({"device_fn": lambda op: "/cpu:0"}, ValueError, "not supported on"),
        (
            {"protocol": "grpc"},
            ValueError,
            "protocol='grpc'. Omit it; docs/estimator.md lists what to use",
        ),
        ({"checkpoint_save_graph_def": False}, ValueError, "not supported on"),
        ({"train_distribute": "mirrored"}, TypeError, "MirroredStrategy"),
        (
            {"train_distribute": ks.MirroredStrategy},
            TypeError,
            "Pass, for example, `ks.MirroredStrategy",
        ),
        ({"eval_distribute": object()}, TypeError, "`eval_distribute`"),
        ({"experimental_distribute": 3}, ValueError, "not supported on JAX"),
    ],
)
def test_wrong_field_is_refused(fields, error, text):
    with pytest.raises(error, match=text) as raised:
        RunConfig(**fields)
    assert "Received: " in str(raised.value)
    with pytest.raises(error, match=text):
        RunConfig().replace(**fields)


@pytest.mark.parametrize(
    "name",
    [
        *("cluster_spec", "task_type", "task_id", "is_chief"),
        *("num_ps_replicas", "num_worker_replicas", "_cluster", "model_dirs"),
    ],
)
def test_what_is_no_field_cannot_be_replaced(name):
    with pytest.raises(ValueError, match=f"Replacing {name} is not supported"):
        RunConfig().replace(**{name: 1})


def test_paths_are_taken_as_text(tmp_path):
    path = pathlib.Path(tmp_path)
    assert RunConfig(path).model_dir == str(path)
    assert RunConfig().replace(model_dir=path).model_dir == str(path)


def test_it_can_be_compared_hashed_and_copied():
    config = RunConfig(model_dir="/a")
    assert config == RunConfig(model_dir="/a")
    assert config != RunConfig(model_dir="/b")
    assert hash(config) == hash(RunConfig(model_dir="/a"))
    assert copy.deepcopy(config) == config
    assert repr(config).startswith("RunConfig(model_dir='/a', ")


def test_strategies_stay_the_same_objects():
    strategy = ks.OneDeviceStrategy("cpu:0")
    config = RunConfig(train_distribute=strategy, eval_distribute=strategy)
    assert config.train_distribute is strategy
    assert config.replace(model_dir="/a").eval_distribute is strategy
    assert copy.deepcopy(config).train_distribute is strategy


LOCAL = {
    "cluster_spec": ClusterSpec({}),
    "task_type": "worker",
    "task_id": 0,
    "is_chief": True,
    "num_ps_replicas": 0,
    "num_worker_replicas": 1,
    "model_dir": None,
}
WHOLE = LOCAL | {
    "cluster_spec": ClusterSpec(CLUSTER),
    "num_ps_replicas": 2,
    "num_worker_replicas": 4,
}
OUTSIDE = LOCAL | {
    "task_type": "evaluator",
    "is_chief": False,
    "num_worker_replicas": 0,
}


@pytest.mark.parametrize(
    ("tf_config", "expected"),
    [
        (None, LOCAL),
        ({}, LOCAL),
        ({"task": {"type": "worker", "index": 0}}, LOCAL),
        ({"session_master": "s:1", "service": {"a": 1}}, LOCAL),
        ({"model_dir": "/m"}, LOCAL | {"model_dir": "/m"}),
        (task("chief"), WHOLE | {"task_type": "chief"}),
        (
            task("worker", 1, eval_session_master="e:1", service={}),
            WHOLE | {"task_id": 1, "is_chief": False},
        ),
        (task("worker", "2"), WHOLE | {"task_id": 2, "is_chief": False}),
        (
            task("ps", 1),
            WHOLE | {"task_type": "ps", "task_id": 1, "is_chief": False},
        ),
        (
            task("chief", session_master="grpc://other:1"),
            WHOLE | {"task_type": "chief"},
        ),
        (task("evaluator"), OUTSIDE),
        (
            {
                "cluster": {"chief": ["a:1"]},
                "task": {"type": "chief", "index": 0},
            },
            LOCAL
            | {
                "cluster_spec": ClusterSpec({"chief": ["a:1"]}),
                "task_type": "chief",
            },
        ),
    ],
)
def test_properties_of_tf_config(monkeypatch, tf_config, expected):
    config = (
        RunConfig() if tf_config is None else config_of(monkeypatch, tf_config)
    )
    found = {name: getattr(config, name) for name in expected}
    assert found == expected
    monkeypatch.setenv("TF_CONFIG", "{}")
    made = config.replace(save_summary_steps=3)
    assert {name: getattr(made, name) for name in expected} == expected


def test_worker_zero_is_the_chief_of_a_strategy_s_cluster(monkeypatch):
    strategy = ks.OneDeviceStrategy("cpu:0")
    cluster = {"worker": ["a:1", "b:1"]}
    seen = []
    for index in range(2):
        config = config_of(
            monkeypatch,
            {"cluster": cluster, "task": {"type": "worker", "index": index}},
            train_distribute=strategy,
        )
        seen.append(config.is_chief)
        assert config.num_worker_replicas == 2
    assert seen == [True, False]


@pytest.mark.parametrize(
    ("tf_config", "error", "text"),
    [
        (
            {
                "cluster": {"worker": ["a:1"]},
                "task": {"type": "worker", "index": 0},
            },
            ValueError,
            'must have one "chief" node',
        ),
        (
            {"cluster": {"chief": ["a:1", "b:1"]}, "task": {"type": "chief"}},
            ValueError,
            "at most one 'chief'",
        ),
        ({"cluster": CLUSTER}, ValueError, "a task with a type and"),
        (
            {"cluster": CLUSTER, "task": {"type": "worker"}},
            ValueError,
            "a task with a type and",
        ),
        (task("worker", 3), ValueError, "No task with index 3"),
        (task("worker", -1), ValueError, '"index" of the task'),
        (task("master"), ValueError, "'chief' replaces"),
        (task("cook"), ValueError, "jobs of a cluster must be"),
        (
            {
                "cluster": {"chief": ["a:1"]},
                "task": {"type": "worker", "index": 0},
            },
            ValueError,
            "'worker'",
        ),
        (
            {"task": {"type": "evaluator", "index": 0}},
            ValueError,
            "the task must be 'worker' 0",
        ),
        (
            {"task": {"type": "worker", "index": 1}},
            ValueError,
            "the task must be 'worker' 0",
        ),
        ({"model_dir": ""}, ValueError, "model_dir should be non-empty"),
        ({"model_dir": 1}, TypeError, '"model_dir" in TF_CONFIG'),
        ([], TypeError, "JSON object"),
    ],
)
def test_tf_config_that_cannot_be_followed(monkeypatch, tf_config, error, text):
    with pytest.raises(error, match=text):
        config_of(monkeypatch, tf_config)


def test_model_dir_agrees_with_tf_config(monkeypatch):
    told = {"model_dir": "/m"}
    assert config_of(monkeypatch, told, model_dir="/m").model_dir == "/m"
    with pytest.raises(ValueError, match="must have the same value"):
        config_of(monkeypatch, told, model_dir="/n")
    with pytest.raises(ValueError, match="should be non-empty"):
        config_of(monkeypatch, told, model_dir="")
