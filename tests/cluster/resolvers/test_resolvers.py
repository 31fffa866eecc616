"""The resolvers against tf's, asked the same questions.

What differs on purpose is in the tests named test_parity_... and in
docs/parity.md.
"""

import ast
import copy
import itertools
import json
import os
import pickle

import pytest
import tensorflow as tf

import keras_strategies as ks
from keras_strategies import cluster_resolver as ours
from keras_strategies.cluster.tasks import task_info
from tests.cluster.test_spec import answer
from tests.support.commands import python

theirs = tf.distribute.cluster_resolver
PROPERTIES = ("task_type", "task_id", "rpc_layer", "environment")
TASKS = [(None, None), ("worker", 0), ("worker", 1), ("chief", 0), ("ps", 0)]
# What has no meaning here; see docs/parity.md.
MISSING = {"TPUClusterResolver": {"set_tpu_topology", "tpu_hardware_feature"}}


def answers(resolver):
    """All that a resolver tells, but its accelerators."""
    result = {name: answer(getattr, resolver, name) for name in PROPERTIES}
    spec = answer(resolver.cluster_spec)
    result["spec"] = spec if isinstance(spec, type) else spec.as_dict()
    for task, rpc_layer in itertools.product(TASKS, (None, "http", "")):
        result[task, rpc_layer] = answer(resolver.master, *task, rpc_layer)
    return result


def test_names_are_tfs_and_a_few_more():
    public = {name for name in vars(theirs) if name.endswith("Resolver")}
    ours_only = {"TorchrunClusterResolver", "UnionClusterResolver"}
    names = {name for name in dir(ours) if name.endswith("Resolver")}
    assert names - ours_only <= public
    assert public - names == {"GCEClusterResolver"}
    assert ks.cluster_resolver.UnionClusterResolver is ours.UnionResolver
    for name in [*names, "ClusterSpec", "TaskInfo", "task_info"]:
        assert getattr(ks.cluster_resolver, name).__doc__


@pytest.mark.parametrize(
    "name",
    sorted(
        {n for n in dir(ours) if n.endswith("Resolver")} & set(vars(theirs))
    ),
)
def test_everything_public_of_tfs_is_there(name):
    def public(cls):
        return {name for name in dir(cls) if not name.startswith("_")}

    missing = public(getattr(theirs, name)) - public(getattr(ours, name))
    assert missing == MISSING.get(name, set())


def test_resolvers_import_no_backend():
    code = """
import importlib.util, pathlib, sys, types
# Without the package's __init__, which needs keras.
package = types.ModuleType("keras_strategies")
package.__path__ = [sys.argv[1]]
sys.modules["keras_strategies"] = package
from keras_strategies import cluster_resolver
print(sorted(m for m in sys.modules if m.startswith("keras_strategies.")))
for name in dir(cluster_resolver):
    if name != "TPUClusterResolver":  # It asks JAX for devices.
        getattr(cluster_resolver, name)
print(sorted({"jax", "keras", "tensorflow", "kubernetes"} & set(sys.modules)))
"""
    directory = os.path.dirname(ks.__file__)
    done = python("-c", code, directory, timeout=60, check=True)
    first, heavy = map(ast.literal_eval, done.stdout.splitlines())
    # What makes names lazy, and itself; then the resolvers, nothing of others.
    lazy = ["cluster_resolver", "names", "names.lazy_names"]
    assert first == [f"keras_strategies.{name}" for name in lazy]
    assert heavy == []
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = ours.Other


# ---------------------------------------------------------------- the base


def test_users_own_resolver_is_understood():
    class Mine(ours.ClusterResolver):
        def cluster_spec(self):
            return ours.ClusterSpec({"worker": ["a:1", "b:1"]})

        def master(self, task_type=None, task_id=None, rpc_layer=None):
            return ""

    mine = Mine()
    assert [getattr(mine, name) for name in PROPERTIES] == [
        None,
        None,
        None,
        "",
    ]
    mine.task_type, mine.task_id, mine.rpc_layer = "worker", 1, "grpc"
    assert (mine.task_type, mine.task_id, mine.rpc_layer) == (
        "worker",
        1,
        "grpc",
    )
    assert task_info(mine).process_id == 1
    # Of its own, not of the class.
    assert Mine().task_id is None


@pytest.mark.parametrize("module", [ours, theirs])
def test_base_cannot_be_made(module):
    with pytest.raises(TypeError, match="abstract"):
        module.ClusterResolver()


def test_parity_accelerators_are_what_the_resolver_was_told():
    resolver = ours.TFConfigClusterResolver(environ={})
    assert resolver.num_accelerators() == {}
    assert resolver.num_accelerators("worker", 0) == {}
    with pytest.raises(TypeError):
        resolver.num_accelerators(config_proto=None)


