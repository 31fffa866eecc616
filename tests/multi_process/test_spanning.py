"""Replicas whose cores belong to several processes.

The invariant: processes that have cores of one replica read the same rows, in
the same order, and all numbers are those of one device.
"""

import numpy as np
import pytest

from tests.multi_process import spanning
from tests.support.jobs import values_of
from tests.support.numbers import assert_leaves_close

ROWS = [10 * k + i for k in range(8) for i in range(5 + k % 3)]


@pytest.mark.parametrize(
    ("processes", "devices", "width"),
    [
        (2, 2, 2),
        pytest.param(2, 1, 2, marks=pytest.mark.slow),
        pytest.param(4, 1, 2, marks=pytest.mark.slow),
        pytest.param(4, 2, 2, marks=pytest.mark.slow),
        pytest.param(4, 1, 4, marks=pytest.mark.slow),
    ],
)
def test_equals_one_device(processes, devices, width, tmp_path):
    for k in range(8):
        lines = (f"{row}\n" for row in ROWS if row // 10 == k)
        (tmp_path / f"{k}.txt").write_text("".join(lines))
    target = "multi_process.spanning:everything"
    found = values_of(target, processes, width, tmp_path, devices=devices)
    for process, result in enumerate(found):
        for name in ("used", "looped"):
            assert result[name] == found[0][name]
        # Who shares replicas has the same of all.
        assert result == found[process // width * width]
    wanted = spanning.used(None)
    for name, value in wanted.items():
        close(found[0]["used"][name], value)
    close(found[0]["used"]["loaded"], wanted["weights"])
    close(found[0]["looped"], spanning.looped(None))
    readers = processes // width
    replicas = readers * devices
    for reader, result in enumerate(found[::width]):
        own = range(reader * devices, (reader + 1) * devices)
        values = result["values"]
        assert values["ids"] == list(own)
        assert values["own"] == [[float(i)] * 2 for i in own]
        assert values["sum"] == [sum(range(replicas))] * 2
        assert values["gathered"] == np.repeat(range(replicas), 2).tolist()
        assert values["bias"] == [["model"]] * devices
    for epoch in range(2):
        seen = [
            row
            for result in found[::width]
            for step in result["files"][epoch]
            for replica in step
            for row in replica
        ]
        assert sorted(seen) == ROWS
        assert seen != ROWS
    assert found[0]["files"][0] != found[0]["files"][1]


def close(actual, wanted):
    assert_leaves_close(actual, wanted, rtol=2e-5, atol=2e-5)


def test_rows_that_differ_within_a_replica_are_refused():
    for found in values_of("multi_process.spanning:errors", 2, 2, devices=3):
        beginnings = {
            "generator": "Processes that have cores of the same replicas",
            "arrays": "Processes that have cores of the same replicas",
            "on_batch": "Processes that share replicas must provide equal",
            "values": "Processes that share replicas must provide equal",
        }
        for name, beginning in beginnings.items():
            assert found[name].startswith(f"ValueError: {beginning}")
            assert "[0, 1] share replicas" in found[name]
        assert "in step 1: 8 rows with checksum" in found["generator"]
        assert "in step 3: 40 rows with checksum" in found["arrays"]
        assert "share all of their replicas" in found["shares"]
