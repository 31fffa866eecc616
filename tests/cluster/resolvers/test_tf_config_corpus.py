"""TF_CONFIGs that cannot be followed: one clear error each, nothing echoed."""

import json
import re
import traceback

import pytest
import tensorflow as tf

from keras_strategies import cluster_resolver
from keras_strategies.cluster.resolvers import tf_config_resolver as tf_config
from tests.cluster.test_spec import answer

SECRET = "host-of-a-secret.example.com"
ENVIRON = {"AWS_SECRET_ACCESS_KEY": "abracadabra", "HOME": "/home/somebody"}
WORKERS = {"worker": [f"{SECRET}:2222", "b:2222"]}
TASK = {"type": "worker", "index": 0}


def config(cluster=WORKERS, task=TASK, **others):
    return json.dumps({"cluster": cluster, "task": task, **others})


def workers(*addresses):
    return config({"worker": [f"{SECRET}:1", *addresses]})


def task(**changed):
    return config(task=TASK | changed)


# What TF_CONFIG is, the error's type, and words that the error must contain.
# tests/cluster/test_spec.py has more clusters, tasks and addresses.
CORPUS = {
    # No JSON.
    "no JSON": (SECRET, ValueError, ["valid JSON", "line 1, column 1"]),
    "cut": (config()[:-1], ValueError, ["valid JSON", "delimiter"]),
    "Python's quotes": (str(json.loads(config())), ValueError, ["valid JSON"]),
    "trailing comma": (config()[:-1] + ",}", ValueError, ["valid JSON"]),
    "two values": (
        config() + config(),
        ValueError,
        ["valid JSON", "Extra data"],
    ),
    "comment": ("// a\n" + config(), ValueError, ["valid JSON"]),
    "NaN": (task(index=float("nan")), ValueError, ["finite"]),
    "Infinity": (task(index=float("inf")), ValueError, ["finite"]),
    "nested deeply": ("[" * 200_000, ValueError, ["valid JSON", "deeply"]),
    "key twice": (
        config()[:-1] + ', "cluster": {}}',
        ValueError,
        ["'cluster'", "twice"],
    ),
    "job twice": (
        '{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}}',
        ValueError,
        ["'worker'", "twice"],
    ),
    "too long": (
        config(cluster={"worker": ["a" * 60 + ":1"] * 20_000}),
        ValueError,
        ["at most 1048576", "characters"],
    ),
    "number too long": (
        config().replace("0}", "9" * 5000 + "}"),
        ValueError,
        ["number that is too long"],
    ),
    # Other types than an object's.
    "list": (f'["{SECRET}"]', TypeError, ["an array", '{"cluster"']),
    "text": (f'"{"x" * 500}"', TypeError, ["JSON object", "xxx"]),
    "null": ("null", TypeError, ["null"]),
    "number": ("3", TypeError, ["JSON object", "3"]),
    "cluster is null": (config(None), TypeError, ['"cluster"', "null"]),
    "cluster is a list": (config([SECRET]), TypeError, ['"cluster"', "array"]),
    "cluster is a text": (config("a:1"), TypeError, ['"cluster"', "'a:1'"]),
    "job is a text": (
        config({"worker": "a:1"}),
        TypeError,
        ["'worker'", "list"],
    ),
    "address is a number": (
        workers(2222),
        TypeError,
        ["2222", "int", "task 1"],
    ),
    "task is null": (config(task=None), TypeError, ['"task"', "null"]),
    "task is a list": (
        config(task=["worker", 0]),
        TypeError,
        ['"task"', "an array"],
    ),
    "task is a text": (
        config(task="worker"),
        TypeError,
        ['"task"', "'worker'"],
    ),
    "type is a number": (task(type=3), TypeError, ['"type"', "3"]),
    "type is null": (task(type=None), TypeError, ['"type"', "null"]),
    "type is an object": (task(type={}), TypeError, ['"type"', "an object"]),
    "rpc_layer is a number": (
        config(rpc_layer=3),
        TypeError,
        ['"rpc_layer"', "3"],
    ),
    # The task.
    "task missing": (
        json.dumps({"cluster": WORKERS}),
        ValueError,
        ["Missing: type", '"task"'],
    ),
    "task empty": (config(task={}), ValueError, ["Missing: type", "task_type"]),
    "type missing": (config(task={"index": 0}), ValueError, ["Missing: type"]),
    "index missing": (
        config(task={"type": "worker"}),
        ValueError,
        ["Missing: index", "task_id"],
    ),
    "index is a bool": (task(index=True), TypeError, ["True", "bool"]),
    "index is null": (task(index=None), TypeError, ["None", "integer"]),
    "index is a word": (task(index="first"), ValueError, ["'first'"]),
    "index has a sign": (task(index="+1"), ValueError, ["'+1'"]),
    "index is huge": (task(index=10**12), ValueError, ["1000000000000"]),
    "index is larger": (
        task(index=10**80),
        ValueError,
        ["more than 60 digits"],
    ),
    "type unknown": (task(type="Worker"), ValueError, ["'Worker'", "Use"]),
    "task without cluster": (
        json.dumps({"task": {"type": "worker", "index": 1}}),
        ValueError,
        ["task 1", "no cluster"],
    ),
    # No cluster, but probably one under another key.
    "clusters": (
        json.dumps({"clusters": WORKERS, "task": TASK}),
        ValueError,
        ["['clusters']", '"cluster"'],
    ),
    "capitals": (
        json.dumps({"Cluster": WORKERS, "Task": TASK | {"index": 1}}),
        ValueError,
        ["['Cluster', 'Task']", '"cluster"'],
    ),
    "nested": (
        json.dumps({"TF_CONFIG": json.loads(config())}),
        ValueError,
        ["['TF_CONFIG']", '{"cluster"'],
    ),
    "nested as text": (
        json.dumps({"TF_CONFIG": config()}),
        ValueError,
        ["['TF_CONFIG']"],
    ),
    "jobs without a key": (
        json.dumps({**WORKERS, "task": TASK}),
        ValueError,
        ["['worker']", '{"cluster"'],
    ),
    "cluster_spec": (
        json.dumps({"cluster_spec": WORKERS}),
        ValueError,
        ["['cluster_spec']"],
    ),
    "empty cluster and another": (
        config({}, clusters=WORKERS),
        ValueError,
        ["['clusters']"],
    ),
    "a key of many letters": (
        json.dumps({"w" * 100_000 + "\n": WORKERS}),
        ValueError,
        ["['www"],
    ),
    # The cluster.
    "job of a huge name": (
        config({"w" * 100_000: ["a:1"]}),
        ValueError,
        ["'www", "Use 'worker'"],
    ),
    "job without a name": (config({"": ["a:1"]}), ValueError, ["a job ''"]),
    "parameter servers": (
        config({"ps": ["p:1"], **WORKERS}),
        ValueError,
        ["MultiWorkerMirroredStrategy", "docs/migration.md"],
    ),
    "index of a job is no number": (
        config({"worker": {"first": f"{SECRET}:1"}}),
        ValueError,
        ["'first'", "'worker'"],
    ),
    # The addresses.
    "same address": (
        workers("b:1", "b:1"),
        ValueError,
        ["'b:1'", "task 1", "task 2"],
    ),
    "same address of two jobs": (
        config({"chief": ["B:2222"], **WORKERS}),
        ValueError,
        ["'chief'", "'worker'", "different"],
    ),
    "no port": (workers("b"), ValueError, ["'b'", "port is missing", "task 1"]),
    "line break": (workers("b\nc:1"), ValueError, [r"'b\nc:1'"]),
}


