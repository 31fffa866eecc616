"""examples/clusters: every recipe is read, and starts its script here."""

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

import keras_strategies as ks
from keras_strategies.cluster.addresses import find_free_ports
from keras_strategies.names import versions
from keras_strategies.reporting.document import load_report
from tests.support import compiling
from tests.support.commands import CHILD, WITHOUT_PACKAGES

ROOT = pathlib.Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "clusters"
TIME_LIMIT_S = 300
SHELL = (
    *("certificates.sh", "tf_config.sh", "torchrun.sh", "tpu_vm.sh"),
    "train.sbatch",
)
MANIFESTS = ("jobset.yaml", "gke_tpu.yaml")
DONE = r"2 processes, 2 replicas: loss [\d.]+ -> [\d.]+, accuracy [\d.]+"

# Starts two tasks as a SLURM step on this machine.
SRUN = """#!{python}
import os, subprocess, sys
words = [word for word in sys.argv[1:] if not word.startswith("--kill")]
step = {{
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "127.0.0.1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}}
tasks = [
    subprocess.Popen(words, env=os.environ | step | {{"SLURM_PROCID": str(i)}})
    for i in range(2)
]
sys.exit(max(task.wait() for task in tasks))
"""


def environment(**environ):
    """Variables of a process that has one CPU device."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name == versions.SILENCE
        or not name.startswith(("KERAS_", "XLA_", "TF_", "SLURM_"))
    }
    path = [str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]
    return (
        inherited
        | {"PYTHONPATH": os.pathsep.join([str(CHILD), str(ROOT)])}
        | {"JAX_PLATFORMS": "cpu", WITHOUT_PACKAGES: "sklearn"}
        | {"XLA_FLAGS": compiling.FLAGS}
        | {"PATH": os.pathsep.join(path)}
        | environ
    )


def run_all(*processes):
    """Runs commands at the same time; what they print, together."""
    with contextlib.ExitStack() as stack:
        running = []
        for words, environ in processes:
            process = subprocess.Popen(
                words,
                env=environ,
                cwd=RECIPES,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            running.append(process)
        outputs = [p.communicate(timeout=TIME_LIMIT_S)[0] for p in running]
        assert [p.returncode for p in running] == [0] * len(running), outputs
    return "\n".join(outputs)


def manifests(name):
    return list(yaml.safe_load_all((RECIPES / name).read_text()))


def get_pod(job_set):
    """The Job and the pod of a JobSet's only job."""
    (job,) = job_set["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    return job["name"], spec, spec["template"]["spec"]


def test_every_recipe_is_known_here():
    found = {path.name for path in RECIPES.iterdir() if path.is_file()}
    # With Ray itself: tests/examples/test_ray_recipe.py.
    assert found == {"train.py", "ray_train.py", *SHELL, *MANIFESTS}


@pytest.mark.parametrize("name", SHELL)
def test_shell_reads_the_recipe(name):
    path = RECIPES / name
    interpreter = path.read_text().splitlines()[0].removeprefix("#!")
    subprocess.run([interpreter, "-n", path], check=True, timeout=60)
    assert os.access(path, os.X_OK) or name.endswith(".sbatch")


def test_header_of_the_slurm_job():
    lines = (RECIPES / "train.sbatch").read_text().splitlines()
    header = [line for line in lines if line.startswith("#SBATCH")]
    options = dict(
        re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line).groups()
        for line in header
    )
    assert options["nodes"] == "2"
    assert options["ntasks-per-node"] == "1"
    assert options["signal"].startswith("TERM@")
    # SLURM reads no option after the first command.
    first = next(
        i for i, line in enumerate(lines) if line and not line.startswith("#")
    )
    assert all(lines.index(line) < first for line in header)


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_is_a_job_set(name):
    job_set = manifests(name)[0]
    assert job_set["kind"] == "JobSet"
    _, job, pod = get_pod(job_set)
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert container["command"][1] == "/scripts/train.py"


