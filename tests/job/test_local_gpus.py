"""The GPUs of each process on a host; no GPU is needed, as none is started."""

import dataclasses
import json
import warnings

import pytest

from keras_strategies.cluster.resolvers.slurm_resolver import (
    SlurmClusterResolver,
)
from keras_strategies.cluster.resolvers.tf_config_resolver import (
    TFConfigClusterResolver,
)
from keras_strategies.cluster.resolvers.torchrun_resolver import (
    TorchrunClusterResolver,
)
from keras_strategies.cluster.tasks import make_task_info, task_info
from keras_strategies.job import local_gpus
from keras_strategies.job.local_gpus import (
    choose_gpus,
    count_visible_gpus,
    parse_gpus,
    uses_gpus,
)

pytestmark = pytest.mark.quick


@pytest.fixture
def host(tmp_path):
    """Makes the device files of a host with so many GPUs."""

    def make(count):
        for name in ("nvidiactl", "nvidia-uvm", "nvidia-caps"):
            (tmp_path / name).touch()
        for index in range(count):
            (tmp_path / f"nvidia{index}").touch()
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("visible", "on_host", "count"),
    [
        (None, 8, 8),
        (None, 0, None),
        ("0,1", 8, 2),
        (" 2 , 3 ", 8, 2),
        ("0,1,2,3", 2, 2),
        ("0,1", 0, 2),
        ("", 8, 0),
        ("-1", 8, 0),
        ("NoDevFiles", 8, 0),
        ("0,-1,1", 8, 1),
        ("GPU-2b8c1c1e-3d2a,GPU-aa", 8, 2),
        ("MIG-2b8c1c1e-3d2a,MIG-aa", 8, 1),
        ("0," * 100_000, 0, local_gpus._MAX_GPUS),
        ("9" * 100_000, 8, 0),
        ("0;1", 8, 0),
        ("٣", 8, 0),
    ],
    ids=lambda value: str(value)[:20],
)
def test_visible_gpus_are_counted_as_in_cuda(host, visible, on_host, count):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_visible_gpus(environ, host(on_host)) == count


@pytest.mark.parametrize(
    ("platforms", "on_host", "environ", "expected"),
    [
        ("cuda", 0, {}, True),
        ("gpu", 0, {}, True),
        ("CUDA,cpu", 0, {}, True),
        ("cpu", 8, {}, False),
        ("cpu,cuda", 8, {}, False),
        ("tpu", 8, {}, False),
        ("", 8, {}, True),
        (None, 8, {}, True),
        (None, 8, {"CUDA_VISIBLE_DEVICES": "-1"}, False),
    ],
)
def test_platform_decides_whether_gpus_are_used(
    host, monkeypatch, platforms, on_host, environ, expected
):
    # Any installed module stands for the plugin.
    monkeypatch.setattr(local_gpus, "PLUGINS", ("no_such_plugin", "json"))
    assert uses_gpus(environ, platforms, host(on_host)) is expected


def test_no_gpus_are_used_without_a_plugin_or_a_driver(
    host, monkeypatch, tmp_path_factory
):
    empty = tmp_path_factory.mktemp("dev")
    monkeypatch.setattr(local_gpus, "PLUGINS", ("json",))
    assert not uses_gpus({}, None, empty)
    monkeypatch.setattr(local_gpus, "PLUGINS", ("no_such_plugin",))
    assert not uses_gpus({}, None, host(8))


def torchrun(rank, local, per_host, world):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(per_host),
        "MASTER_ADDR": "host0",
        "MASTER_PORT": "29500",
    }


def choose(environ, dev, resolver=None, task=None, platforms="cuda"):
    task = task_info(resolver) if task is None else task
    return choose_gpus(
        task, environ, platforms=platforms, resolver=resolver, dev=dev
    )


def test_torchrun_processes_share_the_gpus_of_each_host(host):
    dev = host(8)
    for rank in range(8):
        environ = torchrun(rank, rank % 4, 4, 8)
        gpus = choose(environ, dev, TorchrunClusterResolver(environ=environ))
        first = 2 * (rank % 4)
        assert gpus == (first, first + 1)


def test_process_alone_on_its_host_takes_all_gpus(host):
    environ = torchrun(1, 0, 1, 2)
    resolver = TorchrunClusterResolver(environ=environ)
    assert choose(environ, host(8), resolver) == ()


@pytest.mark.parametrize("platforms", ["cpu", "tpu", None])
def test_jobs_without_gpus_are_left_as_they_were(tmp_path, platforms):
    environ = torchrun(1, 1, 2, 2)
    resolver = TorchrunClusterResolver(environ=environ)
    assert choose(environ, tmp_path, resolver, platforms=platforms) is None