def test_corpus_is_large_enough():
    assert len(CORPUS) >= 30


@pytest.mark.parametrize("name", CORPUS)
def test_error_is_clear_and_echoes_nothing(name):
    text, error, words = CORPUS[name]
    environ = {**ENVIRON, "TF_CONFIG": text}
    resolver = cluster_resolver.TFConfigClusterResolver(environ=environ)
    with pytest.raises(error) as caught:
        cluster_resolver.task_info(resolver)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert re.search(r"Received: .*\. |is set|\. Set |\. Use ", message)
    assert message.endswith((".", "}}."))
    # One line for a log, which a text of someone else's cannot break.
    assert len(message) < 500
    assert "\n" not in message
    shown = "".join(traceback.format_exception(caught.value))
    for secret in (SECRET, *ENVIRON, *ENVIRON.values()):
        assert secret not in shown.replace(__file__, "")
    assert not _list_causes(caught.value), "a cause that has the whole text"


def _list_causes(error):
    chain = (error.__cause__, error.__context__)
    return [one for one in chain if getattr(one, "doc", None)]


@pytest.mark.parametrize("name", CORPUS)
def test_error_is_of_the_type_of_tfs(name, monkeypatch):
    text, error, _ = CORPUS[name]
    monkeypatch.setenv("TF_CONFIG", text)
    tfs = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    for answered in (
        answer(tfs.cluster_spec),
        answer(lambda: tfs.task_id),
        answer(lambda: tfs.task_type),
    ):
        is_other = {
            # tf lets Python's own errors through.
            "nested deeply": RecursionError,
            "Infinity": OverflowError,
        }.get(name, error)
        if isinstance(answered, type):
            assert issubclass(answered, is_other)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "{}",
        '{"cluster": {}}',
        '{"cluster": {}, "task": {}}',
        '{"task": {"type": "worker", "index": 0}}',
        '{"task": {"type": "chief"}}',
        '{"environment": "cloud", "job": {"x": [1]}, "model_dir": "/tmp"}',
        '{"rpc_layer": "grpc", "session_master": "", "service": {}}',
    ],
)
def test_parity_no_cluster_is_one_process(text):
    resolver = cluster_resolver.TFConfigClusterResolver(
        environ={"TF_CONFIG": text}
    )
    assert not resolver.cluster_spec()
    assert resolver.master() == ""
    assert cluster_resolver.task_info(resolver).num_processes == 1


