"""The resolvers of SLURM, Kubernetes and torchrun, against tf's own.

What differs on purpose is in the tests named test_parity_... and in
docs/parity.md.
"""

import importlib.util
import json
import os
import subprocess
import sys
import types

import pytest
import tensorflow as tf

import keras_strategies as ks
from keras_strategies import cluster_resolver as ours
from keras_strategies.cluster.resolvers import slurm_step
from keras_strategies.cluster.tasks import task_info
from tests.cluster.test_spec import answer

theirs = tf.distribute.cluster_resolver
SLURM_NAMES = (
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
    "CUDA_VISIBLE_DEVICES",
    "SLURM_GPUS_ON_NODE",
)
STEP = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[1-2],t02n13",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
}


# ---------------------------------------------------------------- SLURM


@pytest.fixture
def slurm(monkeypatch):
    """Both resolvers made from the same variables."""

    def make(environ, **arguments):
        for name in SLURM_NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        tfs = theirs.SlurmClusterResolver(**arguments)
        mine = ours.SlurmClusterResolver(**arguments, environ=environ)
        return mine, tfs

    return make


@pytest.mark.parametrize(
    ("changed", "arguments"),
    [
        ({}, {}),
        ({"SLURM_PROCID": "0"}, {"port_base": 80, "rpc_layer": "http"}),
        ({"SLURM_PROCID": "4"}, {"jobs": {"worker": 4, "chief": 1}}),
        ({}, {"jobs": {"ps": 2, "worker": 3}, "gpus_per_task": 1}),
        ({}, {"gpus_per_node": 8, "gpus_per_task": 3}),
        ({}, {"tasks_per_node": {"n1": 3, "n2": 2}}),
        ({"SLURM_STEP_NUM_TASKS": "6"}, {"tasks_per_node": 2}),
        ({}, {"auto_set_gpu": False, "rpc_layer": None}),
    ],
    ids=str,
)
def test_slurm_answers_as_tfs(slurm, changed, arguments):
    mine, tfs = slurm(STEP | changed, **arguments)
    assert mine.cluster_spec().as_dict() == tfs.cluster_spec().as_dict()
    assert mine.get_task_info() == tfs.get_task_info()
    assert (mine.task_type, mine.task_id) == (tfs.task_type, tfs.task_id)
    assert mine.rpc_layer == tfs.rpc_layer
    assert mine.num_accelerators() == tfs.num_accelerators()
    for task in [(), ("worker", 1), ("worker", 99), ("chief", 0, "other")]:
        assert answer(mine.master, *task) == answer(tfs.master, *task)


def test_tasks_gpus_are_those_tf_makes_visible(slurm, monkeypatch):
    mine, tfs = slurm(STEP, gpus_per_task=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "not changed")
    mine.cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "not changed"
    tfs.cluster_spec()
    gpus = ",".join(map(str, mine.gpu_ids()))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == gpus == "2,3"


