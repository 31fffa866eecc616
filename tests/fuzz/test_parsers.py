"""Ten thousand damaged texts into each parser of what comes from outside.

By default there are fewer; `-m slow` has all.
"""

import random
import time
import warnings

import pytest

from tests.fuzz.hostile import inputs, watched
from tests.fuzz.parsers import PARSERS, put, texts_for

pytestmark = pytest.mark.quick

FEW, ALL = 50, 10_000
# Of this thread's own time: others may use the machine.
MAX_SECONDS = 1.0


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "count", [FEW, pytest.param(ALL, marks=pytest.mark.slow)]
)
def test_only_the_documented_errors_come(name, count, tmp_path, caplog):
    parser = PARSERS[name]
    documents, parse = texts_for(name, tmp_path)
    draw = random.Random(0)
    for text in documents:
        # What is valid is read, and what that imports is imported now.
        given = text if parser.is_text else text.encode()
        put(name, tmp_path, given, draw)
        try_one(parser, parse, given)
    caplog.set_level("CRITICAL")
    num_refused, slowest = 0, 0.0
    for text in inputs(documents, count, seed=count, is_text=parser.is_text):
        put(name, tmp_path, text, draw)
        start = time.thread_time()
        with watched() as done:
            error = try_one(parser, parse, text)
        seconds = time.thread_time() - start
        assert not done, f"{done} for {text[:200]!r}"
        assert seconds < MAX_SECONDS, f"{seconds:.1f} s for {text[:200]!r}"
        num_refused += error is not None
        slowest = max(slowest, seconds)
        if error is not None:
            # It says something, and no more than fits a log.
            assert 0 < len(str(error)) < 10_000, f"{error!r:.300}"
            assert not isinstance(error, KeyError | RecursionError)
    if parser.errors:
        assert num_refused > 0
    print(f"{name}: {num_refused} of {count} refused, slowest {slowest:.3f} s")


def try_one(parser, parse, text):
    """The error of a class that is documented; another one is raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            parse(text)
        except parser.errors as error:
            # Those are ValueErrors of Python's own, which tell nothing.
            if isinstance(error, UnicodeError) or type(error) is KeyError:
                raise AssertionError(f"{error!r}") from error
            return error
    return None
