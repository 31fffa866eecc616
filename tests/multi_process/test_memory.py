"""What a process stores while a GB of sharded weights is read."""

import pytest

from tests.multi_process import memory
from tests.support.jobs import values_of


def check(name, directory):
    target = f"multi_process.memory:{name}"
    for added, bound in values_of(target, 2, directory, devices=1):
        assert added < bound


@pytest.fixture(autouse=True)
def _large_arrays_are_returned_to_the_system(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000")


@pytest.mark.slow
def test_restoring_a_checkpoint_stores_shards(tmp_path):
    check("restore", tmp_path)


@pytest.mark.keras_hub
@pytest.mark.filterwarnings("ignore")
def test_loading_a_preset_stores_shards(tmp_path):
    pytest.importorskip("keras_hub", reason="./run test -m keras_hub")
    for size in memory.SIZES:
        memory.write_preset(tmp_path, size)
    check("load_preset", tmp_path)
