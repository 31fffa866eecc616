"""ClusterSpec and task_info, against tf's own answers."""

import dataclasses

import pytest
import tensorflow as tf
from tensorflow.python.distribute import multi_worker_util

from keras_strategies.cluster import addresses
from keras_strategies.cluster.resolvers.union_resolver import (
    SimpleClusterResolver,
)
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.cluster.tasks import task_info

CLUSTERS = [
    {},
    {"worker": ["a:1"]},
    {"worker": ["a:1", "b:2"]},
    {"worker": ("a:1", "b:2")},
    {"chief": ["a:1"], "worker": ["b:2", "c:3"], "evaluator": ["d:4"]},
    {"ps": ["a:1", "b:1"], "worker": ["c:1"]},
    {"worker": {1: "b:2"}},
    {"worker": {1: "b:2", 0: "a:1"}},
    {"worker": {"1": "b:2", "3": "d:4"}},
    {"anything": ["no address"], "worker": {7: ""}},
]


def answer(function, *arguments):
    """What a call gives: its value, or the type of its error."""
    try:
        return function(*arguments)
    except Exception as error:
        return type(error)


def answers(spec):
    """All that a ClusterSpec tells."""
    jobs = [*spec.jobs, "other", None]
    return {
        "dict": spec.as_dict(),
        "jobs": spec.jobs,
        "bool": bool(spec),
        "repr": repr(spec),
        **{
            (name, job): answer(getattr(spec, name), job)
            for name in ("num_tasks", "task_indices", "job_tasks")
            for job in jobs
        },
        **{
            (job, index): answer(spec.task_address, job, index)
            for job in jobs
            for index in (0, 1, 2, 7, -1, None)
        },
    }


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_spec_answers_as_tfs(cluster):
    assert answers(ClusterSpec(cluster)) == answers(
        tf.train.ClusterSpec(cluster)
    )


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_spec_of_a_spec_is_equal(cluster):
    spec = ClusterSpec(cluster)
    assert ClusterSpec(spec) == spec == ClusterSpec(spec.as_dict())
    assert answers(ClusterSpec(spec)) == answers(spec)


@pytest.mark.parametrize("make", [ClusterSpec, tf.train.ClusterSpec])
def test_specs_are_compared_by_their_tasks(make):
    spec = make({"worker": ["a:1", "b:2"]})
    assert spec == make({"worker": {0: "a:1", 1: "b:2"}})
    assert spec == {"worker": {0: "a:1", 1: "b:2"}}
    assert spec != make({"worker": ["a:1"]})
    assert spec != {"worker": ["a:1", "b:2"]}
    assert spec != 3
    with pytest.raises(TypeError):
        hash(spec)


def test_what_a_spec_gives_can_be_changed_without_changing_it():
    given = {"worker": {1: "b:2"}}
    spec = ClusterSpec(given)
    given["worker"][0] = "a:1"
    spec.as_dict()["worker"][5] = "c:3"
    spec.jobs.append("chief")
    spec.job_tasks("worker").append("d:4")
    assert spec == {"worker": {1: "b:2"}}


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (None, ["NoneType", "must map"]),
        (["a:1"], ["list"]),
        ("a:1", ["str"]),
        ({"worker": "a:1"}, ["list of addresses", "str"]),
        ({"worker": None}, ["NoneType"]),
        ({"worker": [1]}, ["address", "int", "task 0"]),
        ({"worker": [None]}, ["NoneType"]),
        ({"worker": {"x": "a:1"}}, ["index", "'x'"]),
        ({3: ["a:1"]}, ["name", "int"]),
    ],
    ids=str,
)
def test_what_tf_refuses_is_refused_with_its_type(cluster, words):
    expected = answer(tf.train.ClusterSpec, cluster)
    with pytest.raises(expected) as caught:
        ClusterSpec(cluster)
    assert all(word in str(caught.value) for word in words)
    assert "Received" in str(caught.value)


@pytest.mark.parametrize(
    ("cluster", "error", "word"),
    [
        ({"worker": {-1: "a:1"}}, ValueError, "from 0"),
        ({"worker": {True: "a:1"}}, TypeError, "bool"),
        ({"worker": {1.5: "a:1"}}, TypeError, "float"),
        ({"worker": {" 1": "a:1"}}, ValueError, "from 0"),
        ({"worker": {"01": "a:1"}}, ValueError, "from 0"),
        ({"worker": {10**6: "a:1"}}, ValueError, "999999"),
        ({"worker": [b"a:1"]}, TypeError, "bytes"),
        ({b"worker": ["a:1"]}, TypeError, "bytes"),
    ],
    ids=str,
)
def test_parity_indices_and_names_are_checked(cluster, error, word):
    tf.train.ClusterSpec(cluster)
    with pytest.raises(error, match=word):
        ClusterSpec(cluster)