def test_parity_tf_takes_other_json_for_no_cluster(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "[]")
    tfs = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    assert not tfs.cluster_spec()
    with pytest.raises(TypeError, match="an array"):
        cluster_resolver.TFConfigClusterResolver().cluster_spec()


def test_parity_parameter_servers_are_shown_and_not_started():
    text = CORPUS["parameter servers"][0]
    resolver = cluster_resolver.TFConfigClusterResolver(
        environ={"TF_CONFIG": text}
    )
    assert resolver.cluster_spec().job_tasks("ps") == ["p:1"]
    with pytest.raises(ValueError, match="Parameter servers"):
        cluster_resolver.task_info(resolver)


def test_cluster_of_one_task_has_an_empty_master():
    text = config({"worker": ["a:1"]})
    resolver = cluster_resolver.TFConfigClusterResolver(
        environ={"TF_CONFIG": text}
    )
    assert resolver.master() == resolver.master("worker", 0) == ""
    info = cluster_resolver.task_info(resolver)
    assert (info.num_processes, info.coordinator_address) == (1, "a:1")


def test_what_is_not_known_is_let_be():
    parsed = tf_config.parse_tf_config(
        config(environment="cloud", model_dir="/tmp", job={"x": [1, None]})
    )
    assert parsed.task_id == 0
    assert parsed.cluster.as_dict() == WORKERS


def test_large_tf_config_is_quick():
    hosts = [f"host{index}.example.com:2222" for index in range(20_000)]
    parsed = tf_config.parse_tf_config(config({"worker": hosts}))
    assert parsed.cluster.num_tasks("worker") == 20_000
