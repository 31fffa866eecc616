"""Specifications of chips."""

import pytest

from keras_strategies.planning.program.chips import find_chip, find_memory
from tests.support.slices import Tpu

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("kind", "name", "gib"),
    [
        ("TPU v4", "v4", 30.75),
        ("TPU v5 lite", "v5e", 15.75),
        ("TPU v5", "v5p", 95.74),
        ("TPU v6 lite", "v6e", 31.25),
        ("TPU7x", "tpu7x", 94.75),
    ],
)
def test_chips_by_their_kind(kind, name, gib):
    device = Tpu(id=0, process_index=0, coords=(0, 0, 0), device_kind=kind)
    chip = find_chip(device)
    assert chip is not None
    assert chip.name == name
    assert chip.source.endswith(f"/tpu/docs/{name}")
    assert find_memory(device) == chip.memory_bytes == int(gib * 2**30)


def test_a_device_that_is_not_known_has_no_figures():
    device = Tpu(id=0, process_index=0, coords=(0, 0, 0), device_kind="TPU v9")
    assert find_chip(device) is None
