"""Jobs that a process was started in, and not told to join."""

import os
import warnings

import pytest

import keras_strategies as ks
from keras_strategies.job.place import find_unjoined_job
from keras_strategies.watchdog.launcher_pipe import LAUNCHER_FD

pytestmark = pytest.mark.quick

SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
TORCHRUN = {"WORLD_SIZE": "8", "RANK": "3", "MASTER_ADDR": "a"}


@pytest.mark.parametrize(
    ("environ", "count", "fix"),
    [
        (SLURM, 4, "SlurmClusterResolver()"),
        (MPI, 2, "OMPI_COMM_WORLD_RANK"),
        (TORCHRUN, 8, "TorchrunClusterResolver()"),
        (SLURM | TORCHRUN, 4, "SlurmClusterResolver()"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"} | MPI, 2, "OMPI"),
    ],
)
def test_a_job_of_several_is_found(environ, count, fix):
    launcher, found = find_unjoined_job(environ)
    assert found == count
    assert fix in (launcher.argument or launcher.use)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        SLURM | {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": "4"},
        {"WORLD_SIZE": "8"},
        MPI | {"OMPI_COMM_WORLD_SIZE": ""},
        MPI | {"OMPI_COMM_WORLD_SIZE": "-2"},
        MPI | {"OMPI_COMM_WORLD_SIZE": "two"},
        MPI | {"OMPI_COMM_WORLD_SIZE": "2.5"},
        MPI | {"OMPI_COMM_WORLD_SIZE": "9" * 5000},
        MPI | {"OMPI_COMM_WORLD_SIZE": "\u0662"},
    ],
    ids=lambda environ: str(environ)[:50],
)
def test_nothing_else_is_a_job(environ):
    assert find_unjoined_job(environ) is None


def set_to(monkeypatch, environ):
    for name in (*SLURM, *MPI, *TORCHRUN, "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("environ", [SLURM, MPI, TORCHRUN])
def test_a_strategy_that_joins_nobody_warns(monkeypatch, environ):
    set_to(monkeypatch, environ)
    with pytest.warns(UserWarning, match="trains a separate model") as told:
        ks.MultiWorkerMirroredStrategy()
    assert told[0].filename == __file__


@pytest.mark.parametrize(
    "others",
    [
        {"TF_CONFIG": '{"cluster": {}, "task": {"type": "worker"}}'},
        {LAUNCHER_FD: "3"},
        {"SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_who_was_told_or_launched_is_not_warned(monkeypatch, others):
    set_to(monkeypatch, SLURM | others)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            ks.MultiWorkerMirroredStrategy()
        except ValueError:
            # A TF_CONFIG that cannot be followed says so by itself.
            assert "TF_CONFIG" in os.environ


def test_other_strategies_are_not_warned(monkeypatch):
    set_to(monkeypatch, SLURM)
    ks.MirroredStrategy()
