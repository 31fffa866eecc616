"""`keras-strategies launch --max-restarts`: what is started again, and how."""

import pathlib

import pytest

from keras_strategies.cli import main
from keras_strategies.cli.launch import launch
from keras_strategies.cli.launch.local_job import Ending, JobEnd
from keras_strategies.cli.launch.restarts import (
    Restart,
    RestartRules,
    run_with_restarts,
)
from keras_strategies.job.local_gpus import LOCAL_IDS
from keras_strategies.job.progress_pipe import Progress
from tests.cli.launch.test_launch import run, script_in

KILLED = -9


def ended(code=KILLED, process=1, num_started=3, **more):
    cause = Ending(process=process, code=code)
    return JobEnd(
        code=code if code > 0 else 128 - code,
        text=cause.describe(),
        cause=cause,
        num_started=num_started,
        **more,
    )


def saving(step=None, checkpoint=None):
    return Progress(
        has_trained=step is not None,
        has_directory=True,
        step=step,
        checkpoint=checkpoint,
    )


def decide_all(ends, maximum=9, minimum=3, count=3):
    """The rules' decisions; `ends` are pairs of an end and the progress."""
    rules, decisions = RestartRules(maximum, minimum), []
    for end, progress in ends:
        decision = rules.decide(end, progress, count)
        decisions.append(decision)
        if isinstance(decision, str):
            break
        count = decision.num_processes
    return decisions


def test_killed_processes_are_worth_a_restart_up_to_the_limit():
    ends = [(ended(), saving(step, step)) for step in (1, 2, 3)]
    first, second, third = decide_all(ends, maximum=2)
    assert first == second == Restart(num_processes=3, wait_s=1.0)
    assert third == "the limit of 2 restarts is reached"


@pytest.mark.parametrize("code", [71, 72, 75, KILLED])
def test_the_third_equal_death_at_the_same_step_ends_the_job(code):
    first, second, third = decide_all([(ended(code), saving(4, 4))] * 3)
    assert isinstance(first, Restart)
    assert isinstance(second, Restart)
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
    assert all(isinstance(decision, Restart) for decision in decide_all(ends))


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


@pytest.mark.parametrize("code", [1, 70])
def test_errors_of_several_processes_before_any_step_are_the_scripts(code):
    ends = [(ended(code, num_errors=3), saving())] * 2
    assert decide_all(ends, minimum=2) == ["the script failed in 3 processes"]
    # Once it has trained, the cause may be outside of it.
    end = ended(code, num_errors=3)
    before, after = saving(4, 4), saving(None, 4)
    after.has_trained = True
    assert decide_all([(end, before), (end, after)], minimum=2)[-1] == (
        "the script failed twice after step 4"
    )


def test_a_script_without_checkpoints_is_not_restarted_once_it_trained():
    (reason,) = decide_all([(ended(), Progress(has_trained=True))])
    assert "`ks.callbacks.Checkpoint`" in reason
    # Before it trains, nothing is lost.
    (decision,) = decide_all([(ended(), Progress())])
    assert isinstance(decision, Restart)


