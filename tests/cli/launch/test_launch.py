"""`keras-strategies launch`: what is shown, who is ended when, exit codes."""

import collections
import contextlib
import errno
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from keras_strategies.cli import main
from keras_strategies.cli.launch import local_job
from keras_strategies.cli.launch.launch import (
    make_environments,
    make_task_names,
)
from keras_strategies.cli.launch.local_job import Ending, find_first_cause
from keras_strategies.cluster.addresses import find_free_ports
from keras_strategies.cluster.resolvers.tf_config_resolver import (
    TFConfigClusterResolver,
)
from keras_strategies.cluster.tasks import task_info
from tests.support.combinations import few
from tests.support.waiting import wait_until

pytestmark = pytest.mark.multi_process

ROOT = pathlib.Path(__file__).parents[3]
TIME_LIMIT_S = 120
LAUNCHED = ["-m", "tests.cli.launch.launched"]


def start(*words, prepare="", environ=None, **options):
    """Starts the launcher; its processes run `launched.py` or a script."""
    code = f"""
import signal, sys
from keras_strategies.cli import main
from keras_strategies.cli.launch import local_job
# They are ignored if the tests are run by `nohup`, or in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
{prepare}
sys.exit(main(["launch", *sys.argv[1:]]))
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})}
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environ,
        cwd=ROOT,
        **{"stdout": subprocess.PIPE} | options,
    )


def finish(process):
    """Its stdout and stderr as lines, and its exit code."""
    try:
        out, err = process.communicate(timeout=TIME_LIMIT_S)
    finally:
        process.kill()
        process.wait()
    return (out or "").splitlines(), err.splitlines(), process.returncode


def run(*words, **options):
    return finish(start(*words, **options))


def started(*words, **options):
    """Starts processes and waits until all have said their ids."""
    process = start(
        "--processes", str(len(words)), *LAUNCHED, *words, **options
    )
    pids = []
    while len(pids) < len(words):
        line = process.stdout.readline()
        assert line, process.communicate()
        if found := re.search(r"pid (\d+)", line):
            pids.append(int(found[1]))
    return process, pids


def read_pid(pids, index):
    """The process of a number: it has that in its TF_CONFIG."""
    for pid in pids:
        environ = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        (text,) = (e for e in environ if e.startswith(b"TF_CONFIG="))
        if json.loads(text[10:])["task"]["index"] == index:
            return pid
    raise AssertionError(index)


def is_gone(pid, within_s=30.0):
    def has_ended():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state = pathlib.Path(f"/proc/{pid}/stat").read_text()
            return state.rpartition(")")[2].split()[0] in "ZX"
        return True

    try:
        return wait_until(has_ended, within_s)
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        return False


def script_in(directory, text):
    (directory / "script.py").write_text(text)
    return str(directory / "script.py")


def test_output_is_whole_lines_with_the_number_of_the_process(tmp_path):
    script = script_in(
        tmp_path,
        """
import json, os, sys
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
for i in range(300):
    for part in (f"out{index} {i} ", "x" * 3000, "\\n"):
        sys.stdout.write(part)
