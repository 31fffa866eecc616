"""Replicas whose cores belong to several processes.

The invariant: processes that have cores of one replica read the same rows, in
the same order, and all numbers are those of one device.
"""

import numpy as np
import pytest

from tests.multi_process import spanning
from tests.support.jobs import values_of, values_of_each
from tests.support.numbers import assert_leaves_close

pytestmark = pytest.mark.multi_process

ROWS = [10 * k + i for k in range(8) for i in range(5 + k % 3)]


TARGET = "multi_process.spanning:everything"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What two processes find and are refused, with four devices each."""
    directory = tmp_path_factory.mktemp("job")
    write_files(directory)
    calls = (TARGET, 2, directory), ("multi_process.spanning:errors", 2)
    return values_of_each(2, *calls, devices=4, uses=["tensorflow"])


def write_files(directory):
    for k in range(8):
        lines = (f"{row}\n" for row in ROWS if row // 10 == k)
        (directory / f"{k}.txt").write_text("".join(lines))


def test_equals_one_device(job):
    compare(job[0], 4, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices", "width"),
    [(2, 2, 2), (2, 1, 2), (4, 1, 2), (4, 2, 2), (4, 1, 4)],
)
def test_more_equal_one_device(processes, devices, width, tmp_path):
    write_files(tmp_path)
    options = {"devices": devices, "uses": ["tensorflow"]}
    found = values_of(TARGET, processes, width, tmp_path, **options)
    compare(found, devices, width)


def compare(found, devices, width):
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
    readers = len(found) // width
    replicas = readers * devices
    for reader, result in enumerate(found[::width]):
        own = range(reader * devices, (reader + 1) * devices)
        values = result["values"]
        assert values["ids"] == list(own)
        assert values["own"] == [[float(i)] * 2 for i in own]
        assert values["sum"] == [sum(range(replicas))] * 2
        assert values["gathered"] == np.repeat(range(replicas), 2).tolist()
        assert values["bias"] == [[8]] * devices
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


def test_rows_that_differ_within_a_replica_are_refused(job):
    for found in job[1]:
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
