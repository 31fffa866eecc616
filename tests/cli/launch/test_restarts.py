"""`keras-strategies launch --max-restarts`: what is started again, and how."""

import pathlib

import pytest

from keras_strategies.cli.launch import launch
from keras_strategies.cli.launch.local_job import Ending, JobEnd
from keras_strategies.cli.launch.restarts import (
    RestartRules,
    run_with_restarts,
)
from keras_strategies.job.progress_pipe import Progress
from tests.cli.launch.test_launch import run, script_in

KILLED = -9


def ended(code=KILLED, process=1, **more):
    cause = Ending(process=process, code=code)
    return JobEnd(
        code=code if code > 0 else 128 - code,
        text=cause.describe(),
        cause=cause,
        **more,
    )


def saving(step=None, checkpoint=None):
    return Progress(
        has_trained=step is not None,
        has_directory=True,
        step=step,
        checkpoint=checkpoint,
    )


def decide_all(ends, maximum=9):
    """The rules' decisions; `ends` are pairs of an end and the progress."""
    rules, decisions = RestartRules(maximum), []
    for end, progress in ends:
        decisions.append(rules.decide(end, progress))
        if isinstance(decisions[-1], str):
            break
    return decisions


def test_killed_processes_are_worth_a_restart_up_to_the_limit():
    ends = [(ended(), saving(step, step)) for step in (1, 2, 3)]
    first, second, third = decide_all(ends, maximum=2)
    assert first == second == 1.0
    assert third == "the limit of 2 restarts is reached"


@pytest.mark.parametrize("code", [71, 72, 75, KILLED])
def test_the_third_equal_death_at_the_same_step_ends_the_job(code):
    first, second, third = decide_all([(ended(code), saving(4, 4))] * 3)
    assert isinstance(first, float)
    assert isinstance(second, float)
    assert third == "this happened 3 times in a row after step 4"
    # No step of the job was completed, because it began at step 4.
    later = [(ended(code), saving(None, 4))] * 2
    assert decide_all([(ended(code), saving(4, 4)), *later])[-1] == third
    assert decide_all([(ended(code), saving())] * 3)[-1] == (
        "this happened 3 times in a row before the first step"
    )
    # Not at the same step, or not by the same code.
    ends = [(ended(code), saving(step, 4)) for step in (5, 6, 5, 5, 6, 6)]
    assert len(decide_all(ends, maximum=99)) == 6
    ends = [(ended(code), saving(4, 4)), (ended(-6), saving(4, 4))] * 3
    assert all(isinstance(decision, float) for decision in decide_all(ends))


@pytest.mark.parametrize("code", [1, 70, 3])
def test_an_error_at_the_same_step_twice_ends_the_job(code):
    ends = [(ended(code), saving(4, 4)), (ended(code), saving(4, 4))]
    assert decide_all(ends)[-1] == "the script failed twice after step 4"
    ends = [(ended(code), saving(4, 4)), (ended(code), saving(5, 4))] * 2
    assert len(decide_all(ends)) == 4
    # A death between them: it is unknown whether the error would have come.
    ends = [(ended(code), saving(4)), (ended(), saving(2))] * 2
    assert len(decide_all(ends)) == 4
    assert decide_all([(ended(code), saving())] * 2)[-1] == (
        "the script failed twice"
    )


def test_a_script_without_checkpoints_is_not_restarted_once_it_trained():
    (reason,) = decide_all([(ended(), Progress(has_trained=True))])
    assert "`ks.callbacks.Checkpoint`" in reason
    # Before it trains, nothing is lost.
    (decision,) = decide_all([(ended(), Progress())])
    assert isinstance(decision, float)


@pytest.mark.parametrize(
    "end",
    [
        JobEnd(code=0, is_final=True),
        ended(is_final=True),
        ended(75, is_final=True),
    ],
)
def test_what_was_asked_for_is_final(end):
    assert decide_all([(end, saving(1, 1))]) == [""]
    assert decide_all([(ended(), saving(1, 1))], maximum=0) == [""]


