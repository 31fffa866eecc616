"""SIGTERM ends forked children, and a process only when it is done."""

import ast
import re
import subprocess
import sys
import time

import pytest

from keras_strategies.testing import processes
from tests.multi_process.forks import OWN

pytestmark = pytest.mark.multi_process

DEFAULT = -15
LIMIT_S = 120


@pytest.mark.slow
def test_sigterm_ends_children_of_a_job(tmp_path):
    for result in processes.run_processes(
        "tests.multi_process.forks:in_job", 2, timeout_s=LIMIT_S
    ):
        assert result.value == {
            "process": DEFAULT,
            "forked in a thread": DEFAULT,
            "pool": True,
            "own": OWN,
        }


@pytest.mark.parametrize(
    "handler", ["default", pytest.param("own", marks=pytest.mark.slow)]
)
def test_sigterm_ends_children_of_a_fit_and_waits_for_its_end(
    handler, tmp_path
):
    words = [str(tmp_path), *([handler] if handler == "own" else [])]
    log = tmp_path / "log"
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.multi_process.forks", *words],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=processes._make_environment(2, None),
        )
    end = time.monotonic() + LIMIT_S
    try:
        while process.poll() is None and time.monotonic() < end:
            if "finally" in log.read_text():
                # Also while Python ends.
                process.terminate()
            time.sleep(0.01)
    finally:
        process.kill()
        code = process.wait()
    text = log.read_text()
    codes = re.search(r"^codes (.*)$", text, re.M)
    assert codes, text
    expected = OWN if handler == "own" else DEFAULT
    assert set(ast.literal_eval(codes[1]).values()) == {expected}, text
    assert "finally" in text, text
    assert code == 75, text
    assert ("user's handler" in text) == (handler == "own")