def test_number_too_long_to_print_is_refused():
    with pytest.raises(ValueError, match="more than 60 digits"):
        ClusterSpec({"worker": {10**5000: "a:1"}})


def test_parity_job_without_tasks_has_an_empty_list():
    assert ClusterSpec({"worker": []}).job_tasks("worker") == []
    assert ClusterSpec({"worker": []}).as_dict() == {"worker": {}}
    assert tf.train.ClusterSpec({"worker": []}).as_dict() == {"worker": {}}
    with pytest.raises(ValueError, match="max"):
        tf.train.ClusterSpec({"worker": []}).job_tasks("worker")


def test_parity_there_are_no_protocol_buffers():
    tfs = tf.train.ClusterSpec({"worker": ["a:1"]})
    with pytest.raises(TypeError, match="ClusterDef"):
        ClusterSpec(tfs.as_cluster_def())
    assert not hasattr(ClusterSpec({}), "as_cluster_def")


@pytest.mark.parametrize(
    "address",
    [
        *("a:1", "host-0.example.com:2222", "worker_0:65535", "host.:80"),
        *("10.0.0.1:8888", "[::1]:2222"),
        *("[fe80::1%eth0]:1", "[2001:db8::ff00:42:8329]:443"),
    ],
)
def test_good_address_is_let_through(address):
    addresses.check_address(address, "worker 0")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        *((address, "port is missing") for address in ("", "host")),
        *(
            (f"host:{port}", "port is not a number")
            for port in ("", "0", "65536", "-1", "80 ", "8_0", "٣", "9" * 5000)
        ),
        ("[::1]", "port is not a number"),
        *(
            (f"{host}:80", "neither a name")
            for host in (
                *("", " host", "ho st", "a/b", "user@host", "a..b", "-a"),
                *("a\n", "a" * 300, "256.0.0.1", "1.2.3", "::1", "[::1"),
                *("[::g]", "[]", "grpc://host", "$(id)", "a:1,b"),
            )
        ),
    ],
    ids=lambda text: repr(text)[:20],
)
def test_bad_address_is_named(address, words):
    with pytest.raises(ValueError, match=words) as caught:
        addresses.check_address(address, "worker 0")
    assert "worker 0" in str(caught.value)
    assert len(str(caught.value)) < 300


TASKS = [
    (cluster, job, index)
    for cluster in (
        {"worker": ["a:1"]},
        {"worker": ["a:1", "b:1", "c:1"]},
        {"chief": ["a:1"]},
        {"chief": ["a:1"], "worker": ["b:1", "c:1"]},
        {"worker": ["b:1", "c:1"], "evaluator": ["d:1"], "chief": ["a:1"]},
        {"worker": {1: "b:1", 0: "a:1"}, "ps": [], "evaluator": []},
    )
    for job, tasks in cluster.items()
    for index in range(len(tasks))
]


@pytest.mark.parametrize(("cluster", "job", "index"), TASKS, ids=str)
def test_task_is_numbered_as_tf_does(cluster, job, index):
    info = make_info(cluster, job, index)
    assert (info.type, info.index) == (job, index)
    assert info.is_chief == multi_worker_util.is_chief(cluster, job, index)
    training = "worker" if "worker" in cluster else "chief"
    assert info.num_processes == multi_worker_util.worker_count(
        cluster, training
    )
    leader = multi_worker_util.collective_leader(cluster, training, 0)
    leader = leader.removeprefix("/job:").split("/")[0]
    assert info.coordinator_address == ClusterSpec(cluster).task_address(
        leader, 0
    )
    if job == "evaluator":
        assert info.process_id is None
    else:
        assert info.process_id == multi_worker_util.id_in_cluster(
            cluster, job, index
        )
        assert info.addresses[info.process_id] == cluster[job][index]


def make_info(cluster, task_type=None, task_id=None):
    spec = ClusterSpec(cluster)
    return task_info(
        SimpleClusterResolver(spec, task_type=task_type, task_id=task_id)
    )


def test_chief_goes_first_then_workers_by_index():
    cluster = {"worker": {1: "c:1", 0: "b:1"}, "chief": ["a:1"]}
    info = make_info(cluster, "worker", 1)
    assert info.addresses == ("a:1", "b:1", "c:1")
    assert (info.process_id, info.is_chief) == (2, False)


def test_evaluator_needs_no_entry_in_the_cluster():
    info = make_info({"worker": ["a:1", "b:1"]}, "evaluator", 0)
    assert (info.process_id, info.is_chief) == (None, True)
    assert (info.num_processes, info.coordinator_address) == (2, "a:1")