def test_unknown_number_of_gpus_is_one_for_each_process(tmp_path):
    environ = torchrun(1, 1, 2, 2)
    resolver = TorchrunClusterResolver(environ=environ)
    assert choose(environ, tmp_path, resolver) == (1,)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0,1", (1,)), ("4,5,6,7", (2, 3)), ("5", (0,)), ("GPU-a,GPU-b", (1,))],
)
def test_gpus_are_positions_among_the_visible_ones(host, visible, expected):
    environ = torchrun(1, 1, 2, 2) | {"CUDA_VISIBLE_DEVICES": visible}
    resolver = TorchrunClusterResolver(environ=environ)
    assert choose(environ, host(8), resolver) == expected


@pytest.mark.parametrize("on_host", [1, 3])
def test_processes_that_would_share_a_gpu_are_refused(host, on_host):
    environ = torchrun(0, 0, 4, 4)
    resolver = TorchrunClusterResolver(environ=environ)
    with pytest.raises(ValueError, match="must not share a GPU") as caught:
        choose(environ, host(on_host), resolver)
    text = str(caught.value)
    assert f"Received: {on_host} visible GPU" in text
    assert "for 4 processes on this host. Start fewer" in text
    environ["JAX_LOCAL_DEVICE_IDS"] = "0"
    assert choose(environ, host(on_host), resolver) == (0,)


def test_idle_gpus_are_reported_by_one_process_of_a_host(host):
    dev = host(8)
    environ = torchrun(3, 0, 3, 6)
    resolver = TorchrunClusterResolver(environ=environ)
    with pytest.warns(UserWarning, match="2 of 8 GPUs of this host stay idle"):
        assert choose(environ, dev, resolver) == (0, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        environ = torchrun(5, 2, 3, 6)
        resolver = TorchrunClusterResolver(environ=environ)
        assert choose(environ, dev, resolver) == (4, 5)


def tf_config(workers, index, **jobs):
    task = {"type": "worker", "index": index}
    return {
        "TF_CONFIG": json.dumps(
            {"cluster": {**jobs, "worker": workers}, "task": task}
        )
    }


@pytest.mark.parametrize(
    ("index", "expected"),
    # Beside the chief, worker 1 runs on host0; worker 0 is alone.
    [(0, ()), (1, (2, 3)), (2, (0, 1)), (3, (2, 3))],
)
def test_tasks_of_tf_config_are_counted_by_host(host, index, expected):
    workers = ["host1:1", "HOST0:3", "[fd00::1]:1", "[fd00::1]:2"]
    environ = tf_config(workers, index, chief=["host0:1"])
    resolver = TFConfigClusterResolver(environ=environ)
    assert choose(environ, host(4), resolver) == expected


def test_names_of_this_machine_are_one_host(host):
    environ = tf_config(["localhost:1", "127.0.0.1:2", "[::1]:3"], 2)
    resolver = TFConfigClusterResolver(environ=environ)
    assert choose(environ, host(3), resolver) == (2,)


def test_open_mpi_processes_share_the_gpus_of_each_host(host):
    task = make_task_info("host0:2222", 4, 3)
    environ = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    assert choose(environ, host(4), task=task) == (2, 3)
    # Another job's launcher says nothing about this job.
    other = environ | {"OMPI_COMM_WORLD_SIZE": "8"}
    assert choose(other, host(4), task=task) == ()


@pytest.mark.parametrize(
    "changed",
    [
        {"OMPI_COMM_WORLD_LOCAL_RANK": "2"},
        {"OMPI_COMM_WORLD_LOCAL_RANK": "-1"},
        {"OMPI_COMM_WORLD_LOCAL_RANK": "one"},
        {"OMPI_COMM_WORLD_LOCAL_RANK": "9" * 5000},
        {"OMPI_COMM_WORLD_LOCAL_SIZE": "0"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE": "1000001"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE": None},
    ],
    ids=lambda changed: str(changed)[:60],
)
def test_launchers_numbers_are_bounded(host, changed):
    environ = {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    } | changed
    environ = {k: v for k, v in environ.items() if v is not None}
    task = make_task_info("host0:2222", 4, 3)
    with pytest.raises(
        (ValueError, RuntimeError), match=r"OMPI_\w+ (must|not)"
    ):
        choose(environ, host(4), task=task)


@pytest.mark.parametrize(
    "text",
    ["a", "0,", ",0", "0,0", "-1", "1.0", "1024", "٣", "0;1", "9" * 10**6],
    ids=lambda text: text[:10],
)
def test_local_device_ids_are_checked(text):
    with pytest.raises(ValueError, match="JAX_LOCAL_DEVICE_IDS must be a list"):
        parse_gpus(text)
    assert parse_gpus(" 3, 1") == (3, 1)


# What SLURM 22.05 sets in the tasks of a step, of two tasks on each of two
# nodes with four GPUs; tests/examples/test_slurm_recipe.py runs it.
STEP = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_GPUS_ON_NODE": "4",
}
BINDINGS = {
    "gpus-per-node=4": ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (2, 3)),
    "gpus-per-task=2": ({"CUDA_VISIBLE_DEVICES": "2,3"}, (0, 1)),
    "gpus-per-task=2, in a cgroup": ({"CUDA_VISIBLE_DEVICES": "0,1"}, (0, 1)),
    "gpus-per-task=1": (
        {"CUDA_VISIBLE_DEVICES": "1", "SLURM_GPUS_ON_NODE": "2"},
        (0,),
    ),
    "gpu-bind=none": ({}, (2, 3)),
    "gpu-bind=single:1": ({"CUDA_VISIBLE_DEVICES": "1"}, (0,)),
}


