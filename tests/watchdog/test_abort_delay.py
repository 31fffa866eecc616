"""Aborts that are held, in processes that import nothing else."""

import pathlib
import signal
import time

import pytest

from keras_strategies.watchdog import abort_delay
from tests.support.combinations import combine
from tests.support.commands import python

FILE = pathlib.Path(abort_delay.__file__)
PROGRAM = f"""
import ctypes, os, runpy, sys, threading, time
aborts = runpy.run_path({str(FILE)!r})
assert aborts["install"]()
# Unlike `os.abort` it lets other threads run, as JAX's threads do.
abort = ctypes.CDLL(None).abort
threading.Thread(target=abort, daemon=True).start()
time.sleep(float(sys.argv[1]))
os._exit(71)
"""


def run(seconds, *flags):
    begin = time.monotonic()
    done = python(*flags, "-c", PROGRAM, seconds, timeout=60)
    return done.returncode, time.monotonic() - begin, done.stderr


@pytest.mark.parametrize(
    "flags", combine([(), ("-X", "faulthandler")], every=2)
)
def test_whoever_knows_the_cause_ends_the_process_first(flags):
    code, _, told = run(1.5, *flags)
    assert code == 71
    assert ("Fatal Python error: Aborted" in told) == bool(flags)


@pytest.mark.slow
def test_an_abort_that_nobody_explains_goes_on():
    code, seconds, _ = run(60)
    assert code == -signal.SIGABRT
    assert signal.SIGABRT <= seconds < signal.SIGABRT + 10