@pytest.mark.parametrize(
    ("changed", "arguments", "words"),
    [
        ({"SLURM_PROCID": None}, {}, ["SLURM_PROCID not found", "srun"]),
        ({"SLURM_STEP_NUM_TASKS": None}, {}, ["SLURM_STEP_NUM_TASKS"]),
        ({"SLURM_STEP_NODELIST": None}, {}, ["SLURM_STEP_NODELIST"]),
        ({"SLURM_STEP_TASKS_PER_NODE": None}, {}, ["_TASKS_PER_NODE"]),
        ({"SLURM_STEP_NODELIST": "n[1"}, {}, ["brackets"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(y2)"}, {}, ["'2(y2)'"]),
        ({"SLURM_PROCID": "x"}, {}, ["SLURM_PROCID", "'x'"]),
        ({"SLURM_STEP_NUM_TASKS": "4"}, {}, ["4 tasks but 5"]),
        ({}, {"jobs": {"worker": 4}}, ["4 tasks but 5"]),
        ({}, {"gpus_per_task": 3}, ["more GPUs per node"]),
    ],
    ids=str,
)
def test_slurm_refuses_what_tf_refuses(slurm, changed, arguments, words):
    environ = {k: v for k, v in (STEP | changed).items() if v is not None}
    # tf's is made first.
    expected = answer(lambda: slurm(environ, **arguments))
    with pytest.raises(expected, match="Received") as caught:
        ours.SlurmClusterResolver(**arguments, environ=environ)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("changed", "arguments", "error", "words"),
    [
        ({"SLURM_PROCID": "5"}, {}, RuntimeError, "5, with 5 tasks"),
        ({"SLURM_PROCID": "-1"}, {}, ValueError, "'-1'"),
        ({"SLURM_STEP_NUM_TASKS": "0"}, {}, ValueError, "from 1"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,3"}, {}, ValueError, "3 hosts and 2"),
        ({"SLURM_STEP_NODELIST": "n1"}, {}, ValueError, "1 hosts and 3"),
        ({}, {"port_base": 65535}, ValueError, "last task's port"),
        ({}, {"port_base": "80"}, TypeError, "port_base"),
        ({}, {"gpus_per_node": -1}, ValueError, "gpus_per_node"),
        ({}, {"gpus_per_task": 1.5}, TypeError, "gpus_per_task"),
        ({}, {"jobs": {"worker": -5}}, ValueError, "'worker'"),
        ({}, {"jobs": {}}, RuntimeError, "0 tasks but 5"),
    ],
    ids=str,
)
def test_slurm_refuses_what_cannot_be(changed, arguments, error, words):
    with pytest.raises(error, match=words):
        ours.SlurmClusterResolver(**arguments, environ=STEP | changed)


def test_parity_slurm_knows_its_task_from_the_start(slurm):
    mine, tfs = slurm(STEP)
    assert tfs.get_task_info() == (None, None)
    assert tfs.master() == ""
    assert mine.get_task_info() == ("worker", 3)
    assert mine.master() == "grpc://n2:8889"


# As SLURM 22.05 answered on two nodes: `srun -N2 -n5 -m ...`.
DISTRIBUTED = [
    ({}, "00001"),
    ({"SLURM_DISTRIBUTION": "block"}, "00001"),
    ({"SLURM_DISTRIBUTION": "cyclic"}, "01000"),
    ({"SLURM_DISTRIBUTION": "cyclic:block"}, "01000"),
    ({"SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "2"}, "00100"),
]
UNEVEN_STEP = {
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[2-3]",
    "SLURM_STEP_TASKS_PER_NODE": "4,1",
    "SLURM_GPUS_ON_NODE": "8",
}


@pytest.mark.parametrize(("distribution", "nodes"), DISTRIBUTED)
def test_parity_slurm_finds_tasks_of_any_distribution(distribution, nodes):
    for rank, node in enumerate(nodes):
        local = nodes[:rank].count(node)
        place = {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local),
            "SLURMD_NODENAME": f"n{2 + int(node)}",
        }
        resolver = ours.SlurmClusterResolver(
            environ=UNEVEN_STEP | distribution | place
        )
        addresses = resolver.cluster_spec().as_dict()["worker"]
        assert [a.split(":")[0] for a in addresses] == [
            f"n{2 + int(n)}" for n in nodes
        ]
        assert addresses[rank] == f"n{2 + int(node)}:{8888 + local}"
        assert resolver.gpu_ids() == (2 * local, 2 * local + 1)


def test_slurm_refuses_tasks_that_a_file_distributes():
    environ = UNEVEN_STEP | {
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURMD_NODENAME": "n3",
        "SLURM_DISTRIBUTION": "arbitrary",
    }
    with pytest.raises(RuntimeError, match="arbitrary.*srun -m block"):
        ours.SlurmClusterResolver(environ=environ)


def test_parity_slurm_keeps_the_order_of_the_hosts(slurm):
    environ = STEP | {
        "SLURM_STEP_NUM_TASKS": "11",
        "SLURM_STEP_NODELIST": "n[1-11]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x11)",
    }
    mine, tfs = slurm(environ)
    assert mine.cluster_spec().task_address("worker", 1) == "n2:8888"
    assert tfs.cluster_spec().task_address("worker", 1) == "n10:8888"
    # SLURM's rank 3 runs on n4.
    assert mine.master() == "grpc://n4:8888"
    dictionary = {f"n{number}": 1 for number in range(11, 0, -1)}
    given = ours.SlurmClusterResolver(
        tasks_per_node=dictionary, environ=environ
    )
    assert given.cluster_spec() == mine.cluster_spec()


@pytest.mark.parametrize(
    ("changed", "gpus"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": None}, 0),
        ({"CUDA_VISIBLE_DEVICES": None, "SLURM_GPUS_ON_NODE": "8"}, 4),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, 1),
    ],
    ids=str,
)
def test_parity_slurm_counts_gpus_by_variables_only(changed, gpus):
    environ = {k: v for k, v in (STEP | changed).items() if v is not None}
    resolver = ours.SlurmClusterResolver(environ=environ)
    assert resolver.num_accelerators() == {"GPU": gpus}
    assert resolver.cluster_spec().num_tasks("worker") == 5
    assert resolver.gpu_ids() == tuple(range(gpus, 2 * gpus))


def test_parity_slurm_step_without_gpus_works(slurm):
    mine, tfs = slurm(STEP, gpus_per_node=0)
    assert mine.cluster_spec().num_tasks("worker") == 5
    with pytest.raises(ValueError, match="range"):
        tfs.cluster_spec()


def test_task_of_a_slurm_step():
    info = task_info(ours.SlurmClusterResolver(environ=STEP))
    assert (info.process_id, info.num_processes) == (3, 5)
    assert info.coordinator_address == "n1:8888"
    jobs = {"chief": 1, "worker": 4}
    info = task_info(ours.SlurmClusterResolver(jobs, environ=STEP))
    assert (info.type, info.index, info.process_id) == ("worker", 2, 3)


@pytest.mark.parametrize(
    ("hostlist", "expected"),
    [
        ("n1", "n1"),
        ("n[1-2],m5,o[3-4,6,7-9]", "n1 n2 m5 o3 o4 o6 o7 o8 o9"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("a,b", "a b"),
        ("n[1-2]-ib", "n1-ib n2-ib"),
        ("r[1-2]n[3-4]", "r1n3 r1n4 r2n3 r2n4"),
        ("[1-2]", "1 2"),
        ("a-b.example.com", "a-b.example.com"),
    ],
)
def test_hostlist_is_expanded(hostlist, expected):
    assert slurm_step.expand_hostlist(hostlist) == expected.split()


@pytest.mark.parametrize(
    "hostlist",
    [
        *("", ",", "a,", ",a", "a,,b", "a[", "a]", "a[1", "a[[1]]", "a[]"),
        *("a[1-]", "a[-1]", "a[2-1]", "a[x]", "a[1-2-3]", "a[1,]", "a[٣]"),
        *("a[0-99999999]", "a[0-999]b[0-999]c[0-9]"),
        *("a[0-999999],b[0-999999]", "a" * 250 + "[1-99999]"),
    ],
)
def test_bad_hostlist_is_refused(hostlist):
    with pytest.raises(ValueError, match="Invalid hostlist"):
        slurm_step.expand_hostlist(hostlist)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3(x2),2,1", [3, 3, 2, 1]), ("4", [4]), ("1(x1)", [1])],
)
def test_tasks_per_node_are_expanded(text, expected):
    assert slurm_step.expand_tasks_per_node(text) == expected


@pytest.mark.parametrize("text", ["", ",", "x", "2(x", "2x2", "1(x99999999)"])
def test_bad_tasks_per_node_are_refused(text):
    with pytest.raises(ValueError, match="Invalid tasks-per-node"):
        slurm_step.expand_tasks_per_node(text)


# ---------------------------------------------------------------- Kubernetes


class Client:
    """The one call of Kubernetes's client, over a table of pods."""

    def __init__(self, pods, *, has_pod_ip=True):
        self._pods = pods
        self._has_pod_ip = has_pod_ip

    def list_pod_for_all_namespaces(self, label_selector):
        pods = [
            types.SimpleNamespace(
                metadata=types.SimpleNamespace(name=name),
                status=types.SimpleNamespace(phase=phase, host_ip=ip),
            )
            for name, phase, ip in self._pods.get(label_selector, [])
        ]
        if self._has_pod_ip:
            for pod in pods:
                pod.status.pod_ip = pod.status.host_ip
        return types.SimpleNamespace(items=pods)


PODS = {
    "job-name=tensorflow": [
        ("train-b", "Running", "10.0.0.2"),
        ("train-a", "Running", "10.0.0.1"),
    ],
    "job-name=more": [("more-a", "Running", "10.0.0.3")],
    "job-name=broken": [("broken-a", "Failed", "10.0.0.4")],
}


@pytest.mark.parametrize("has_pod_ip", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"job_to_label_mapping": {"worker": ["job-name=more"]}},
        {
            "job_to_label_mapping": {
                "chief": ["job-name=more"],
                "worker": ["job-name=tensorflow", "job-name=nothing"],
            },
            "tf_server_port": 80,
            "rpc_layer": None,
        },
        {"job_to_label_mapping": {"worker": ["job-name=broken"]}},
        {"job_to_label_mapping": {"worker": ["job-name=nothing"]}},
    ],
    ids=str,
)
def test_kubernetes_answers_as_tfs(arguments, has_pod_ip):
    client = Client(PODS, has_pod_ip=has_pod_ip)
    mine, tfs = (
        module.KubernetesClusterResolver(**arguments, override_client=client)
        for module in (ours, theirs)
    )
    for _ in range(2):
        spec = answer(tfs.cluster_spec)
        if not isinstance(spec, type):
            spec = spec.as_dict()
            assert mine.cluster_spec().as_dict() == spec
        else:
            assert answer(mine.cluster_spec) is spec
        for task in [(), ("worker", 0), ("worker", 1, "http"), ("chief", 0)]:
            assert answer(mine.master, *task) == answer(tfs.master, *task)
        for name in ("task_type", "task_id", "rpc_layer", "environment"):
            assert getattr(mine, name) == getattr(tfs, name)
        for resolver in (mine, tfs):
            resolver.task_type, resolver.task_id = "worker", 0


