"""`keras-strategies launch --max-restarts`: what is started again, and how."""

import pathlib

import pytest

from keras_strategies.cli.launch import launch
from keras_strategies.cli.launch.local_job import Ending, JobEnd
from tests.cli.launch.test_launch import run, script_in

KILLED = -9


def ended(code, process=1, **more):
    return JobEnd(
        code=code if code > 0 else 128 - code,
        text=Ending(process=process, code=code).describe(),
        **more,
    )


@pytest.mark.parametrize(
    ("ends", "maximum", "lines"),
    [
        (
            [ended(KILLED), ended(70, 2), JobEnd(code=0, is_final=True)],
            5,
            [
                "process 1 was killed by SIGKILL; restart 1 of 5 in 1 s.",
                "process 2 ended with exit code 70; restart 2 of 5 in 1 s.",
            ],
        ),
        (
            [ended(KILLED), ended(3, 0)],
            1,
            [
                "process 1 was killed by SIGKILL; restart 1 of 1 in 1 s.",
                "process 0 ended with exit code 3; the job has ended.",
            ],
        ),
        # Whoever asked for its end wants no other job.
        (
            [ended(75, is_final=True)],
            5,
            ["process 1 ended with exit code 75; the job has ended."],
        ),
        (
            [ended(9)],
            0,
            ["process 1 ended with exit code 9; the job has ended."],
        ),
    ],
)
def test_each_restart_is_one_line(ends, maximum, lines, monkeypatch, capfd):
    waits, left = [], list(ends)
    monkeypatch.setattr(launch.time, "sleep", waits.append)
    code = launch.run_with_restarts(lambda: left.pop(0), max_restarts=maximum)
    assert code == ends[-1].code
    assert left == []
    assert waits == [1.0] * (len(ends) - 1)
    assert capfd.readouterr().err.splitlines() == [
        f"keras-strategies launch: {line}" for line in lines
    ]


@pytest.mark.multi_process
def test_a_killed_job_is_started_again(tmp_path):
    script = script_in(
        tmp_path,
        """
import json, os, pathlib, signal, sys
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
runs = pathlib.Path(sys.argv[1]) / f"{index}"
runs.open("a").write("x")
if len(runs.read_text()) <= 2:
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
print(f"done in run {len(runs.read_text())}")
""",
    )
    words = ("--processes", "2", "--max-restarts", "3", script, str(tmp_path))
    out, err, code = run(*words)
    assert code == 0
    assert sorted(out) == ["[worker 1] done in run 3", "done in run 3"]
    told = "process 1 was killed by SIGKILL; restart {} of 3 in 1 s."
    assert [line.partition(": ")[2] for line in err] == [
        told.format(1),
        told.format(2),
    ]


def test_programs_of_killed_processes_do_not_hinder_the_cache(
    tmp_path, monkeypatch
):
    found = []

    def run_once(words, environments, names):
        directory = pathlib.Path(environments[1]["JAX_COMPILATION_CACHE_DIR"])
        found.append([path.name for path in directory.glob("*-cache")])
        # JAX writes the program and then a file with the time, a-atime.
        (directory / "a-cache").write_bytes(b"cut of")
        is_first = len(found) == 1
        return ended(KILLED) if is_first else JobEnd(code=0, is_final=True)

    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(launch, "run_job", run_once)
    assert launch.launch([__file__], num_processes=2, max_restarts=1) == 0
    assert found == [[], []]
