"""Specifications of chips."""

import pytest

from keras_strategies.gpu.topology_devices import TARGETS
from keras_strategies.tpu.chips import find_chip, find_memory
from tests.support.gpus import Gpu
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
    assert find_memory(device) == chip.memory_bytes == int(gib * 2**30)


def test_a_device_that_is_not_known_has_no_figures():
    device = Tpu(id=0, process_index=0, coords=(0, 0, 0), device_kind="TPU v9")
    assert find_chip(device) is None


def make_gpu(name):
    return Gpu(0, device_kind=TARGETS[name].device_kind)


@pytest.mark.parametrize("name", TARGETS)
def test_each_gpu_that_programs_are_compiled_for_has_specifications(name):
    chip = find_chip(make_gpu(name))
    assert chip.name == name
    assert chip.memory_bytes == TARGETS[name].memory
    # Rates of XLA's target: two operations in each cycle.
    target = TARGETS[name]
    units = target.cores * 4 * target.matrix_ops * target.matrix_clock_ghz
    assert chip.flops == pytest.approx(2e9 * units, rel=0.02)
    assert chip.find_flops("bf16") == chip.find_flops("f16") == chip.flops
    assert chip.find_flops("f32") == pytest.approx(chip.flops / 2, rel=1e-3)
    exact = 2e9 * target.cores * target.fpus_per_core * target.clock_ghz
    assert chip.find_flops("f32 exact") == pytest.approx(exact, rel=0.02)
    assert chip.network_bandwidth < chip.link_bandwidth < chip.memory_bandwidth


def test_jax_gives_a_process_three_quarters_of_a_gpu_s_memory(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    memory = TARGETS["h100"].memory
    workspace = 32 * 2**20
    assert find_memory(make_gpu("h100")) == int(0.75 * memory) - workspace
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".9")
    assert find_memory(make_gpu("h100")) == int(0.9 * memory) - workspace
    for wrong in ("most", "75", "0", "nan", "inf"):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", wrong)
        with pytest.raises(ValueError, match=f"{wrong}"):
            find_memory(make_gpu("h100"))
