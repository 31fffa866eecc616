"""The sentence for figures of all kinds."""

import pytest

from keras_strategies.reporting.advice import write_advice
from keras_strategies.reporting.document import EMPTY


def advice(*, input_ms=5.0, idle=1.0, causes=(), step_s=0.0, **changes):
    shares = dict.fromkeys(
        ("input", "callbacks", "program", "save", "compile", "evaluate"), 0.0
    )
    shares |= {"python": 0.0} | changes.pop("shares", {})
    made = EMPTY["compilations"] | {"step_seconds": step_s}
    made["causes"] = [{"cause": one, "count": 1} for one in causes]
    figures = {"shares": shares, "seconds": 10.0, "compilations": made}
    figures |= {"step_ms": {"median": 2.0}, "saves": 3}
    return write_advice(
        EMPTY | figures | {"input_ms": input_ms, "idle": idle} | changes
    )


@pytest.mark.parametrize(
    ("shares", "more", "expected"),
    [
        ({"program": 1.0}, {}, "100 % of the time is spent in the step's pro"),
        # The largest share is named.
        ({"input": 0.4, "save": 0.3}, {}, "40 % of the time waits for input:"),
        ({"input": 0.3, "save": 0.4}, {}, "40 % of the time waits for check"),
        ({"callbacks": 0.2, "program": 0.8}, {}, "20 % of the time runs call"),
        ({"input": 0.09, "program": 0.9}, {}, "90 % of the time is spent in"),
        # Input that takes less than a millisecond is the loop's overhead.
        (
            {"input": 0.3, "python": 0.2},
            {"input_ms": 0.3},
            "50 % of the time runs Python between",
        ),
        # But not if the devices are never idle.
        (
            {"input": 0.3, "python": 0.2, "program": 0.5},
            {"input_ms": 0.3, "idle": 0.2},
            "50 % of the time is spent in the step's programs",
        ),
        # Compilations of programs other than steps happen once.
        (
            {"compile": 0.6, "input": 0.2},
            {"step_s": 0.5},
            "20 % of the time waits for input",
        ),
        (
            {"compile": 0.6, "input": 0.2},
            {
                "step_s": 4.0,
                "causes": ["the first step", "a new shape: x (2,)"],
            },
            "40 % of the time compiles the step for new shapes (x (2,)): pad",
        ),
        (
            {"compile": 0.6},
            {"step_s": 4.0},
            "40 % of the time compiles the step again for the same shapes",
        ),
    ],
)
def test_the_largest_cause_is_named(shares, more, expected):
    assert advice(shares=shares, **more).startswith(expected)


def test_the_slowest_process_is_named():
    slow = {
        **{"count": 4, "slowest": 3, "extra_ms": 41.0, "extra_share": 0.4},
        **{"input_ms": 2.0, "input_share": 0.02},
    }
    shares = {"input": 0.02, "program": 0.9}
    text = advice(shares=shares, processes=slow, input_ms=0.1)
    assert text.startswith("38 % of the time waits for process 3, which spends")
    # Nearly all of the time is input.
    slow |= {"input_ms": 40.0, "input_share": 0.38}
    text = advice(shares=shares, processes=slow, input_ms=0.1)
    assert text.startswith("38 % of the time waits for input on process 3: ")
    # All processes wait for their data.
    slow |= {"extra_ms": 1.0, "extra_share": 0.01}
    text = advice(shares=shares, processes=slow)
    assert text.startswith("38 % of the time waits for input: ")


def test_too_few_steps():
    assert write_advice(EMPTY).startswith("Too few steps")


def test_a_single_step_has_no_input():
    figures = {"shares": {"program": 1.0}, "step_ms": {"median": 2.0}}
    assert write_advice(EMPTY | figures).startswith("Too few steps were")