@pytest.mark.parametrize(
    "end",
    [
        JobEnd(code=0, is_final=True, num_started=3),
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
    waits = [d.wait_s for d in decide_all(ends, maximum=99)]
    assert waits == [1, 2, 1, 2, 4, 1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize("code", [KILLED, 71])
def test_a_process_that_cannot_start_is_left_out(code):
    ends = [(ended(code, process=1), saving())] * 3
    decisions = decide_all(ends, minimum=2)
    assert [d.num_processes for d in decisions] == [3, 2, 2]
    assert [d.without for d in decisions] == [None, 1, None]
    # Never below the least number, never the evaluator, never at random.
    assert counts(ends, minimum=3) == [3, 3, None]
    evaluator = [(ended(code, process=3), saving())] * 3
    assert counts(evaluator, minimum=1) == [3, 3, None]
    others = [(ended(code, process=i), saving()) for i in (0, 1, 0)]
    assert counts(others, minimum=1) == [3, 3, None]
    later = [(ended(code, process=1), saving(1, 1))] * 3
    assert counts(later, minimum=1) == [3, 3, None]


def counts(ends, minimum):
    """The numbers of processes that are started; None: the job ends."""
    decisions = decide_all(ends, minimum=minimum)
    return [getattr(one, "num_processes", None) for one in decisions]


@pytest.mark.parametrize("code", [1, 70])
def test_a_process_that_raises_an_error_at_its_start_is_left_out(code):
    alone = (ended(code, process=1, num_errors=1), saving())
    assert counts([alone] * 2, minimum=2) == [3, 2]
    # If an error comes again, it was not that process.
    assert counts([alone] * 3, minimum=1) == [3, 2, None]
    # Its device broke after some steps.
    broken = (ended(code, process=1, num_errors=1), saving(9, 4))
    again = (alone[0], saving(None, 4))
    assert counts([broken, again, again], minimum=2) == [3, 3, 2]
    # Never below the least number, never the evaluator, never at random.
    assert counts([alone] * 2, minimum=3) == [3, None]
    evaluator = (ended(code, process=3, num_errors=1), saving())
    assert counts([evaluator] * 2, minimum=1) == [3, None]
    other = (ended(code, process=2, num_errors=1), saving())
    assert counts([alone, other], minimum=1) == [3, None]
    several = (ended(code, process=1, num_errors=2), saving())
    assert counts([alone, several], minimum=1) == [3, None]
    later = (ended(code, process=1, num_errors=1), saving(1, 1))
    assert counts([later] * 2, minimum=1) == [3, None]


def test_the_system_starts_fewer_processes():
    failed = JobEnd(code=1, text="no more processes", num_started=2)
    (decision,) = decide_all([(failed, saving())], minimum=2)
    assert (decision.num_processes, decision.without) == (2, None)
    (decision,) = decide_all([(failed, saving())], minimum=3)
    assert decision.num_processes == 3


def test_each_restart_is_one_line(capfd):
    reports = [
        (ended(), saving(7)),
        (ended(70, 2), saving(12, 10)),
        (ended(70, 0), saving(12, 10)),
    ]
    waits, runs = [], []

    def run_once(count, without, progress):
        end, found = reports[len(runs)]
        vars(progress).update(vars(found))
        runs.append((count, without))
        return end

    code = run_with_restarts(
        run_once, 3, max_restarts=5, min_processes=3, sleep=waits.append
    )
    assert code == 70
    assert runs == [(3, None)] * 3
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


def read_runs(directory, index):
    return (directory / str(index)).read_text().splitlines()


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


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(
            "os.kill(os.getpid(), signal.SIGSEGV)", marks=pytest.mark.slow
        ),
        "raise RuntimeError('The device is broken.')",
    ],
    ids=["signal", "error"],
)
@pytest.mark.multi_process
def test_a_job_continues_without_a_process_that_cannot_start(tmp_path, problem):
    script = script_in(
        tmp_path,
        SCRIPT
        + f"""
if index == 1 and count == 3:
    {problem}
if count == 3:
    signal.pause()
""",
    )
    words = ("--processes", "3", "--max-restarts", "3", "--min-processes", "1")
    _, err, code = run(*words, script, str(tmp_path))
    assert code == 0
    assert err[-1].endswith(
        "restart 2 of 3 in 2 s, with 2 processes, from the beginning."
    )
    assert read_runs(tmp_path, 0) == ["3 None", "3 None", "2 None"]


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
        return ended() if len(found) == 1 else JobEnd(code=0, num_started=2)

    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(launch, "run_job", run_once)
    assert launch.launch([__file__], num_processes=2, max_restarts=1) == 0
    assert found == [[], []]


@pytest.mark.multi_process
def test_a_script_that_fails_in_all_processes_is_not_restarted(tmp_path):
    script = script_in(
        tmp_path,
        SCRIPT
        + """
while len(list(runs.glob("[012]"))) < 3:
    pass
sys.exit("The file of data must exist.")
""",
    )
    words = ("--processes", "3", "--max-restarts", "3", "--min-processes", "1")
    _, err, code = run(*words, script, str(tmp_path))
    assert code == 1
    assert err[-1].endswith("not restarted: the script failed in 3 processes.")
    assert read_runs(tmp_path, 0) == ["3 None"]


def test_gpus_of_the_process_left_out_are_not_used():
    from keras_strategies.cli.launch.launch import release_gpus

    given = [{LOCAL_IDS: "0,1"}, {LOCAL_IDS: "2,3"}, {LOCAL_IDS: "4,5"}]
    assert release_gpus(given, 1) == {LOCAL_IDS: "0,1,4,5"}
    assert release_gpus([*given, {}], 0) == {LOCAL_IDS: "2,3,4,5"}
    assert release_gpus([{}, {}], 0) == {}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--max-restarts", "-1"], "--max-restarts must be 0 or more"),
        (["--min-processes", "1"], "--min-processes needs --max-restarts"),
        (
            ["--max-restarts", "1", "--min-processes", "3"],
            "--min-processes must be from 1 to the number of processes, which "
            "is 2. Received: 3",
        ),
        (["--max-restarts", "1", "--min-processes", "0"], "Received: 0"),
    ],
)
def test_wrong_arguments(capsys, words, problem):
    assert main(["launch", *words, __file__]) == 2
    assert problem in capsys.readouterr().err