@pytest.mark.parametrize(
    ("task", "process_id"),
    [
        ((None, None), 0),
        (("worker", 0), 0),
        (("chief", None), 0),
        (("evaluator", 0), None),
    ],
)
def test_process_without_a_cluster_is_alone(task, process_id):
    info = make_info({}, *task)
    assert (info.num_processes, info.process_id) == (1, process_id)
    assert info.is_chief
    assert info.coordinator_address is None


def test_tfs_resolver_is_understood():
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"chief": ["a:1"], "worker": ["b:1"]}),
        task_type="worker",
        task_id=0,
    )
    info = task_info(resolver)
    assert (info.process_id, info.coordinator_address) == (1, "a:1")


PAIR = {"worker": ["a:1", "b:1"]}


@pytest.mark.parametrize(
    ("cluster", "task", "words"),
    [
        ({"ps": ["p:1"], **PAIR}, ("worker", 0), ["MultiWorker", "migration"]),
        ({"ps": ["p:1"], **PAIR}, ("ps", 0), ["MultiWorker"]),
        (PAIR, ("ps", 0), ["MultiWorker"]),
        ({"workers": ["a:1"]}, ("workers", 0), ["'workers'", "'worker'"]),
        ({"master": ["a:1"]}, ("master", 0), ["'master'", "'chief'"]),
        (PAIR, ("master", 0), ["'master'", "'chief'"]),
        (PAIR, (None, 0), ["Missing: type", "task_type"]),
        (PAIR, ("worker", None), ["Missing: index", "task_id"]),
        (PAIR, ("worker", 2), ["task 2", "2 tasks"]),
        (PAIR, ("chief", 0), ["'chief'", "0 tasks"]),
        (PAIR, ("evaluator", 1), ["'evaluator'", "1 tasks"]),
        (PAIR, ("worker", -1), ["-1", "from 0"]),
        ({"chief": ["a:1", "b:1"]}, ("chief", 0), ["most one 'chief'"]),
        (
            {**PAIR, "evaluator": ["c:1", "d:1"]},
            ("worker", 0),
            ["most one 'evaluator'"],
        ),
        ({"evaluator": ["a:1"]}, ("evaluator", 0), ["process that trains"]),
        ({"worker": []}, ("worker", 0), ["process that trains"]),
        ({"worker": {1: "b:1"}}, ("worker", 1), ["gap", "0 tasks"]),
        ({"worker": ["a:1", "A:1"]}, ("worker", 0), ["'A:1'", "task 1"]),
        ({"worker": ["a"]}, ("worker", 0), ["port is missing", "task 0"]),
        ({}, ("worker", 3), ["task 3", "no cluster"]),
        *(
            (
                {"worker": [f"{host}:1", "b:2"]},
                ("worker", index),
                [f"'{host}:1' for process 0", "machine for process 1"],
            )
            for host in (
                "localhost",
                "LocalHost.",
                "127.0.0.1",
                "127.1.2.3",
                "0.0.0.0",
                "[::1]",
                "[::ffff:127.0.0.1]",
            )
            for index in (0, 1)
        ),
        (
            {"chief": ["localhost:1"], "worker": ["localhost:2", "c:1"]},
            ("worker", 1),
            ["'localhost:1'", "machine for process 2"],
        ),
    ],
    ids=str,
)
def test_bad_cluster_is_refused(cluster, task, words):
    with pytest.raises(ValueError, match="Received|Missing: |but ") as caught:
        make_info(cluster, *task)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "cluster",
    [
        {"worker": ["localhost:1", "127.0.0.1:2", "[::1]:3", "127.0.1.1:4"]},
        # Nobody connects to process 1.
        {"worker": ["a:1", "localhost:2"]},
        # An evaluator does not connect to the others.
        {"worker": ["localhost:1"], "evaluator": ["b:1"]},
        {"worker": ["localhost.example.com:1", "b:1"]},
    ],
)
def test_local_address_that_all_can_reach_is_let_through(cluster):
    assert make_info(cluster, "worker", 0).process_id == 0


@pytest.mark.parametrize("index", [True, 1.0, [1]])
def test_index_that_is_no_integer_is_refused(index):
    with pytest.raises(TypeError, match="integer"):
        make_info(PAIR, "worker", index)


def test_task_info_is_frozen():
    info = make_info(PAIR, "worker", 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.index = 1


def test_task_info_of_a_large_cluster_is_quick():
    hosts = [f"host{index}.example.com:2222" for index in range(4096)]
    info = make_info({"worker": hosts}, "worker", 4095)
    assert (info.process_id, info.num_processes) == (4095, 4096)
