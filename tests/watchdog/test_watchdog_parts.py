"""Decisions of the watchdog, from heartbeats, clocks and pipes."""

import gc
import os
import queue
import socket
import sys
import threading
import time

import pytest

from keras_strategies.cluster import user_code
from keras_strategies.cluster.exchange import exit_codes, kv_store
from keras_strategies.watchdog.failure_detector import (
    COMPARING,
    FailureDetector,
    Heartbeat,
    make_death_cause,
)
from keras_strategies.watchdog.launcher_pipe import LAUNCHER_FD, find_pipe
from keras_strategies.watchdog.progress import ProgramRunner
from tests.support.waiting import wait_until

pytestmark = pytest.mark.quick

TIMEOUT_S = 60.0
WAITS = {"programs": 18, "waiting_s": 61.0, "where": "train.py:9 in step"}
STALL = "train.py:42 in on_batch_end"


def judged(*heartbeats, at=100.0):
    """What a detector finds that receives these now, as before."""
    detector = FailureDetector(timeout_s=TIMEOUT_S)
    for number, now in enumerate((0.0, at)):
        told = {
            process: Heartbeat(number=number, **heartbeat)
            for process, heartbeat in enumerate(heartbeats)
        }
        detector.receive(told, now)
    return detector.find(at)


CREATION = {
    "programs": 3,
    "agreeing": "the creation of variables: 'a'",
    "agreeing_s": 5.5,
}
COMPARISON = {"agreeing": COMPARING, "agreeing_s": 5.5, "where": STALL}
DATA = {"agreeing": "`fit`'s data", "agreeing_s": 9.0, "where": "a:1"}
GOOD = {
    "all work": [{"programs": 3}, {"programs": 3}],
    "one waits a little": [{"programs": 4, "waiting_s": 59.0}, {"programs": 3}],
    "one reads its data for long": [{"programs": 3}, {"programs": 3}],
    "one compiles": [WAITS, {"programs": 17, "starting_s": 900.0}],
    "the one that waits starts another": [
        WAITS | {"starting_s": 70.0},
        {"programs": 17},
    ],
    "all are done": [{"is_done": True}, {"is_done": True}],
    "one is done, the other works": [{"is_done": True}, {"programs": 0}],
    "one is done a moment ago": [
        {"programs": 5, "is_done": True},
        {"programs": 6, "waiting_s": 0.5},
    ],
    "one is done, the last program runs": [
        {"programs": 6, "is_done": True},
        {"programs": 6, "waiting_s": 30.0},
    ],
    "one waits on the host for less": [
        {"agreeing": "`fit`'s data", "agreeing_s": 60.5},
        {"programs": 3},
    ],
    "the other one traces": [
        {"agreeing": "the comparison of programs", "agreeing_s": 900.0},
        {"starting_s": 900.0},
    ],
    "a variable is created in another order": [
        CREATION,
        {"programs": 4, "waiting_s": 9.0, "agreeing": CREATION["agreeing"]},
    ],
    "a variable is created while a program ends": [
        CREATION | {"waiting_s": 3.0},
        {"programs": 4, "waiting_s": 9.0},
    ],
    "a value is compared while a thread waits": [COMPARISON, DATA],
    "a value is compared by all": [COMPARISON, COMPARISON],
    "a value is compared for a moment": [
        COMPARISON | {"agreeing_s": 1.0},
        DATA | {"agrees_in_main": True},
    ],
    "one process": [{"programs": 1}],
    "none": [],
}
BAD = {
    "one is behind": (
        [WAITS, {"programs": 17, "where": STALL}],
        exit_codes.ExitCode.STALLED,
        "process 1 has started 17 programs, none in the last 100 s; its main "
        f"thread is at {STALL}; process 0 has started 18 programs and has "
        "waited for 61 s",
    ),
    "the first is behind": (
        [{"programs": 0, "where": STALL}, WAITS],
        exit_codes.ExitCode.STALLED,
        "process 0 has started 0 programs",
    ),
    "two are behind": (
        [WAITS, {"programs": 17}, {"programs": 16}],
        exit_codes.ExitCode.STALLED,
        "process 2 has started 16",
    ),
    "all wait for each other": (
        [WAITS, WAITS],
        exit_codes.ExitCode.STALLED,
        "all processes have waited for program 18 for 61 s",
    ),
    "one has left": (
        [WAITS, {"programs": 17, "is_done": True}],
        exit_codes.ExitCode.PEER_FAILED,
        "the script of process 1 has ended after 17 programs, but process 0 "
        "waits for it in program 18 (at train.py:9 in step)",
    ),
    "one is missed on the host": (
        [
            {"agreeing": "`fit`'s data", "agreeing_s": 62.0, "where": "a:1"},
            {"programs": 3, "where": STALL},
        ],
        exit_codes.ExitCode.STALLED,
        "process 1 has started 3 programs, none in the last 100 s; its main "
        f"thread is at {STALL}; process 0 has waited for other processes in "
        "`fit`'s data for 62 s (at a:1)",
    ),
    "one creates a variable alone": (
        [{"programs": 4, "waiting_s": 5.5, "where": STALL}, CREATION],
        exit_codes.ExitCode.STALLED,
        "Received: the creation of variables: 'a' in process 1, for which "
        f"process 0 waits in program 4 (at {STALL})",
    ),
    "one compares a value alone": (
        [DATA | {"agrees_in_main": True}, COMPARISON],
        exit_codes.ExitCode.STALLED,
        f"is built outside of a scope) in process 1 (at {STALL}), for which "
        "process 0 waits in `fit`'s data (at a:1)",
    ),
    "one compares a value alone between steps": (
        [{"programs": 4, "waiting_s": 5.5, "where": "a:1"}, COMPARISON],
        exit_codes.ExitCode.STALLED,
        f"process 1 (at {STALL}), for which process 0 waits in program 4",
    ),
    "one has left an agreement": (
        [{"agreeing": "`fit`'s data", "agreeing_s": 3.0}, {"is_done": True}],
        exit_codes.ExitCode.PEER_FAILED,
        "waits for it in `fit`'s data",
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_job_that_goes_on_is_let_alone(name):
    assert judged(*GOOD[name]) is None


@pytest.mark.parametrize("name", BAD)
def test_what_keeps_a_job_from_going_on_is_named(name):
    heartbeats, code, text = BAD[name]
    cause = judged(*heartbeats)
    assert cause is not None
    assert cause.code == code
    assert text in cause.text


def test_an_old_message_does_not_say_where_a_process_waits():
    detector = FailureDetector(timeout_s=TIMEOUT_S)
    waits = Heartbeat(**DATA, agrees_in_main=True)
    for number in range(2):
        told = {0: waits, 1: Heartbeat(number=number, **COMPARISON)}
        detector.receive(told, 10.0 * number)
    assert detector.find(10.0) is not None
    assert detector.find(15.0) is None


def test_a_process_that_starts_programs_again_is_not_said_to_stand_still():
    detector = FailureDetector(timeout_s=TIMEOUT_S)
    detector.receive({0: Heartbeat(), 1: Heartbeat(programs=1)}, 0.0)
    detector.receive({0: Heartbeat(), 1: Heartbeat(number=1, programs=2)}, 50.0)
    told = {0: Heartbeat(number=1, programs=3, waiting_s=61.0)}
    detector.receive(told | {1: Heartbeat(number=2, programs=2)}, 60.0)
    cause = detector.find(60.0)
    assert cause is not None
    assert (
        "process 1 has started 2 programs, none in the last 10 s" in cause.text
    )


def test_a_wait_counts_from_when_the_others_have_compiled():
    detector = FailureDetector(timeout_s=TIMEOUT_S)
    for number, now in enumerate((0.0, 100.0, 150.0, 161.0)):
        waits = Heartbeat(number=number, programs=1, waiting_s=now)
        other = Heartbeat(number=number, starting_s=now if now <= 100 else 0.0)
        detector.receive({0: waits, 1: other}, now)
        found = detector.find(now)
        assert (found is None) == (now < 161)


@pytest.mark.parametrize(
    ("heartbeats", "now", "expected"),
    [
        # (process, number, at): the host is heard of by other means.
        ([(0, 0, 0), (1, 0, 0), (2, 0, 0)], 5.0, [1, 2]),
        ([(0, 0, 0), (1, 0, 0), (1, 1, 2), (2, 0, 0)], 5.0, [2]),
        ([(0, 0, 0), (1, 0, 0), (1, 0, 4)], 5.0, [1]),
        ([(0, 0, 0), (1, 0, 0)], 3.0, []),
        ([(0, 0, 0)], 99.0, []),
    ],
)
def test_who_tells_nothing_new_is_silent(heartbeats, now, expected):
    detector = FailureDetector(timeout_s=TIMEOUT_S)
    for process, number, at in heartbeats:
        detector.receive({process: Heartbeat(number=number)}, at)
    assert detector.find_silent(now) == expected


def test_all_live_only_when_all_have_told_something_since():
    detector = FailureDetector(timeout_s=TIMEOUT_S)
    detector.receive({0: Heartbeat(), 1: Heartbeat(), 2: Heartbeat()}, 1.0)
    # Told before, maybe, and heard now.
    detector.receive({1: Heartbeat(number=1), 2: Heartbeat(number=4)}, 9.0)
    assert not detector.all_live(8.0, 9.0)
    assert not detector.all_live(8.0, 9.0)
    detector.receive({1: Heartbeat(number=2)}, 9.5)
    assert not detector.all_live(8.0, 9.5)
    detector.receive({2: Heartbeat(number=5)}, 9.6)
    assert detector.all_live(8.0, 9.6)
    # Of another suspicion.
    assert not detector.all_live(9.6, 9.7)
    assert not detector.all_live(9.6, 10.0)


def test_the_dead_are_not_taken_for_live_by_who_hears_them_late():
    # A process asks the others only when it suspects one.
    detector = FailureDetector(timeout_s=TIMEOUT_S)
    for now in (9.0, 9.5, 10.0):
        detector.receive(
            {1: Heartbeat(number=int(2 * now)), 2: Heartbeat(number=8)}, now
        )
        assert not detector.all_live(8.0, now)


def test_names_of_many_dead_are_cut_short():
    assert make_death_cause([3], "x").text == "process 3 died or stopped: x"
    many = make_death_cause(list(range(20)), "x").text
    assert many.startswith("processes 0, 1, 2")
    assert many.endswith("7, ... died or stopped: x")


class Output:
    """An array of a program that ends when it is told to."""

    def __init__(self):
        self.has_ended = False
        self.is_gone = False
        self.waits = 0

    def is_deleted(self):
        return self.is_gone

    def is_ready(self):
        if self.is_gone:
            raise RuntimeError("deleted")
        return self.has_ended

    def block_until_ready(self):
        self.waits += 1


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def made(clock, preempted_at=None):
    return ProgramRunner(
        2, clock=clock, is_preempted=lambda number: number == preempted_at
    )


def test_the_oldest_program_in_flight_tells_how_long_it_is_waited_for(clock):
    progress = made(clock)
    outputs = [Output(), Output()]
    for output in outputs:
        assert progress.run(2, lambda o: (o, "state"), (output,))[0] is output
        clock.now += 10
    assert progress.heartbeat().waiting_s == 20
    outputs[0].has_ended = True
    assert progress.heartbeat().waiting_s == 10
    outputs[1].has_ended = True
    heartbeat = progress.heartbeat(7)
    assert (heartbeat.waiting_s, heartbeat.programs, heartbeat.number) == (
        0,
        2,
        7,
    )
    assert heartbeat.where.startswith("test_watchdog_parts.py:")


def test_an_output_that_was_donated_is_waited_for_no_more(clock):
    progress = made(clock)
    output = Output()
    progress.run(2, lambda: (output,), ())
    clock.now += 10
    output.is_gone = True
    assert progress.heartbeat().waiting_s == 0


def test_state_is_not_kept_from_being_donated(clock):
    progress = made(clock)
    output = Output()
    before = sys.getrefcount(output)
    progress.run(2, lambda: ([], [output]), ())
    assert sys.getrefcount(output) == before
    progress.run(2, lambda: ([], []), ())


def test_starting_a_program_is_reported(clock):
    progress = made(clock)

    def program():
        clock.now += 5
        assert progress.heartbeat().starting_s == 5
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        progress.run(2, program, ())
    heartbeat = progress.heartbeat()
    assert (heartbeat.starting_s, heartbeat.programs) == (0, 0)


def test_a_program_that_runs_before_its_call_returns_is_waited_for(clock):
    # XLA does so on CPU with one device in each process.
    progress = made(clock)
    queue_of_outputs = queue.SimpleQueue()
    starting = threading.Thread(
        target=progress.run, args=(2, queue_of_outputs.get, ())
    )
    starting.start()
    try:
        clock.now = 5.0
        wait_until(lambda: progress.heartbeat().waiting_s == 5, 30)
        heartbeat = progress.heartbeat()
    finally:
        queue_of_outputs.put(([],))
        starting.join()
    assert (heartbeat.waiting_s, heartbeat.starting_s, heartbeat.programs) == (
        5,
        0,
        1,
    )
    assert progress.heartbeat().programs == 1


def test_it_is_known_which_threads_train(clock):
    progress = made(clock)
    progress.run(1, lambda: ([],), ())
    assert not progress.threads
    training = threading.Thread(
        target=progress.run, args=(2, lambda: ([],), ())
    )
    training.start()
    training.join()
    assert progress.threads == {training.ident}


def test_programs_of_some_processes_do_not_count(clock):
    progress = made(clock, preempted_at=1)
    progress.run(1, lambda: ([],), ())
    assert progress.heartbeat().programs == 0


def test_preempted_is_raised_once_before_a_program(clock):
    progress = made(clock, preempted_at=2)
    output = Output()
    progress.run(2, lambda: (output,), ())
    with pytest.raises(exit_codes.Preempted) as caught:
        progress.run(2, lambda: pytest.fail("was started"), ())
    assert caught.value.code == 75
    assert output.waits == 1
    # What `finally` blocks start runs.
    progress.run(2, lambda: ([],), ())
    assert progress.num_started == 2
    assert progress.was_preempted


def test_a_thread_that_runs_has_a_whole_stack():
    """CPython 3.11 links a frame to anything if its thread runs meanwhile."""
    begun, is_over = [], threading.Event()

    def each(depth):
        yield depth
        if depth:
            yield from each(depth - 1)

    def run():
        begun.append(True)
        while not is_over.is_set():
            assert sum(each(30)) == sum(range(31))

    thread = threading.Thread(target=run)
    thread.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    gc.disable()  # JAX's callback would be on the stack.
    try:
        while not begun:
            time.sleep(0.001)
        found = [user_code.list_frames(thread.ident) for _ in range(2000)]
    finally:
        gc.enable()
        sys.setswitchinterval(before)
        is_over.set()
        thread.join()
    names = [[frame.f_code.co_name for frame in frames] for frames in found]
    outer = ["run", "run", "_bootstrap_inner", "_bootstrap"]
    assert all(each[-4:] == outer for each in names)
    assert set(sum(names, [])) <= {"each", *outer, "is_set"}


def test_where_is_the_users_line():
    frames = user_code.list_frames(threading.get_ident())
    assert user_code.locate_frame(frames).startswith("test_watchdog_parts.py:")
    assert user_code.locate_frame(frames[:1]).startswith("user_code.py:")
    assert user_code.list_frames(None) == []
    assert user_code.locate_frame([]) == ""
    assert not user_code.is_user_code(pytest.__file__)
    assert not user_code.is_user_code(user_code.__file__)
    assert not user_code.is_user_code(os.__file__)
    assert user_code.is_user_code("/home/me/train.py")


@pytest.fixture
def pipe():
    read, write = os.pipe()
    yield read, write
    for end in (read, write):
        try:
            os.close(end)
        except OSError:
            continue


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([b"process 1 was killed by SIGKILL\n"], "process 1 was killed"),
        (["é geht\n".encode()], "é geht"),
        ([b"two\n", b"lines\n"], "two"),
        ([b"\xff\n"], "\ufffd"),
        ([b"x" * 5000], "x" * 4096),
    ],
)
def test_a_line_of_the_launcher_is_read(written, expected, pipe):
    environ = {LAUNCHER_FD: str(pipe[0])}
    found = find_pipe(environ)
    assert environ == {}
    assert found.read() is None
    for text in written:
        os.write(pipe[1], text)
    assert found.read().startswith(expected)


def test_the_end_of_the_pipe_says_that_the_launcher_is_gone(pipe):
    found = find_pipe({LAUNCHER_FD: str(pipe[0])})
    os.close(pipe[1])
    assert found.read() == "the launcher is gone"
    assert not os.get_inheritable(pipe[0])


def test_no_launcher_no_pipe():
    assert find_pipe({}) is None
    assert find_pipe({LAUNCHER_FD: ""}) is None


@pytest.mark.parametrize(
    "text", ["no number", "-1", "987654", "9" * 40, "file"]
)
def test_what_is_no_pipe_is_ignored(text, tmp_path):
    with open(tmp_path / "file", "w") as file:
        text = str(file.fileno()) if text == "file" else text
        assert find_pipe({LAUNCHER_FD: text}) is None


def test_a_service_that_has_ended_refuses_connections(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        at = "jax._src.distributed.global_state.coordinator_address"
        monkeypatch.setattr(at, address)
        assert kv_store.is_reachable()
    assert not kv_store.is_reachable()