def test_pod_that_does_not_run_is_named():
    mine = ours.KubernetesClusterResolver(
        {"worker": ["job-name=broken"]}, override_client=Client(PODS)
    )
    with pytest.raises(RuntimeError, match='"broken-a".*"Failed"'):
        mine.cluster_spec()


def test_parity_address_is_the_pods_own():
    pod = types.SimpleNamespace(
        metadata=types.SimpleNamespace(name="a"),
        status=types.SimpleNamespace(
            phase="Running", host_ip="10.0.0.1", pod_ip="fd00::7"
        ),
    )
    client = types.SimpleNamespace(
        list_pod_for_all_namespaces=lambda label_selector: (
            types.SimpleNamespace(items=[pod])
        )
    )
    mine, tfs = (
        module.KubernetesClusterResolver(override_client=client)
        for module in (ours, theirs)
    )
    assert mine.cluster_spec().job_tasks("worker") == ["[fd00::7]:8470"]
    assert tfs.cluster_spec().job_tasks("worker") == ["10.0.0.1:8470"]


def test_task_of_labeled_pods():
    mine = ours.KubernetesClusterResolver(override_client=Client(PODS))
    with pytest.raises(ValueError, match="task_type"):
        task_info(mine)
    mine.task_type, mine.task_id = "worker", 1
    info = task_info(mine)
    assert (info.process_id, info.num_processes) == (1, 2)
    assert info.coordinator_address == "10.0.0.1:8470"