@pytest.mark.parametrize(
    ("step_gpus", "on_host", "count"), [("4", 8, 4), ("4", 0, 4), ("4", 2, 2)]
)
def test_step_without_a_binding_uses_its_gpus_only(
    host, step_gpus, on_host, count
):
    environ = {"SLURM_GPUS_ON_NODE": step_gpus}
    assert count_visible_gpus(environ, host(on_host)) == count


@pytest.mark.parametrize("binding", BINDINGS)
@pytest.mark.parametrize("way", ["resolver", "arguments", "TF_CONFIG"])
def test_slurm_tasks_take_what_slurm_gives_them(host, binding, way):
    changed, expected = BINDINGS[binding]
    environ = STEP | changed
    dev = host(4)
    if binding == "gpus-per-task=2, in a cgroup":
        dev = host(2)
    if way == "resolver":
        resolver = SlurmClusterResolver(environ=environ)
        assert resolver.gpu_ids() == expected
        assert resolver.num_accelerators() == {"GPU": len(expected)}
        assert choose(environ, dev, resolver) == expected
    elif way == "arguments":
        task = make_task_info("n1:8888", 4, 3)
        assert choose(environ, dev, task=task) == expected
    else:
        workers = ["n1:1", "n1:2", "n2:1", "n2:2"]
        resolver = TFConfigClusterResolver(environ=tf_config(workers, 3))
        assert choose(environ, dev, resolver) == expected


def test_numbers_of_gpus_that_a_resolver_was_given_count(host):
    environ = STEP | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    resolver = SlurmClusterResolver(gpus_per_task=1, environ=environ)
    assert choose(environ, host(4), resolver) == (1,)
    bound = STEP | {"CUDA_VISIBLE_DEVICES": "2,3"}
    resolver = SlurmClusterResolver(gpus_per_task=2, environ=bound)
    assert choose(bound, host(4), resolver) == (0, 1)


def test_slurm_tasks_that_would_share_a_gpu_are_refused(host):
    environ = STEP | {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "1"}
    resolver = SlurmClusterResolver(environ=environ)
    # SLURM's cgroups show GPU 0 in each task, so one GPU may be another's.
    assert choose(environ, host(1), resolver) == (0,)
    environ["SLURM_STEP_TASKS_PER_NODE"] = "3(x2)"
    environ |= {"SLURM_STEP_NUM_TASKS": "6", "CUDA_VISIBLE_DEVICES": "0,1"}
    environ |= {"SLURM_GPUS_ON_NODE": "2"}
    resolver = SlurmClusterResolver(environ=environ)
    with pytest.raises(ValueError, match="2 visible GPUs"):
        choose(environ, host(2), resolver)


def test_evaluator_of_a_slurm_step_takes_its_own_gpus(host):
    environ = STEP | {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_PROCID": "1"}
    environ |= {"SLURM_NODEID": "0"}
    jobs = {"chief": 1, "evaluator": 1, "worker": 2}
    resolver = SlurmClusterResolver(jobs, environ=environ)
    info = task_info(resolver)
    assert info.process_id is None
    assert choose(environ, host(4), resolver) == (2, 3)


def test_answers_of_a_foreign_resolver_are_checked(host):
    class Foreign:
        def gpu_ids(self):
            return [0, -1]

    task = dataclasses.replace(make_task_info("host0:1", 2, 0))
    with pytest.raises(ValueError, match="A GPU of `gpu_ids` must be from 0"):
        choose({}, host(2), Foreign(), task=task)
