"""What a plan writes without a terminal, and what ends it early."""

import io
import os
import signal
import threading

import pytest

from keras_strategies.planning.capture.progress import Interruption, Progress

pytestmark = pytest.mark.quick
PREFIX = "keras-strategies plan: "


class Terminal(io.StringIO):
    def isatty(self):
        return True


def written(file, calls):
    """The lines of updates, each with its time, running names and number."""
    times = [0.0]
    progress = Progress(3, file, clock=lambda: times[0])
    for now, running, done in calls:
        times[0] = now
        progress.update(running, done)
    lines = file.getvalue().splitlines()
    assert all(line.startswith(PREFIX) for line in lines)
    return [line.removeprefix(PREFIX) for line in lines]


def test_a_line_is_written_when_a_candidate_starts_and_ends():
    calls = [
        (0.0, ["a", "b"], 0),
        (0.2, ["a", "b"], 0),
        (9.0, ["b", "c"], 1),
        (20.0, [], 3),
    ]
    assert written(io.StringIO(), calls) == [
        "planning a (0 of 3 done)",
        "planning b (0 of 3 done)",
        "a took 9 s (1 of 3 done)",
        "planning c (1 of 3 done)",
        "b took 20 s (3 of 3 done)",
        "c took 11 s (3 of 3 done)",
    ]


def test_long_candidates_are_told_less_and_less_often():
    calls = [(float(second), ["a"], 0) for second in range(1000)]
    lines = written(io.StringIO(), calls)
    assert lines[0] == "planning a (0 of 3 done)"
    assert lines[1:] == ["still planning a (0 of 3 done)"] * 4


def test_nothing_is_written_to_a_terminal():
    assert written(Terminal(), [(0.0, ["a"], 0), (9.0, [], 1)]) == []


def test_a_sigint_that_is_ignored_stays_ignored(request):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with (interruption := Interruption()).watch():
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_IGN
    assert interruption.signal is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_stored_and_the_handlers_are_restored(
    number, request
):
    own = signal.signal(number, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(number, own))
    interruption, before = Interruption(), signal.getsignal(number)
    with interruption.watch():
        assert interruption.signal is None
        os.kill(os.getpid(), number)
        assert interruption.signal == number
        assert signal.getsignal(number) is before
    assert signal.getsignal(number) is before


def test_other_threads_watch_no_signals():
    seen = []

    def watch():
        with Interruption().watch():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