print("10%\\r50%\\r100%")
print("to stderr", *sys.argv[1:], file=sys.stderr)
sys.stdout.write("no newline")
""",
    )
    out, err, code = run("--processes", "3", script, "--processes", "7")
    assert code == 0, err
    assert sorted(err) == sorted(
        f"{prefix}to stderr --processes 7"
        for prefix in ("", "[worker 1] ", "[worker 2] ")
    )
    # splitlines above takes a carriage return for an end, too.
    shown = collections.Counter(
        re.sub(r"\d+ x+$", "x", line)
        for line in out
        if line not in ("10%", "50%", "100%")
    )
    expected = {"out0 x": 300, "no newline": 1}
    for worker in (1, 2):
        prefix = f"[worker {worker}] "
        expected |= {
            f"{prefix}out{worker} x": 300,
            f"{prefix}100%": 1,
            f"{prefix}no newline": 1,
        }
    assert shown == expected
    assert {len(line) for line in out if " x" in line or "xx" in line} <= {
        *range(3000, 3030)
    }


def make_environ(addresses, index, before=(), **given):
    """The environment of one process."""
    given = {"num_devices": 1, "platform": "cpu"} | given
    has_evaluator = given.pop("has_evaluator", False)
    names = make_task_names(len(addresses), has_evaluator=has_evaluator)
    return make_environments(dict(before), names, addresses, **given)[index]


def test_processes_are_tasks_of_one_cluster():
    addresses = [f"127.0.0.1:{port}" for port in find_free_ports(3)]
    assert len(set(addresses)) == 3
    before = {"XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=8"}
    for index in range(3):
        environ = make_environ(addresses, index, before, num_devices=2)
        info = task_info(TFConfigClusterResolver(environ=environ))
        assert (info.process_id, info.num_processes) == (index, 3)
        assert info.coordinator_address == addresses[0]
        assert environ["JAX_PLATFORMS"] == "cpu"
        assert environ["KERAS_BACKEND"] == "jax"
        assert environ["XLA_FLAGS"].split() == [
            "--xla_a=1",
            "--xla_force_host_platform_device_count=2",
        ]


def test_flags_in_a_file_are_kept(tmp_path):
    file = tmp_path / "flags"
    file.write_text("--xla_a=1\n--xla_force_host_platform_device_count=8\n")
    before = {"XLA_FLAGS": str(file)}
    environ = make_environ(["127.0.0.1:1"], 0, before, num_devices=2)
    assert environ["XLA_FLAGS"].split() == [
        "--xla_a=1",
        "--xla_force_host_platform_device_count=2",
    ]


def test_flags_in_no_file_are_refused(tmp_path):
    environ = {"XLA_FLAGS": str(tmp_path / "none")}
    _, err, code = run(*LAUNCHED, "0", environ=environ)
    assert code == 2
    assert "XLA_FLAGS must consist of flags" in err[-1]


@pytest.mark.parametrize("count", [1, 3])
def test_an_evaluator_is_none_of_the_cluster(count):
    addresses = [f"127.0.0.1:{port}" for port in find_free_ports(count)]
    infos = [
        task_info(
            TFConfigClusterResolver(
                environ=make_environ(addresses, index, has_evaluator=True)
            )
        )
        for index in range(count + 1)
    ]
    assert [info.process_id for info in infos] == [*range(count), None]
    assert [info.type for info in infos] == [
        "chief",
        *["worker"] * (count - 1),
        "evaluator",
    ]
    assert all(list(info.addresses) == addresses for info in infos)


def test_an_evaluator_is_started_and_its_failure_is_the_job_s(tmp_path):
    script = script_in(
        tmp_path,
        "import json, os, sys\n"
        "task = json.loads(os.environ['TF_CONFIG'])['task']\n"
        "print(task['type'], task['index'])\n"
        "sys.exit(3 * (task['type'] == 'evaluator'))\n",
    )
    out, err, code = run("--processes", "3", "--evaluator", script)
    assert code == 3
    assert sorted(out) == [
        "[evaluator] evaluator 0",
        "[worker 0] worker 0",
        "[worker 1] worker 1",
        "chief 0",
    ]
    assert "the evaluator ended with exit code 3" in err[-1]


def test_flags_are_left_alone_on_another_platform():
    before = {"XLA_FLAGS": "--xla_a=1"}
    environ = make_environ(["127.0.0.1:1"], 0, before, platform="tpu")
    assert environ["XLA_FLAGS"] == "--xla_a=1"
    assert environ["JAX_PLATFORMS"] == "tpu"


@pytest.mark.parametrize(
    ("words", "code", "cause"),
    few(
        [
            (["0", "0"], 0, None),
            (["3", "sleep"], 3, "process 0 ended with exit code 3"),
            (["sleep", "SIGSEGV"], 139, "process 1 was killed by SIGSEGV"),
            # A process that ends since a peer failed is not the cause; see
            # `test_find_first_cause`, too.
            (["71@0.1", "sleep", "SIGKILL"], 137, "process 2 was killed by"),
            (["72", "71@0.1"], 72, "process 0 ended with exit code 72"),
            (["75", "75@0.5"], 75, "preempted"),
            (["75", "70@0.5"], 70, "process 1 ended with exit code 70"),
            # Its own error, while it is being ended.
            (["stopped", "1"], 1, "process 1 ended with exit code 1"),
            (["stubborn", "0", "1@0.2"], 1, "process 2 ended with exit code 1"),
            (["parent", "1@0.3"], 1, "process 1 ended with exit code 1"),
        ],
        every=2,
    ),
    ids=lambda value: "_".join(value) if isinstance(value, list) else None,
)
def test_exit_code_is_that_of_the_find_first_cause(
    words, code, cause, tmp_path
):
    start = time.monotonic()
    out, err, found = run(
        "--processes",
        str(len(words)),
        *LAUNCHED,
        *words,
        # What is one after the other must not depend on how they start.
        environ={"STARTED": str(tmp_path)},
    )
    assert found == code, (out, err)
    if cause is None:
        assert err == []
    else:
        assert cause in err[-1]
        assert sum("keras-strategies launch" in line for line in err) == 1
    # Sleepers would take 180 s.
    assert time.monotonic() - start < TIME_LIMIT_S / 2
    for line in out:
        assert is_gone(int(line.split()[-1])), line


def seconds_of_a_launch():
    """How long this machine takes at present for a job that does nothing."""
    start = time.monotonic()
    assert run("--processes", "1", *LAUNCHED, "0")[2] == 0
    return time.monotonic() - start


def test_all_are_ended_within_a_second_and_told_why():
    process, pids = started("guarded", "stubborn", "sleep")
    try:
        killed = time.monotonic()
        os.kill(read_pid(pids, 2), signal.SIGKILL)
        process.wait(TIME_LIMIT_S)
        seconds = time.monotonic() - killed
        out, err, code = finish(process)
    finally:
        process.kill()
    assert code == 137
    assert "told: process 2 was killed by SIGKILL" in out
    assert err[-1].endswith(
        "process 2 was killed by SIGKILL; the job has ended."
    )
    # And the launcher's own end: 0.1 s, where a launch takes 0.3 s.
    assert seconds < 1.0 + 2 * max(seconds_of_a_launch(), 0.3), seconds
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("words", "number", "code", "said"),
    [
        (["sleep", "sleep"], signal.SIGINT, 130, "interrupted"),
        (["sleep", "stubborn"], signal.SIGINT, 130, "interrupted"),
        (["preempted", "preempted"], signal.SIGTERM, 75, "preempted"),
        (["sleep", "sleep"], signal.SIGHUP, 143, "killed by SIGTERM"),
        (["sleep", "sleep"], signal.SIGTERM, 143, "killed by SIGTERM"),
        (
            ["preempted", "stubborn"],
            signal.SIGTERM,
            137,
            "was killed by this launcher, because it was still running",
        ),
    ],
)
def test_signals_to_the_launcher(words, number, code, said):
    # Who ends by itself has time for it.
    preempted = 0.6 if "stubborn" in words else TIME_LIMIT_S
    process, pids = started(
        *words,
        prepare="local_job._INTERRUPTED = 0.3, 0.6; "
        f"local_job._PREEMPTED = {preempted}",
    )
    process.send_signal(number)
    _, err, found = finish(process)
    assert found == code, err
    assert said in err[-1]
    launcher = [line for line in err if not line.startswith("[worker")]
    assert not any("keras_strategies/cli" in line for line in launcher)
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT"])
def test_signals_that_are_ignored_at_the_start_stay_ignored(tmp_path, name):
    script = script_in(
        tmp_path,
        "import pathlib, signal, sys, time\n"
        f"print(repr(signal.getsignal(signal.{name})))\n"
        "while not pathlib.Path(sys.argv[1]).exists():\n"
        "    time.sleep(0.05)\n"
        "print('done')\n",
    )
    go = tmp_path / "go"
    process = start(
        *("--processes", "2", script, str(go)),
        prepare=f"signal.signal(signal.{name}, signal.SIG_IGN)",
    )
    for _ in range(2):
        line = process.stdout.readline()
        assert "SIG_IGN" in line, (line, process.kill())
    process.send_signal(signal.Signals[name])
    time.sleep(0.2)  # In which the launcher would pass the signal on.
    go.touch()
    out, err, code = finish(process)
    assert (sorted(out), err, code) == (["[worker 1] done", "done"], [], 0)


def test_second_interrupt_ends_all_at_once():
    # Nothing else ends them.
    alone = "local_job._INTERRUPTED = (600.0, 600.0)"
    process, pids = started("heard", "heard", prepare=alone)
    process.send_signal(signal.SIGINT)
    for _ in pids:
        assert process.stdout.readline().endswith("heard\n")
    process.send_signal(signal.SIGINT)
    assert finish(process)[2] == 130
    assert all(is_gone(pid) for pid in pids)


def test_processes_end_with_a_launcher_that_is_killed():
    process, pids = started("guarded", "sleep")
    process.kill()
    assert all(is_gone(pid) for pid in pids)
    finish(process)


def test_a_slow_reader_of_a_non_blocking_output_loses_nothing(tmp_path):
    script = script_in(
        tmp_path,
        "import os, pathlib, sys\n"
        "for i in range(100):\n    print(f'{i:01000}')\n"
        "pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\n",
    )
    told = tmp_path / "pid"
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    process = start(
        *("--processes", "1", script, str(told)),
        prepare="local_job._SHOW_S = 0.01",
        stdout=writing,
    )
    os.close(writing)
    try:
        # More than what the pipe takes is written before somebody reads.
        wait_until(lambda: told.exists() and told.read_text(), TIME_LIMIT_S)
        assert is_gone(int(told.read_text()))
        with os.fdopen(reading) as file:
            lines = file.read().splitlines()
    finally:
        _, err, code = finish(process)
    assert code == 0, err
    assert [int(line) for line in lines] == list(range(100))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it.")
@pytest.mark.parametrize("word", ["chatty", "0"])
def test_an_output_that_cannot_be_written_is_named(word):
    with open("/dev/full", "w") as full:
        _, err, code = run("--processes", "1", *LAUNCHED, word, stdout=full)
    assert code == 74, err
    assert "the output cannot be written: [Errno 28] No space left" in err[-1]


def test_a_failure_before_lost_lines_is_the_cause():
    job = local_job._Job(["a"])
    job._endings = [Ending(process=0, code=5)]
    job._output.error = OSError(errno.EPIPE, "gone")  # After it had ended.
    end = job._conclude()
    assert (end.code, end.is_final) == (5, True)
    assert end.text == "process 0 ended with exit code 5"


def test_reader_that_goes_away_ends_the_job():
    process, pids = started("chatty", "sleep")
    process.stdout.close()
    process.stdout = None
    _, err, code = finish(process)
    assert code == 141
    assert err == []
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "a script or a module is missing"),
        (["-m"], "a script or a module is missing"),
        (["--processes", "0", "run"], "--processes must be >= 1"),
        (["--processes", "-3", "run"], "Received: -3"),
        (["--processes", "9999", "run"], "--processes must be <= 4096"),
        (["--devices-per-process", "0", "run"], ">= 1. Received: 0"),
        (
            ["--platform", "gpu", "--devices-per-process", "2", "run"],
            "only be used on the CPU",
        ),
        (["--max-restarts", "-1", "run"], "--max-restarts must be >= 0"),
    ],
)
def test_wrong_arguments_are_one_line(words, expected, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["launch", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("keras-strategies launch: ")
    assert expected in line


@pytest.mark.parametrize("words", [["--processes", "two", "run"], ["--rank"]])
def test_wrong_options_are_refused(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["launch", *words])
    assert words[-2 if len(words) > 1 else 0] in capsys.readouterr().err


def test_a_script_that_is_missing_is_named():
    _, err, code = run("--processes", "2", "no_such_file.py")
    assert code == 2
    assert "no_such_file.py': [Errno 2] No such file" in "".join(err)
    assert "ended with exit code 2; the job has ended." in err[-1]


def ending(process, code, *sent):
    return Ending(process=process, code=code, sent=sent)


@pytest.mark.parametrize(
    ("endings", "expected"),
    [
        ([], None),
        ([ending(0, 0), ending(1, 0)], None),
        ([ending(0, 0), ending(1, 5)], 1),
        ([ending(1, 71), ending(0, 70)], 0),
        ([ending(1, 71), ending(0, 71)], 1),
        ([ending(1, 71), ending(0, -15, 15)], 1),
        ([ending(2, -9), ending(1, 70), ending(0, -6)], 2),
        ([ending(0, 75), ending(1, 72)], 1),
        ([ending(0, 75), ending(1, 75)], 0),
        ([ending(0, 75), ending(1, -9, 15, 9)], 1),
        # One that ends itself when it is told to, against its own error.
        ([ending(0, 1, 15), ending(1, 70, 15)], 1),
        ([ending(0, 71), ending(1, -6, 15)], 0),
    ],
)
def test_find_first_cause(endings, expected):
    found = find_first_cause(endings)
    assert (found and found.process) == expected


def test_a_kill_by_the_launcher_is_told_from_one_by_the_system():
    assert ending(1, -9, 9).describe() == (
        "process 1 was killed by this launcher, because it was still running"
    )
    assert ending(1, -9, 15).describe() == "process 1 was killed by SIGKILL"
    assert ending(1, -15, 15).describe() == "process 1 was killed by SIGTERM"


def test_each_job_has_a_secret_of_its_own(tmp_path):
    script = script_in(
        tmp_path,
        "import os; print('said', os.environ['KERAS_STRATEGIES_SECRET'])",
    )
    heard = []
    for environ in ({}, {}, {"KERAS_STRATEGIES_SECRET": "that of its user"}):
        out, _, code = run("--processes", "2", script, environ=environ)
        assert code == 0
        said = {line.partition("said ")[2] for line in out if "said" in line}
        assert len(said) == 1
        heard += said
    assert len(set(heard)) == 3
    assert len(heard[0]) == 64
    assert heard[2] == "that of its user"
