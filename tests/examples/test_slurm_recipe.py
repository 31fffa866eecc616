"""examples/clusters/train.sbatch, with SLURM itself on this machine."""

import os
import pathlib
import re
import shutil
import sys
import time

import pytest

from keras_strategies.reporting.document import load_report
from tests.support import slurm_cluster

pytestmark = pytest.mark.slurm
ROOT = pathlib.Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "clusters"
LIMIT_S = 300
DONE = r"2 processes, 2 replicas: loss [\d.]+ -> [\d.]+, accuracy [\d.]+"
# Trains for long when it is started first, and a little when started again.
LONG = """
import os, runpy, sys
import keras_strategies
import keras
again = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
History = keras.callbacks.History
on_epoch_end = History.on_epoch_end
count = 0
def told(self, epoch, logs=None):
    global count
    count += 1
    if count == 2:
        print("in fit", flush=True)
    if again and count == 5:
        self.model.stop_training = True
    on_epoch_end(self, epoch, logs)
History.on_epoch_end = told
sys.argv += ["--epochs", "100000"]
print("start", again, flush=True)
runpy.run_path({script!r}, run_name="__main__")
"""
WHERE = """
import os
import keras_strategies as ks
resolver = ks.cluster_resolver.SlurmClusterResolver(gpus_per_node=6)
print(
    os.environ["SLURM_PROCID"], os.environ["SLURMD_NODENAME"],
    resolver.master().rpartition("/")[2].partition(":")[0],
    resolver.gpu_ids(),
)
"""
TAKEN = """
import os
import pathlib
from keras_strategies.job.local_gpus import choose_gpus
from keras_strategies.cluster.resolvers.slurm_resolver import (
    SlurmClusterResolver,
)
from keras_strategies.cluster.tasks import make_task_info, task_info
resolver = SlurmClusterResolver()
info = task_info(resolver)
chosen = {"environ": os.environ, "platforms": "cuda"}
chosen["dev"] = pathlib.Path("/nowhere")
gpus = choose_gpus(info, resolver=resolver, **chosen)
numbers = info.coordinator_address, info.num_processes, info.process_id
assert choose_gpus(make_task_info(*numbers), **chosen) == gpus
print("takes", os.environ["SLURM_PROCID"], gpus)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    missing = slurm_cluster.missing()
    if missing:
        pytest.skip(f"apt install slurm-wlm munge: {missing} not found")
    python = pathlib.Path(sys.executable).parent
    environ = {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "PATH": f"{python}:{os.environ['PATH']}",
    }
    directory = tmp_path_factory.mktemp("slurm")
    with slurm_cluster.slurm_cluster(directory, **environ) as cluster:
        yield cluster


@pytest.fixture
def directory(tmp_path):
    """A directory as a user has it: the recipe beside the script."""
    for name in ("train.sbatch", "train.py"):
        shutil.copy(RECIPES / name, tmp_path)
    return tmp_path


def submit(slurm, directory, *options):
    words = ("sbatch", "--parsable", *options, "train.sbatch")
    return int(slurm.call(*words, cwd=directory))


def read_log(directory):
    return "\n".join(path.read_text() for path in directory.glob("train-*.log"))


def ended(slurm, number, state):
    return lambda: slurm.job(number)["JobState"] == state


def test_job_trains_on_both_nodes(slurm, directory):
    number = submit(slurm, directory, "--export=ALL,DOCTOR=1")
    done = slurm.wait(ended(slurm, number, "COMPLETED"), LIMIT_S)
    shown = read_log(directory)
    assert done, (slurm.job(number), shown)
    assert len(re.findall(DONE, shown)) == 1, shown
    assert not re.search(r"\bproblem", shown, re.IGNORECASE), shown


def check_that_it_is_started_again(slurm, directory, number):
    """The job ends with 75, is requeued, and the second start trains."""
    restarted = slurm.wait(
        lambda: slurm.job(number)["Restarts"] == "1", LIMIT_S
    )
    assert restarted, (slurm.job(number), read_log(directory))

    seen = time.monotonic()

    def is_done():
        state = slurm.job(number)["JobState"]
        if state == "PENDING" and time.monotonic() > seen + 5:
            # SLURM waits two minutes before it starts a job again. A node
            # refuses one that it ended in the same second.
            words = (f"JobId={number}", "StartTime=now")
            slurm.call("scontrol", "update", *words)
        return state == "COMPLETED"

    done = slurm.wait(is_done, LIMIT_S)
    shown = read_log(directory)
    assert done, (slurm.job(number), shown)
    # One log holds both starts.
    starts = re.findall(r"^start (\d)", shown, re.MULTILINE)
    assert starts == ["0", "0", "1", "1"], shown
    assert len(re.findall(DONE, shown)) == 1, shown
    report = load_report(directory / "checkpoints" / str(number))
    _, second = report["starts"]
    assert second["first_step"] > 0, report


@pytest.fixture
def long(directory):
    script = LONG.format(script=str(RECIPES / "train.py"))
    (directory / "train.py").write_text(script)
    return directory


def test_job_that_is_told_to_stop_is_started_again(slurm, long):
    number = submit(slurm, long)
    assert slurm.wait(lambda: read_log(long).count("in fit") == 2, LIMIT_S)
    slurm.call("scancel", "--signal=TERM", number)
    check_that_it_is_started_again(slurm, long, number)


def test_job_whose_time_is_over_is_started_again(slurm, long):
    # SIGTERM comes 90 to 150 seconds before the end.
    number = submit(slurm, long, "--time=4")
    check_that_it_is_started_again(slurm, long, number)


@pytest.mark.parametrize(
    ("distribution", "expected"),
    # Planes fill the first node beyond --ntasks-per-node.
    [("block", "222333"), ("cyclic", "232323"), ("plane=2", "223322")],
)
def test_tasks_know_their_nodes(slurm, tmp_path, distribution, expected):
    script = tmp_path / "where.py"
    script.write_text(WHERE)
    words = ("--nodes=2", "--ntasks=6", "--ntasks-per-node=3")
    shown = slurm.call(
        "srun", *words, "-m", distribution, "python", script, limit_s=LIMIT_S
    )
    found = sorted(re.findall(r"(\d) (\S+) (\S+) (\(.*\))", shown))
    nodes = "".join(node[-1] for _, node, _, _ in found)
    assert nodes == expected, shown
    assert all(node == address for _, node, address, _ in found), shown
    each = 6 // max(map(nodes.count, nodes))
    for rank, (_, _, _, gpus) in enumerate(found):
        first = each * nodes[:rank].count(nodes[rank])
        own = range(first, first + each)
        assert gpus == str(tuple(own)), shown


def test_tasks_that_a_file_distributes_are_refused(slurm, tmp_path):
    script = tmp_path / "where.py"
    script.write_text(WHERE)
    hosts = ",".join(reversed(slurm_cluster.NODES))
    with pytest.raises(AssertionError, match="srun -m block"):
        slurm.call(
            *("srun", "-m", "arbitrary", "-n2", "-w", hosts),
            *("python", script),
            limit_s=LIMIT_S,
        )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--gpus-per-node=4"], ["(0, 1)", "(2, 3)"]),
        (["--gpus-per-task=2"], ["(0, 1)", "(0, 1)"]),
        (["--gpus-per-task=1"], ["(0,)", "(0,)"]),
        (["--gpus-per-task=2", "--gpu-bind=none"], ["(0, 1)", "(2, 3)"]),
        (["--gpus-per-node=4", "--gpu-bind=single:1"], ["(0,)", "(0,)"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_tasks_take_the_gpus_that_they_see(slurm, tmp_path, options, expected):
    if not slurm.has_gpus:
        pytest.skip("device files can only be made by root")
    script = tmp_path / "taken.py"
    script.write_text(TAKEN)
    words = ("--nodes=2", "--ntasks=4", "--ntasks-per-node=2", *options)
    shown = slurm.call("srun", *words, "python", script, limit_s=LIMIT_S)
    found = dict(re.findall(r"takes (\d) (\(.*\))", shown))
    assert [found[str(rank)] for rank in range(4)] == 2 * expected, shown
