"""What `keras-strategies doctor` reports of GPUs; the driver is pretended."""

import pytest

from keras_strategies.cli.doctor.findings import Level
from keras_strategies.cli.doctor.gpus import check_gpus, read_driver_version
from keras_strategies.cluster.resolvers.torchrun_resolver import (
    TorchrunClusterResolver,
)
from keras_strategies.cluster.tasks import task_info
from tests.job.test_local_gpus import torchrun

pytestmark = pytest.mark.quick

PROC = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n"
    "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)\n"
)
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  "
    "Release Build\n"
)
INSTALLED = {
    "jaxlib": "0.10.2",
    "jax-cuda12-plugin": "0.10.2",
    "nvidia-nccl-cu12": "2.27.5",
}


@pytest.fixture
def host(tmp_path):
    """Reports of a host with a driver, four GPUs and these packages."""
    (tmp_path / "version").write_text(PROC)
    for index in range(4):
        (tmp_path / f"nvidia{index}").touch()

    def check(environ, info=None, installed=INSTALLED):
        return check_gpus(
            {"JAX_PLATFORMS": "cuda"} | environ,
            info,
            get_version=installed.get,
            driver=tmp_path / "version",
            dev=tmp_path,
        )

    return check


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (PROC, "535.104.05"),
        (OPEN, "550.54.14"),
        ("", None),
        ("\x00\xff 12.3", None),
    ],
    ids=["closed", "open", "empty", "binary"],
)
def test_version_of_the_driver_is_read(tmp_path, text, version):
    (tmp_path / "version").write_bytes(text.encode("latin-1"))
    assert read_driver_version(tmp_path / "version") == version


def test_machine_without_gpus_has_no_part(tmp_path):
    places = {"driver": tmp_path / "version", "dev": tmp_path}
    assert check_gpus({}, get_version={}.get, **places) is None
    part = check_gpus({}, get_version=INSTALLED.get, **places)
    (row,) = part.rows
    assert row == (
        "CUDA plugin",
        "jax-cuda12-plugin 0.10.2; this machine has no NVIDIA driver",
    )
    assert not part.findings


def test_versions_and_gpus_are_shown(host):
    part = host({"CUDA_VISIBLE_DEVICES": "0,1"})
    assert part.rows == (
        ("NVIDIA driver", "535.104.05"),
        ("CUDA plugin", "jax-cuda12-plugin 0.10.2"),
        ("NCCL", "nvidia-nccl-cu12 2.27.5"),
        ("GPUs", "2 visible GPUs (CUDA_VISIBLE_DEVICES='0,1')"),
    )
    assert not part.findings


def test_plugin_of_another_version_is_a_problem(host):
    part = host({}, installed=INSTALLED | {"jax-cuda12-plugin": "0.10.1"})
    (finding,) = part.findings
    assert finding.level is Level.PROBLEM
    assert "0.10.1 does not match jaxlib 0.10.2" in finding.text
    assert finding.fix == "pip install 'jax-cuda12-plugin==0.10.2'"


@pytest.mark.parametrize(
    ("platforms", "count"), [("", 1), ("cuda", 1), ("cpu", 0)]
)
def test_missing_plugin_is_a_warning_unless_gpus_are_not_wanted(
    host, platforms, count
):
    part = host({"JAX_PLATFORMS": platforms}, installed={"jaxlib": "0.10.2"})
    levels = [finding.level for finding in part.findings]
    assert levels == [Level.WARNING] * count
    assert ("NCCL", "not installed as a package") in part.rows


def test_gpus_of_a_process_are_those_that_it_will_take(host):
    environ = torchrun(1, 1, 2, 2)
    info = task_info(TorchrunClusterResolver(environ=environ))
    assert host(environ, info).rows[-1] == ("GPUs of this process", "2, 3")
    alone = torchrun(1, 0, 1, 2)
    assert host(alone, info).rows[-1] == (
        "GPUs of this process",
        "all visible GPUs",
    )
    cpu = host(environ | {"JAX_PLATFORMS": "cpu"}, info)
    assert cpu.rows[-1][0] == "GPUs"


def test_processes_that_would_share_a_gpu_are_a_problem(host):
    environ = torchrun(1, 1, 8, 8)
    info = task_info(TorchrunClusterResolver(environ=environ))
    (finding,) = host(environ, info).findings
    assert finding.level is Level.PROBLEM
    assert "4 visible GPUs for 8 processes on this host." in finding.text
    assert finding.fix.startswith("Start fewer processes")