def test_pods_of_the_job_set_find_each_other():
    job_set, policy = manifests("jobset.yaml")
    name, job, pod = get_pod(job_set)
    (container,) = pod["containers"]
    environ = {
        item["name"]: item.get("value", job_set["metadata"]["name"])
        for item in container["env"]
    }
    assert environ["JAX_PROCESS_COUNT"] == str(job["parallelism"])
    for index in range(job["completions"]):
        resolver = ks.cluster_resolver.KubernetesClusterResolver(
            environ=environ
            | {
                "JOB_COMPLETION_INDEX": str(index),
                # As JobSet names pods: set, job, number of it, index.
                "HOSTNAME": f"train-{name}-0-{index}",
            }
        )
        info = ks.cluster_resolver.task_info(resolver)
        assert (info.process_id, info.num_processes) == (index, 2)
        assert info.coordinator_address.startswith("train-worker-0-0.train:")
    labels = job["template"]["metadata"]["labels"]
    selected = policy["spec"]["podSelector"]["matchLabels"]
    assert selected.items() <= labels.items()


def test_chips_of_the_tpu_slice_are_those_of_its_hosts():
    _, job, pod = get_pod(manifests("gke_tpu.yaml")[0])
    (container,) = pod["containers"]
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    sides = [int(side) for side in topology.split("x")]
    chips = int(container["resources"]["limits"]["google.com/tpu"])
    assert sides[0] * sides[1] == job["parallelism"] * chips


@pytest.mark.slow
def test_script_trains_through_launch():
    shown = run_all(
        (
            [
                sys.executable,
                "-m",
                "keras_strategies.cli",
                "launch",
                "--processes",
                "2",
                "train.py",
            ],
            environment(),
        )
    )
    assert re.search(DONE, shown), shown


@pytest.mark.slow
def test_script_trains_with_tf_config():
    hosts = " ".join(f"127.0.0.1:{port}" for port in find_free_ports(2))
    shown = run_all(
        *[
            (["./tf_config.sh", str(number)], environment(HOSTS=hosts))
            for number in range(2)
        ]
    )
    assert len(re.findall(DONE, shown)) == 1, shown


@pytest.mark.slow
def test_script_trains_in_a_slurm_job(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text(SRUN.format(python=sys.executable))
    srun.chmod(0o755)
    environ = environment(SLURM_JOB_ID=str(find_free_ports(1)[0] - 20000))
    environ["PATH"] = f"{tmp_path}{os.pathsep}{environ['PATH']}"
    environ["SLURM_SUBMIT_DIR"] = str(tmp_path)
    shutil.copy(RECIPES / "train.py", tmp_path)
    for start in (1, 2):
        epochs = 4 + start
        words = ["bash", "train.sbatch", "--epochs", str(epochs)]
        shown = run_all((words, environ))
        assert len(re.findall(DONE, shown)) == 1, shown
        (directory,) = (tmp_path / "checkpoints").iterdir()
        assert directory.name == environ["SLURM_JOB_ID"]
        report = load_report(directory)
        assert report["num_starts"] == start
        assert report["num_steps"] == 16 * epochs


@pytest.mark.slow
def test_script_trains_in_pods():
    (container,) = get_pod(manifests("jobset.yaml")[0])[2]["containers"]
    words = [sys.executable, "train.py", *container["command"][2:]]
    address = f"127.0.0.1:{find_free_ports(1)[0]}"
    shown = run_all(
        *[
            (
                words,
                environment(
                    JAX_PROCESS_COUNT="2",
                    JAX_COORDINATOR_ADDRESS=address,
                    JOB_COMPLETION_INDEX=str(index),
                ),
            )
            for index in range(2)
        ]
    )
    assert len(re.findall(DONE, shown)) == 1, shown


@pytest.mark.slow
@pytest.mark.torch
def test_script_trains_under_torchrun():
    environ = environment(
        HOST="127.0.0.1",
        NODES="1",
        PROCESSES="2",
        PORT=str(find_free_ports(1)[0]),
    )
    shown = run_all((["./torchrun.sh"], environ))
    assert len(re.findall(DONE, shown)) == 1, shown