@pytest.mark.skipif(
    importlib.util.find_spec("kubernetes") is not None,
    reason="kubernetes is installed",
)
@pytest.mark.parametrize("module", [ours, theirs])
def test_client_that_is_missing_is_named(module):
    with pytest.raises(ImportError, match="pip install kubernetes"):
        module.KubernetesClusterResolver()


@pytest.mark.parametrize(
    ("location", "loaded"),
    [("WITHIN_CLUSTER", "incluster"), ("OFF_CLUSTER", "kube")],
)
def test_credentials_are_those_of_the_location(location, loaded, monkeypatch):
    calls = []
    config = types.ModuleType("kubernetes.config")
    config.load_incluster_config = lambda: calls.append("incluster")
    config.load_kube_config = lambda: calls.append("kube")
    client = types.ModuleType("kubernetes.client")
    client.CoreV1Api = lambda: Client(PODS)
    package = types.ModuleType("kubernetes")
    package.config, package.client = config, client
    for module in (package, config, client):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    location = ours.KubernetesExecutableLocation[location]
    mine = ours.KubernetesClusterResolver(
        executable_location=location, environ={}
    )
    assert mine.cluster_spec().num_tasks("worker") == 2
    assert calls == [loaded]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"tf_server_port": 0}, ValueError, "tf_server_port"),
        ({"tf_server_port": "80"}, TypeError, "tf_server_port"),
        ({"job_to_label_mapping": {"worker": "a"}}, TypeError, "lists"),
    ],
)
def test_kubernetes_refuses_what_cannot_be(arguments, error, words):
    with pytest.raises(error, match=words):
        ours.KubernetesClusterResolver(
            **arguments, override_client=Client(PODS)
        )


