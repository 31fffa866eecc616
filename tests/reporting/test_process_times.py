"""The comparison of processes' heartbeats."""

import pytest

from keras_strategies.reporting.figures import compare_processes
from keras_strategies.watchdog.failure_detector import Heartbeat


def beat(local_s, *, steps=10, steps_s=20.0, input_s=0.0):
    return Heartbeat(
        steps=steps, steps_s=steps_s, local_s=local_s, input_s=input_s
    )


def test_the_slowest_is_compared_with_the_median_of_the_others():
    beats = {0: beat(1.0), 1: beat(2.0), 2: beat(8.0, input_s=6.0), 3: beat(3)}
    found = compare_processes(beats)["processes"]
    assert found["slowest"] == 2
    assert found["count"] == 4
    assert found["extra_ms"] == pytest.approx(600)
    assert found["extra_share"] == pytest.approx(0.3)
    assert found["input_ms"] == pytest.approx(600)
    assert found["input_share"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    "wrong",
    [
        Heartbeat(),
        beat(float("nan")),
        beat(float("inf")),
        beat(-1.0),
        beat(1.0, steps=-1),
        beat(1.0, steps_s=0.0),
        beat(1.0, input_s=float("nan")),
    ],
)
def test_heartbeats_without_times_are_left_out(wrong):
    assert compare_processes({0: beat(1.0), 1: wrong}) == {}
    assert compare_processes({}) == {}
    beats = {0: beat(1.0), 1: wrong, 2: beat(2.0)}
    assert compare_processes(beats)["processes"]["count"] == 2
