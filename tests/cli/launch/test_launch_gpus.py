"""The GPUs of launched processes; no process uses one."""

import pytest

from keras_strategies.cli.launch.launch import (
    assign_gpus,
    find_gpu_problem,
    make_environments,
    make_task_names,
)
from tests.cli.launch.test_launch import run, script_in

ADDRESSES = ["127.0.0.1:1", "127.0.0.1:2"]


def assign(environ, dev, *, has_evaluator=False, platform="cuda", count=2):
    environments = make_environments(
        environ,
        make_task_names(count, has_evaluator=has_evaluator),
        ADDRESSES[:count],
        num_devices=1,
        platform=platform,
    )
    names = ("JAX_LOCAL_DEVICE_IDS", "CUDA_VISIBLE_DEVICES")
    return [
        tuple(environment.get(name) for name in names)
        for environment in assign_gpus(
            environments, platform, has_evaluator=has_evaluator, dev=dev
        )
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
        ({}, {}, [("0,1,2", None), ("3,4,5", None)]),
        (
            {"CUDA_VISIBLE_DEVICES": "4,5"},
            {},
            [("0", "4,5"), ("1", "4,5")],
        ),
        (
            {"JAX_LOCAL_DEVICE_IDS": "5,3"},
            {},
            [("5", None), ("3", None)],
        ),
        (
            {},
            {"has_evaluator": True},
            [("0,1", None), ("2,3", None), (None, "4,5")],
        ),
        (
            {"CUDA_VISIBLE_DEVICES": "5,GPU-b,1"},
            {"has_evaluator": True},
            [("0", "5,GPU-b,1"), ("1", "5,GPU-b,1"), (None, "1")],
        ),
        ({}, {"count": 1}, [(None, None)]),
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
        ({"JAX_LOCAL_DEVICE_IDS": "1"}, "cuda", 2, "must not share a GPU"),
        ({"JAX_LOCAL_DEVICE_IDS": "x"}, "cuda", 2, "JAX_LOCAL_DEVICE_IDS mu"),
        ({"JAX_PLATFORMS": "cpu,cuda"}, "cuda", 6, ""),
        ({"JAX_PLATFORMS": "cpu"}, "cpu", 2, ""),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "cpu", 2, ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_problems_are_found_before_a_process_starts(
    dev, environ, platform, count, text
):
    problem = find_gpu_problem(environ, platform, count, dev)
    assert text in problem
    assert bool(problem) == bool(text)
    assert "\n" not in problem


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
names = ("JAX_PLATFORMS", "JAX_LOCAL_DEVICE_IDS", "CUDA_VISIBLE_DEVICES")
print(*map(os.environ.get, names))
""",
    )
    environ = {"CUDA_VISIBLE_DEVICES": "7,8,9", "JAX_PLATFORMS": ""}
    words = ("--platform", "cuda", "--evaluator", script)
    out, err, code = run(*words, environ=environ)
    assert code == 0, err
    assert sorted(out) == [
        "[evaluator] cuda None 9",
        "[worker 0] cuda 1 7,8,9",
        "cuda 0 7,8,9",
    ]
