"""The GPUs that processes of real jobs tell JAX to take, without GPUs."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from keras_strategies.cluster.addresses import find_free_ports
from tests.job.test_local_gpus import STEP, tf_config, torchrun
from tests.support.combinations import combine, few

pytestmark = pytest.mark.multi_process

ROOT = pathlib.Path(__file__).parents[2]

# One process of a job: only the setting is read, as starting JAX's devices
# fails on a machine without GPUs.
JOINS = """
import os, sys
import jax
import keras_strategies as ks
name = sys.argv[1]
if name == "numbers":
    place = dict(
        coordinator_address=sys.argv[2],
        num_processes=int(os.environ["OMPI_COMM_WORLD_SIZE"]),
        process_id=int(os.environ["OMPI_COMM_WORLD_RANK"]),
    )
elif name == "TF_CONFIG":
    place = {}
else:
    place = {"cluster_resolver": getattr(ks.cluster_resolver, name)()}
if len(sys.argv) > 3:
    jax.config.update("jax_cuda_visible_devices", sys.argv[3])
try:
    ks.MultiWorkerMirroredStrategy(startup_timeout_s=60, **place)
except (RuntimeError, AssertionError) as error:
    # JAX raises an AssertionError if its plugin finds no GPU.
    print("ERROR", error, flush=True)
seen = jax.config.values["jax_cuda_visible_devices"]
print("GPUS", seen, jax.distributed.is_initialized(), flush=True)
"""
FOREIGN = re.compile("SLURM|OMPI|RANK|WORLD|MASTER|CUDA|JAX|XLA|TF_|KERAS")


def join(environs, *words):
    """The settings of processes, and the errors that they raised."""
    base = {k: v for k, v in os.environ.items() if not FOREIGN.search(k)}
    base |= {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    base |= {"JAX_PLATFORMS": "cuda"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", JOINS, *words],
            env=base | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environ in environs
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    gpus = [re.findall(r"^GPUS (\S+) (\S+)$", text, re.M) for text in outputs]
    errors = [re.findall(r"^ERROR (.*)$", text, re.M) for text in outputs]
    assert all(len(seen) == 1 for seen in gpus), outputs
    return [seen[0] for seen in gpus], [said[0] for said in errors]


def step(rank, **changed):
    environ = STEP | {"SLURM_STEP_NODELIST": "127.0.0.1"} | changed
    environ |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    environ |= {"SLURM_NODEID": "0", "SLURM_PROCID": rank}
    # With these, JAX itself finds the cluster, and takes one GPU.
    environ |= {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}
    return environ | {"SLURM_LOCALID": rank}


def launched(name, port):
    """The environments of two processes on one host with four GPUs."""
    if name == "TorchrunClusterResolver":
        at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environs = [torchrun(rank, rank, 2, 2) | at for rank in (0, 1)]
    elif name == "SlurmClusterResolver":
        environs = [step("0"), step("1")]
    elif name == "TF_CONFIG":
        workers = [f"127.0.0.1:{port}", "127.0.0.1:1"]
        environs = [tf_config(workers, 0), tf_config(workers, 1)]
    else:
        environs = [
            {
                "OMPI_COMM_WORLD_RANK": rank,
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": rank,
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                # With this, JAX itself finds the cluster.
                "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:1",
            }
            for rank in ("0", "1")
        ]
    visible = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    return [environ | visible for environ in environs]


@pytest.mark.parametrize(
    "name",
    combine(
        [
            "TorchrunClusterResolver",
            "SlurmClusterResolver",
            "TF_CONFIG",
            "numbers",
        ],
        every=4,
    ),
)
def test_jax_is_told_each_processs_gpus(name):
    (port,) = find_free_ports(1)
    if name == "SlurmClusterResolver":
        port = 8888
    words = (name, f"127.0.0.1:{port}")
    seen, errors = join(launched(name, port), *words)
    assert seen == [("0,1", "True"), ("2,3", "True")], errors


@pytest.mark.slow
def test_slurm_task_alone_on_its_host_takes_all_gpus():
    (port,) = find_free_ports(1)
    name = "TorchrunClusterResolver"
    at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environs = [step("0") | torchrun(rank, 0, 1, 2) | at for rank in (0, 1)]
    # Each of the two processes is alone on its (pretended) host. JAX's own
    # detection would take the GPU 0 of each.
    seen, errors = join(environs, name)
    assert seen == [("all", "True")] * 2, errors


@pytest.mark.slow
def test_option_that_the_script_sets_is_kept():
    (port,) = find_free_ports(1)
    environs = launched("TorchrunClusterResolver", port)
    words = ("TorchrunClusterResolver", "", "3")
    seen, errors = join(environs, *words)
    assert seen == [("3", "True")] * 2, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "said"),
    few(
        [
            ({"CUDA_VISIBLE_DEVICES": "0,1"}, "must not share a GPU"),
            ({"JAX_LOCAL_DEVICE_IDS": "x"}, "JAX_LOCAL_DEVICE_IDS must be"),
        ],
        every=2,
    ),
    ids=["too few", "invalid"],
)
def test_all_processes_raise_before_jax_starts(changed, said):
    (port,) = find_free_ports(1)
    at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environs = [torchrun(rank, rank, 3, 3) | at for rank in range(3)]
    # The last process runs on another host, and has no problem.
    environs[2] |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environs = [environs[0] | changed, environs[1] | changed, environs[2]]
    seen, errors = join(environs, "TorchrunClusterResolver")
    assert seen == [("all", "False")] * 3
    assert all(re.search(rf"process \d.*{said}", text) for text in errors)
    assert len(set(errors)) == 1