# ---------------------------------------------------------------- simple


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"master": "here"},
        {"task_type": "worker", "task_id": 1},
        {"rpc_layer": "grpc", "environment": "google"},
        {"master": "here", "rpc_layer": "grpc", "task_type": "ps"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "cluster", [{}, {"worker": ["a:1", "b:1"], "ps": ["c:1"]}], ids=str
)
def test_simple_answers_as_tfs(cluster, arguments):
    mine = ours.SimpleClusterResolver(ours.ClusterSpec(cluster), **arguments)
    tfs = theirs.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), **arguments
    )
    assert answers(mine) == answers(tfs)
    for resolver in (mine, tfs):
        resolver.task_type, resolver.task_id = "chief", 4
        resolver.rpc_layer = "other"
    assert answers(mine) == answers(tfs)


@pytest.mark.parametrize("given", [None, {}, {"GPU": 4, "TPU": 1}])
def test_simple_has_the_accelerators_it_was_given(given):
    for module, make in (
        (ours, ours.ClusterSpec),
        (theirs, tf.train.ClusterSpec),
    ):
        resolver = module.SimpleClusterResolver(
            make({}), num_accelerators=given
        )
        assert resolver.num_accelerators() == (given or {})
        assert resolver.num_accelerators("worker", 0) == (given or {})


@pytest.mark.parametrize("module", [ours, theirs])
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (({"worker": ["a:1"]},), "ClusterSpec"),
        ((None,), "ClusterSpec"),
        (("spec", 3), "master"),
        (("spec", None), "master"),
    ],
)
def test_simple_refuses_other_types(module, arguments, word):
    make = ours.ClusterSpec if module is ours else tf.train.ClusterSpec
    arguments = [make({}) if a == "spec" else a for a in arguments]
    with pytest.raises(TypeError, match=word):
        module.SimpleClusterResolver(*arguments)


def test_simple_says_how_to_make_a_spec_of_tfs():
    with pytest.raises(TypeError, match="as_dict"):
        ours.SimpleClusterResolver(tf.train.ClusterSpec({}))


# ---------------------------------------------------------------- union

UNIONS = [
    [{"worker": ["a:1"]}],
    [{"worker": ["a:1"]}, {"worker": ["b:1", "c:1"]}],
    [{"worker": ["a:1"]}, {"chief": ["b:1"]}, {}],
    [{"worker": {1: "a:1"}}, {"worker": {3: "b:1"}}],
    [{"worker": {1: "a:1"}}, {"worker": ["b:1"]}],
    [{"worker": ["b:1"]}, {"worker": {1: "a:1"}}],
    [{"worker": ["b:1"]}, {"worker": {0: "a:1", 2: "c:1"}}],
    [{"worker": {1: "a:1"}}, {"worker": {1: "b:1"}}],
    [{"worker": ["a:1"]}, {"worker": {1: "b:1"}}, {"worker": ["c:1"]}],
    [{"worker": {1: "a:1"}}, {"ps": ["b:1"]}, {"ps": ["c:1"]}],
]


def union(module, clusters, **arguments):
    make = ours.ClusterSpec if module is ours else tf.train.ClusterSpec
    parts = [
        module.SimpleClusterResolver(
            make(cluster),
            master=f"master{number}",
            task_type=f"type{number}",
            task_id=number + 3,
            environment=f"environment{number}",
            num_accelerators={"GPU": number + 1},
            rpc_layer=f"rpc{number}",
        )
        for number, cluster in enumerate(clusters)
    ]
    return module.UnionResolver(*parts, **arguments)


@pytest.mark.parametrize(
    "arguments", [{}, {"task_type": "ps", "task_id": 2}], ids=str
)
@pytest.mark.parametrize("clusters", UNIONS, ids=str)
def test_union_answers_as_tfs(clusters, arguments):
    mine, tfs = (union(m, clusters, **arguments) for m in (ours, theirs))
    assert answers(mine) == answers(tfs)
    assert mine.num_accelerators() == tfs.num_accelerators() == {"GPU": 1}
    for resolver in (mine, tfs):
        resolver.task_type, resolver.task_id = "chief", 4
    assert answers(mine) == answers(tfs)


def test_union_names_the_tasks_that_are_there_twice():
    with pytest.raises(KeyError, match=r"\[1\] of job 'worker'"):
        union(ours, UNIONS[7]).cluster_spec()


@pytest.mark.parametrize("module", [ours, theirs])
def test_union_refuses_what_tf_refuses(module):
    with pytest.raises(ValueError, match="At least one"):
        module.UnionResolver()
    with pytest.raises(TypeError, match="ClusterResolver"):
        module.UnionResolver(3)
    with pytest.raises((TypeError, ValueError), match="other"):
        union(module, [{}], other=3)


def test_parity_union_follows_task_zero_and_its_own_rpc_layer():
    arguments = {"task_type": "worker", "task_id": 0, "rpc_layer": "grpc"}
    mine, tfs = (union(m, UNIONS[0], **arguments) for m in (ours, theirs))
    assert (mine.task_id, tfs.task_id) == (0, 3)
    assert (mine.master(), tfs.master()) == ("grpc://master0", "rpc0://master0")
    assert mine.rpc_layer == tfs.rpc_layer == "grpc"
    mine.rpc_layer = None
    assert mine.rpc_layer == "rpc0"


