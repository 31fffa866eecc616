"""What a plan writes without a terminal, and what ends it early."""

import io
import os
import signal
import threading

import pytest

from keras_strategies.planning.capture.processes import Progress, first_signal

pytestmark = pytest.mark.quick
PREFIX = "keras-strategies plan: "


class Terminal(io.StringIO):
    def isatty(self):
        return True


def written(file, times):
    """The lines of reminders at times in seconds, after a first line."""
    now = [0.0]
    progress = Progress(file, clock=lambda: now[0])
    progress.write("planning a")
    for now[0] in times:
        progress.remind("still planning a")
    lines = file.getvalue().splitlines()
    assert all(line.startswith(PREFIX) for line in lines)
    return [line.removeprefix(PREFIX) for line in lines]


def test_long_candidates_are_told_less_and_less_often():
    lines = written(io.StringIO(), map(float, range(1000)))
    assert lines[0] == "planning a"
    assert lines[1:] == ["still planning a"] * 4


def test_nothing_is_written_to_a_terminal():
    assert written(Terminal(), [0.0, 9.0, 99.0]) == []


def test_a_sigint_that_is_ignored_stays_ignored(request):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with first_signal() as received:
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_IGN
    assert received == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_stored_and_the_handlers_are_restored(
    number, request
):
    own = signal.signal(number, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(number, own))
    before = signal.getsignal(number)
    with first_signal() as received:
        assert received == []
        os.kill(os.getpid(), number)
        assert received == [number]
        assert signal.getsignal(number) is before
    assert signal.getsignal(number) is before


def test_other_threads_watch_no_signals():
    seen = []

    def watch():
        with first_signal():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
