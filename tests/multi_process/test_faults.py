"""What happens to one process ends the others, with the cause, in seconds."""

import re
import signal

import pytest

from tests.multi_process.jobs import run_job

pytestmark = pytest.mark.multi_process

DETECTION_S = 15.0
# 0.5 s where nothing else runs. Beats that are missed are noticed after 12 s.
EXCEPTION_S = 8.0
TIMEOUT_S = 4
SECONDS = {"stuck": TIMEOUT_S + 2.0, "early": 5.0, "stop_training": 5.0}
# Of the process that the fault is in.
ITS_CODE = {
    "device": 70,
    "exception": 70,
    "exit": 3,
    "interrupt": 130,
    "stuck": 72,
    "early": 71,
    "stop_training": 71,
}
CAUSES = {
    "device": r"process {p} failed: RuntimeError: .*a broken cpu",
    "exception": r"process {p} failed: .*Trouble: user bug \(faults.py:\d+ in ",
    "exit": r"process {p} ended with sys.exit\(3\)",
    "interrupt": r"process {p} failed: KeyboardInterrupt",
    "stuck": r"process {p} has started \d+ programs, none in the last \d+ s; "
    r"its main thread is at faults.py:\d+ in go_wrong",
    "early": r"the script of process {p} has ended after \d+ programs",
    "stop_training": r"the script of process {p} has ended after \d+ programs",
}
slow = pytest.mark.slow


def assert_ended(results, process, *, cause, seconds, its_code, code=71):
    """All others have this code, the cause in their last lines, in time."""
    for index, ended in enumerate(results):
        shown = f"process {index}: {ended.code}, {ended.seconds:.1f} s"
        print(shown, ended.last_lines, sep="\n")
        if index == process:
            assert ended.code == its_code, ended.output
            continue
        assert ended.code == code, shown + ended.output
        assert re.search(cause.format(p=process), ended.last_lines), (
            ended.output
        )
        assert ended.seconds < seconds, shown


@pytest.mark.parametrize(
    ("case", "process", "kind", "count"),
    [
        ("exception", 1, "fit", 2),
        ("device", 1, "fit", 2),
        pytest.param("device", 0, "fit", 3, marks=slow),
        pytest.param("exception", 0, "fit", 2, marks=slow),
        pytest.param("exception", 0, "loop", 2, marks=slow),
        pytest.param("exception", 1, "loop", 3, marks=slow),
        pytest.param("exception", 1, "fit in a thread", 2, marks=slow),
        pytest.param("exit", 1, "fit", 2, marks=slow),
        pytest.param("exit", 0, "loop", 2, marks=slow),
        pytest.param("interrupt", 1, "loop", 2, marks=slow),
        pytest.param("stuck", 1, "fit", 2, marks=slow),
        pytest.param("stuck", 0, "loop", 2, marks=slow),
        pytest.param("early", 1, "loop", 2, marks=slow),
        pytest.param("early", 0, "loop", 3, marks=slow),
        pytest.param("stop_training", 1, "fit", 2, marks=slow),
    ],
)
def test_a_process_goes_wrong(case, process, kind, count, tmp_path):
    is_stuck = case == "stuck"
    results = run_job(
        tmp_path,
        {"case": case, "process": process, "kind": kind},
        count=count,
        devices=2 if kind.startswith("fit") else 1,
        env={"KERAS_STRATEGIES_TIMEOUT_S": str(TIMEOUT_S)} if is_stuck else {},
    )
    assert_ended(
        results,
        process,
        code=72 if is_stuck else 71,
        its_code=ITS_CODE[case],
        cause=CAUSES[case],
        seconds=SECONDS.get(case, EXCEPTION_S),
    )


@pytest.mark.parametrize(
    ("sent", "process", "kind", "count"),
    [
        ("SIGKILL", 0, "fit", 2),
        # Twelve seconds of it are the wait for JAX's heartbeats.
        pytest.param("SIGKILL", 1, "fit", 2, marks=slow),
        pytest.param("SIGKILL", 0, "loop", 3, marks=slow),
        pytest.param("SIGKILL", 2, "loop", 3, marks=slow),
        pytest.param("SIGSTOP", 1, "fit", 2, marks=slow),
        pytest.param("SIGSTOP", 0, "loop", 2, marks=slow),
    ],
)
def test_a_process_dies_or_stops_silently(sent, process, kind, count, tmp_path):
    number = signal.Signals[sent]
    results = run_job(
        tmp_path,
        {"case": "none", "process": process, "kind": kind},
        count=count,
        devices=2 if kind == "fit" else 1,
        signal_to=(number, process),
    )
    assert_ended(
        results,
        process,
        its_code=None if sent == "SIGSTOP" else -number,
        cause="process {p} died",
        seconds=DETECTION_S,
    )


@pytest.mark.slow
def test_a_stranger_takes_a_process_place_in_jaxs_service(tmp_path):
    told = {"case": "stranger", "process": 1, "kind": "loop"}
    results = run_job(tmp_path, told)
    for ended in results:
        # The process that hosts the service may abort first.
        assert ended.code in (71, -signal.SIGABRT), ended.output
        assert "unexpectedly tried to connect" in ended.output
        assert ended.seconds < DETECTION_S


@slow
@pytest.mark.parametrize("process", [0, 1])
def test_the_launcher_tells_who_died(process, tmp_path):
    results = run_job(
        tmp_path,
        {"case": "none", "process": process, "kind": "fit"},
        signal_to=(signal.SIGKILL, process),
        pipes=True,
    )
    assert_ended(
        results,
        process,
        its_code=-signal.SIGKILL,
        cause="71: process {p} was killed by SIGKILL",
        seconds=1.5,
    )


@pytest.mark.parametrize(
    ("process", "kind", "count"),
    [
        (1, "fit", 2),
        pytest.param(0, "fit", 2, marks=slow),
        pytest.param(0, "loop", 3, marks=slow),
    ],
)
def test_all_stop_at_the_same_step_when_one_is_told_to_end(
    process, kind, count, tmp_path
):
    results = run_job(
        tmp_path,
        {"case": "term", "process": process, "kind": kind},
        count=count,
        signal_to=(signal.SIGTERM, process),
    )
    stopped = set()
    for ended in results:
        print(f"{ended.code}, {ended.seconds:.1f} s", ended.last_lines)
        assert ended.code == 75, ended.output
        assert "was stopped by SIGTERM" in ended.last_lines
        assert ended.seconds < 30
        stopped.add(re.search(r"^stopped (.*) at", ended.output, re.M)[1])
    assert len(stopped) == 1, stopped
    assert {ended.last_step for ended in results} == {results[0].last_step}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("fit", marks=slow), "compiler"])
def test_a_long_compilation_is_no_stall(tmp_path, kind):
    results = run_job(
        tmp_path,
        {"case": "compiles", "process": 1, "kind": kind},
        devices=2,  # So a program's start does not wait for its end.
        env={"KERAS_STRATEGIES_TIMEOUT_S": "3"},
    )
    for ended in results:
        assert ended.code == 0, ended.output
        assert ended.seconds > 9