# ---------------------------------------------------------------- TF_CONFIG

PAIR = {"worker": ["a:1", "b:1"]}
TF_CONFIGS = [
    None,
    {},
    {"cluster": {}},
    {"cluster": PAIR},
    {"cluster": PAIR, "task": {}},
    {"cluster": PAIR, "task": {"type": "worker", "index": 1}},
    {"cluster": PAIR, "task": {"type": "worker", "index": "1"}},
    {"cluster": PAIR, "task": {"type": "worker"}},
    {"cluster": PAIR, "task": {"index": 1}},
    {"cluster": PAIR, "task": {"type": "evaluator", "index": 0}},
    {"cluster": PAIR, "task": {"type": "worker", "index": 5}},
    {"cluster": {"worker": ["a:1"]}},
    {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}},
    {
        "cluster": {"chief": ["c:1"], **PAIR},
        "task": {"type": "chief", "index": 0},
    },
    {"cluster": {"chief": ["c:1"], "worker": ["a:1"], "ps": ["p:1"]}},
    {"cluster": {"worker": {"1": "b:1", "0": "a:1"}}},
    {"cluster": {"worker": {"1": "b:1"}}},
    {"task": {"type": "worker", "index": 0}},
    {
        "cluster": PAIR,
        "rpc_layer": "grpc",
        "task": {"type": "worker", "index": 0},
    },
    {"cluster": PAIR, "session_master": "here"},
    {"cluster": PAIR, "environment": "cloud", "job": [1, 2.5, None, True]},
]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"task_type": "worker", "task_id": 0},
        {"task_type": "chief", "rpc_layer": "http", "environment": "google"},
        {"task_id": "1"},
    ],
    ids=str,
)
@pytest.mark.parametrize("config", TF_CONFIGS, ids=str)
def test_tf_config_is_read_as_tf_does(config, arguments, monkeypatch):
    environ = {} if config is None else {"TF_CONFIG": json.dumps(config)}
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    tfs = theirs.TFConfigClusterResolver(**arguments)
    mine = ours.TFConfigClusterResolver(**arguments, environ=environ)
    expected = answers(tfs)
    assert answers(mine) == expected
    # None is this process's variables.
    assert answers(ours.TFConfigClusterResolver(**arguments)) == expected


def test_tf_config_is_read_at_each_call():
    environ = {}
    resolver = ours.TFConfigClusterResolver(environ=environ)
    assert not resolver.cluster_spec()
    assert resolver.task_id is None
    environ["TF_CONFIG"] = json.dumps(TF_CONFIGS[5])
    assert resolver.cluster_spec().as_dict() == PAIR
    assert resolver.task_id == 1
    resolver.task_id = 0
    assert resolver.master() == "a:1"


def test_tf_config_without_a_task_has_no_master_of_its_own():
    environ = {"TF_CONFIG": json.dumps({"cluster": PAIR})}
    resolver = ours.TFConfigClusterResolver(environ=environ)
    with pytest.raises(ValueError, match="No such job in cluster: None"):
        resolver.master()


def test_parity_empty_tf_config_is_no_cluster(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", " ")
    assert not ours.TFConfigClusterResolver().cluster_spec()
    with pytest.raises(json.JSONDecodeError):
        theirs.TFConfigClusterResolver().cluster_spec()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, (0, 1, None, True)),
        (TF_CONFIGS[5], (1, 2, "a:1", False)),
        (TF_CONFIGS[12], (0, 1, "a:1", True)),
        (TF_CONFIGS[13], (0, 3, "c:1", True)),
        (TF_CONFIGS[9], (None, 2, "a:1", True)),
    ],
    ids=str,
)
def test_task_of_a_tf_config(config, expected):
    environ = {} if config is None else {"TF_CONFIG": json.dumps(config)}
    info = task_info(ours.TFConfigClusterResolver(environ=environ))
    assert (
        info.process_id,
        info.num_processes,
        info.coordinator_address,
        info.is_chief,
    ) == expected


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))]
)
def test_copies_read_the_environment_of_where_they_are(copied, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "")
    monkeypatch.setenv("WORLD_SIZE", "2")
    resolvers = [
        ours.TFConfigClusterResolver(),
        ours.TorchrunClusterResolver(),
        ours.TPUClusterResolver(""),
    ]
    from_tf_config, from_torchrun, from_tpu = map(copied, resolvers)
    config = {"cluster": {"worker": ["a:1", "b:1"]}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "host0,host1")
    assert from_tf_config.cluster_spec().as_dict() == config["cluster"]
    assert from_torchrun.num_processes == 3
    assert len(from_tpu.cluster_spec().as_dict()["worker"]) == 2