def test_waits_grow_until_a_checkpoint_is_added():
    saved = [None, None, 5, 5, 5, 6] + [6] * 7
    ends = [(ended(), saving(9 + i, at)) for i, at in enumerate(saved)]
    assert decide_all(ends, maximum=99) == [
        1,
        2,
        1,
        2,
        4,
        1,
        2,
        4,
        8,
        16,
        32,
        60,
        60,
    ]


def test_each_restart_is_one_line(capfd):
    reports = [
        (ended(), saving(7)),
        (ended(70, 2), saving(12, 10)),
        (ended(70, 0), saving(12, 10)),
    ]
    waits, runs = [], []

    def run_once(progress):
        end, found = reports[len(runs)]
        vars(progress).update(vars(found))
        runs.append(end)
        return end

    code = run_with_restarts(run_once, max_restarts=5, sleep=waits.append)
    assert code == 70
    assert len(runs) == 3
    assert waits == [1, 1]
    assert capfd.readouterr().err.splitlines() == [
        "keras-strategies launch: process 1 was killed by SIGKILL after step "
        "7; restart 1 of 5 in 1 s, from the beginning.",
        "keras-strategies launch: process 2 ended with exit code 70 after step "
        "12; restart 2 of 5 in 1 s, from the checkpoint of step 10.",
        "keras-strategies launch: process 0 ended with exit code 70; the job "
        "has ended. It is not restarted: the script failed twice after step "
        "12.",
    ]


SCRIPT = """
import json, os, pathlib, signal, sys
fd = int(os.environ["KERAS_STRATEGIES_PROGRESS_PIPE"].partition(":")[0])
config = json.loads(os.environ["TF_CONFIG"])
index, count = config["task"]["index"], len(config["cluster"]["worker"])
runs = pathlib.Path(sys.argv[1])
(runs / f"{index}").open("a").write(f"{count} {os.environ.get('GPUS')}\\n")
run = len((runs / f"{index}").read_text().split("\\n")) - 1
"""


@pytest.mark.multi_process
def test_a_killed_job_is_started_again(tmp_path):
    script = script_in(
        tmp_path,
        SCRIPT
        + """
os.write(fd, b"directory 0\\ncheckpoint 3\\nstep 5\\n")
if run <= 2 and index == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if run <= 2:
    signal.pause()
print(f"done in run {run}")
""",
    )
    words = ("--processes", "2", "--max-restarts", "3", script, str(tmp_path))
    out, err, code = run(*words)
    assert code == 0
    assert sorted(out) == ["[worker 1] done in run 3", "done in run 3"]
    told = "process 1 was killed by SIGKILL after step 5; restart {} of 3 in "
    assert [line.partition(": ")[2] for line in err] == [
        told.format(1) + "1 s, from the checkpoint of step 3.",
        told.format(2) + "2 s, from the checkpoint of step 3.",
    ]


def test_programs_of_killed_processes_do_not_hinder_the_cache(
    tmp_path, monkeypatch
):
    found = []

    def run_once(words, environments, names, progress):
        directory = pathlib.Path(environments[1]["JAX_COMPILATION_CACHE_DIR"])
        found.append([path.name for path in directory.glob("*-cache")])
        # JAX writes the program and then a file with the time, a-atime.
        (directory / "a-cache").write_bytes(b"cut of")
        vars(progress).update(vars(saving(len(found))))
        return ended() if len(found) == 1 else JobEnd(code=0)

    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(launch, "run_job", run_once)
    assert launch.launch([__file__], num_processes=2, max_restarts=1) == 0
    assert found == [[], []]


@pytest.mark.multi_process
def test_a_script_that_fails_twice_is_not_restarted(tmp_path):
    script = script_in(
        tmp_path,
        SCRIPT
        + """
sys.exit("The file of data must exist.")
""",
    )
    words = ("--processes", "3", "--max-restarts", "3")
    _, err, code = run(*words, script, str(tmp_path))
    assert code == 1
    assert err[-1].endswith("not restarted: the script failed twice.")
