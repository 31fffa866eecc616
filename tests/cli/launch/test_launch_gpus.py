"""The GPUs of launched processes; no process uses one."""

import re

import pytest

from keras_strategies.cli.launch.launch import (
    check_gpus,
    make_environments,
    make_task_names,
    split_gpus,
)
from keras_strategies.cluster.resolvers.tf_config_resolver import (
    TFConfigClusterResolver,
)
from keras_strategies.cluster.tasks import task_info
from keras_strategies.job.local_gpus import choose_gpus
from tests.cli.launch.test_launch import run, script_in

LOOPBACK = ["127.0.0.1:1", "127.0.0.1:2"]


def assign(environ, dev, *, has_evaluator=False, platform="cuda", count=2):
    """The GPUs that each process takes, and those that it sees."""
    environments = make_environments(
        environ,
        make_task_names(count, has_evaluator=has_evaluator),
        LOOPBACK[:count],
        num_devices=1,
        platform=platform,
    )
    if has_evaluator:
        split_gpus(environments, platform, dev)
    return [
        (
            choose_gpus(
                task_info(TFConfigClusterResolver(environ=environment)),
                environment,
                platforms=platform,
                dev=dev,
            ),
            environment.get("CUDA_VISIBLE_DEVICES"),
        )
        for environment in environments
    ]


@pytest.fixture
def dev(tmp_path):
    for index in range(6):
        (tmp_path / f"nvidia{index}").touch()
    return tmp_path


@pytest.mark.quick
@pytest.mark.parametrize(
    ("environ", "options", "expected"),
    [
        ({}, {}, [((0, 1, 2), None), ((3, 4, 5), None)]),
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, {}, [((0,), "4,5"), ((1,), "4,5")]),
        (
            {},
            {"has_evaluator": True},
            [((0, 1), "0,1,2,3"), ((2, 3), "0,1,2,3"), ((), "4,5")],
        ),
        (
            {"CUDA_VISIBLE_DEVICES": "5,GPU-b,1"},
            {"has_evaluator": True},
            [((0,), "5,GPU-b"), ((1,), "5,GPU-b"), ((), "1")],
        ),
        (
            {},
            {"has_evaluator": True, "count": 1},
            [((), "0,1,2"), ((), "3,4,5")],
        ),
        (  # In an allocation of SLURM, which has not chosen these GPUs.
            {"CUDA_VISIBLE_DEVICES": "4,5", "SLURM_GPUS_ON_NODE": "6"},
            {},
            [((0,), "4,5"), ((1,), "4,5")],
        ),
        (
            {"SLURM_GPUS_ON_NODE": "6"},
            {"has_evaluator": True},
            [((0, 1), "0,1,2,3"), ((2, 3), "0,1,2,3"), ((), "4,5")],
        ),
        ({}, {"count": 1}, [((), None)]),
        ({}, {"platform": "cpu"}, [(None, None)] * 2),
        ({}, {"platform": "tpu"}, [(None, None)] * 2),
    ],
    ids=str,
)
def test_processes_take_different_gpus(dev, environ, options, expected):
    assert assign(environ, dev, **options) == expected


@pytest.mark.quick
@pytest.mark.parametrize(
    ("environ", "platform", "count", "text"),
    [
        ({}, "cuda", 7, "6 visible GPUs for 7 processes"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "cuda", 2, "1 visible GPU "),
        ({"CUDA_VISIBLE_DEVICES": ""}, "cuda", 1, "CUDA_VISIBLE_DEVICES='' h"),
        ({"JAX_PLATFORMS": "cpu"}, "cuda", 1, "JAX_PLATFORMS='cpu' hides"),
        ({"JAX_PLATFORMS": "tpu,cpu"}, "gpu", 1, "omit --platform."),
        ({"JAX_LOCAL_DEVICE_IDS": "1"}, "cuda", 2, "JAX_LOCAL_DEVICE_IDS mu"),
        ({"JAX_PLATFORMS": "cpu,cuda"}, "cuda", 6, ""),
        ({"JAX_PLATFORMS": "cpu"}, "cpu", 2, ""),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "cpu", 2, ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_problems_are_found_before_a_process_starts(
    dev, environ, platform, count, text
):
    if not text:
        check_gpus(environ, platform, count, dev)
        return
    with pytest.raises(ValueError, match=re.escape(text)) as raised:
        check_gpus(environ, platform, count, dev)
    assert "\n" not in str(raised.value)


def test_hidden_gpus_are_one_line(tmp_path):
    script = script_in(tmp_path, "print('started')")
    out, err, code = run(
        "--platform", "cuda", script, environ={"JAX_PLATFORMS": "cpu"}
    )
    assert (out, code, len(err)) == ([], 2, 1)
    assert "JAX_PLATFORMS='cpu' hides them" in err[0]


def test_launched_processes_have_their_gpus(tmp_path):
    script = script_in(
        tmp_path,
        """
import os
names = ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")
print(*map(os.environ.get, names))
""",
    )
    environ = {"CUDA_VISIBLE_DEVICES": "7,8,9", "JAX_PLATFORMS": ""}
    words = ("--platform", "cuda", "--evaluator", script)
    out, err, code = run(*words, environ=environ)
    assert code == 0, err
    assert sorted(out) == [
        "[evaluator] cuda 9",
        "[worker 0] cuda 7,8",
        "cuda 7,8",
    ]