POD = {
    "JOB_COMPLETION_INDEX": "2",
    "JAX_PROCESS_COUNT": "4",
    "JAX_COORDINATOR_ADDRESS": "train-0.pods",
}
POD_OF_SET = {
    "JOB_COMPLETION_INDEX": "2",
    "JAX_PROCESS_COUNT": "4",
    "HOSTNAME": "set-workers-0-2",
    "JOBSET_NAME": "set",
}
JAX_JOB = {
    "COORDINATOR_ADDRESS": "train-worker-0",
    "COORDINATOR_PORT": "6666",
    "NUM_PROCESSES": "4",
    "PROCESS_ID": "2",
}


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        (POD, "train-0.pods:8470"),
        (POD | {"JAX_COORDINATOR_PORT": "55527"}, "train-0.pods:55527"),
        (POD | {"JAX_COORDINATOR_ADDRESS": "a:77"}, "a:77"),
        (POD | {"JAX_COORDINATOR_ADDRESS": "fd00::1"}, "[fd00::1]:8470"),
        (POD | {"JAX_COORDINATOR_ADDRESS": "[fd00::1]"}, "[fd00::1]:8470"),
        (POD | {"JAX_COORDINATOR_ADDRESS": "[fd00::1]:9"}, "[fd00::1]:9"),
        (POD_OF_SET, "set-workers-0-0.set:8470"),
        (JAX_JOB, "train-worker-0:6666"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_indexed_job_is_read_without_a_client(environ, address):
    mine = ours.KubernetesClusterResolver(environ=environ)
    assert mine.cluster_spec() == {"worker": {0: address}}
    assert (mine.task_type, mine.task_id) == ("worker", 2)
    assert mine.num_processes == 4
    assert mine.master() == mine.master("worker", 0) == f"grpc://{address}"
    with pytest.raises(ValueError, match="No task with index 1"):
        mine.master("worker", 1)
    info = task_info(mine)
    assert (info.process_id, info.num_processes) == (2, 4)
    assert info.coordinator_address == address
    assert info.addresses == (address, None, None, None)
    assert not info.is_chief


@pytest.mark.parametrize(
    ("environ", "error", "words"),
    [
        (POD | {"JAX_PROCESS_COUNT": ""}, RuntimeError, "parallelism"),
        (POD | {"JAX_PROCESS_COUNT": "0"}, ValueError, "from 1"),
        (POD | {"JAX_PROCESS_COUNT": "2"}, ValueError, "from 0 to 1"),
        (POD | {"JOB_COMPLETION_INDEX": "x"}, ValueError, "'x'"),
        (POD | {"JAX_COORDINATOR_ADDRESS": ""}, RuntimeError, "JOBSET_NAME"),
        (POD | {"JAX_COORDINATOR_ADDRESS": "a b"}, ValueError, "pod 0"),
        (POD | {"JAX_COORDINATOR_PORT": "0"}, ValueError, "65535"),
        (POD_OF_SET | {"HOSTNAME": "a-node"}, RuntimeError, "'a-node'"),
        (POD_OF_SET | {"HOSTNAME": "train-1"}, RuntimeError, "'train-1'"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_bad_variables_of_a_pod_are_named(environ, error, words):
    mine = ours.KubernetesClusterResolver(environ=environ)
    with pytest.raises(error, match=words):
        task_info(mine)


# ---------------------------------------------------------------- torchrun

RUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("changed", "arguments", "address"),
    [
        ({}, {}, "host0:29500"),
        ({"MASTER_ADDR": "::1"}, {}, "[::1]:29500"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, {}, "host0:29500"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, {}, "host0:29501"),
        (
            {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": "65535"},
            {},
            "host0:65534",
        ),
        ({"JAX_COORDINATOR_PORT": "77"}, {}, "host0:77"),
        ({"JAX_COORDINATOR_PORT": "77"}, {"port": 88}, "host0:88"),
    ],
    ids=str,
)
def test_torchrun_is_read(changed, arguments, address):
    mine = ours.TorchrunClusterResolver(environ=RUN | changed, **arguments)
    assert mine.cluster_spec() == {"worker": {0: address}}
    assert (mine.task_type, mine.task_id) == ("worker", 3)
    assert mine.num_processes == 4
    assert mine.master() == mine.master("worker", 0) == address
    assert mine.master(rpc_layer="grpc") == f"grpc://{address}"
    assert mine.num_accelerators() == {}
    info = task_info(mine)
    assert (info.process_id, info.num_processes) == (3, 4)
    assert info.addresses == (address, None, None, None)
    mine.task_id = 0
    assert task_info(mine).is_chief


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"RANK": ""}, RuntimeError, "RANK not found.*torchrun"),
        ({"WORLD_SIZE": ""}, RuntimeError, "WORLD_SIZE not found"),
        ({"MASTER_ADDR": ""}, RuntimeError, "MASTER_ADDR not found"),
        ({"MASTER_PORT": ""}, RuntimeError, "MASTER_PORT not found"),
        ({"RANK": "4"}, ValueError, "from 0 to 3"),
        ({"RANK": "-1"}, ValueError, "'-1'"),
        ({"RANK": "1.0"}, ValueError, "'1.0'"),
        ({"WORLD_SIZE": "0"}, ValueError, "from 1"),
        ({"WORLD_SIZE": "9" * 5000}, ValueError, "from 1"),
        ({"MASTER_PORT": "70000"}, ValueError, "65535"),
        ({"MASTER_ADDR": "a b"}, ValueError, "MASTER_ADDR"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_variables_of_torchrun_are_named(changed, error, words):
    mine = ours.TorchrunClusterResolver(environ=RUN | changed)
    with pytest.raises(error, match=words) as caught:
        task_info(mine)
    assert len(str(caught.value)) < 400


SCRIPT = """
import dataclasses, json, os, socket, sys, types
# Without the package's __init__, which needs keras.
package = types.ModuleType("keras_strategies")
package.__path__ = [os.environ["KERAS_STRATEGIES_DIRECTORY"]]
sys.modules["keras_strategies"] = package
from keras_strategies.cluster_resolver import (
    TorchrunClusterResolver, task_info)
try:
    socket.create_server(("", int(os.environ["MASTER_PORT"]))).close()
    is_free = True
except OSError:
    is_free = False
info = task_info(TorchrunClusterResolver())
with open(os.path.join(sys.argv[1], f"{info.index}.json"), "w") as file:
    json.dump(dataclasses.asdict(info) | {
        "is_free": is_free, "port": os.environ["MASTER_PORT"]}, file)
"""


@pytest.mark.multi_process
@pytest.mark.torch
def test_torchrun_itself_is_understood(tmp_path):
    """Its agent listens on MASTER_PORT, so that nobody else can."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        + ["--nproc-per-node", "2", str(script), str(tmp_path)],
        env=os.environ
        | {"KERAS_STRATEGIES_DIRECTORY": os.path.dirname(ks.__file__)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    infos = [
        json.loads((tmp_path / f"{index}.json").read_text())
        for index in range(2)
    ]
    assert [info["process_id"] for info in infos] == [0, 1]
    assert [info["num_processes"] for info in infos] == [2, 2]
    assert infos[0]["addresses"] == infos[1]["addresses"]
    assert not infos[0]["is_free"]
    port = infos[0]["addresses"][0].rpartition(":")[2]
    assert port != infos[0]["port"]
