"""The sentence for figures of all kinds."""

import pytest

from keras_strategies.reporting.advice import AGAIN, write_advice
from keras_strategies.reporting.document import EMPTY


def advice(*, input_ms=5.0, idle=1.0, causes=(), step_s=0.0, **changes):
    shares = dict.fromkeys(
        ("input", "callbacks", "program", "save", "compile", "evaluate"), 0.0
    )
    shares |= {"python": 0.0} | changes.pop("shares", {})
    named = {"cause": causes[-1] if causes else AGAIN, "seconds": step_s}
    made = EMPTY["compilations"] | {"causes": [named]}
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


def test_too_few_steps():
    assert write_advice(EMPTY).startswith("Too few steps")


def test_a_single_step_has_no_input():
    figures = {"shares": {"program": 1.0}, "step_ms": {"median": 2.0}}
    assert write_advice(EMPTY | figures).startswith("Too few steps were")
