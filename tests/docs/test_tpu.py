"""The code and the figures of docs/tpu.md."""

import pathlib
import re

import pytest

from keras_strategies.tpu.experimental import Topology

pytestmark = pytest.mark.quick

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "tpu.md"
BLOCKS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def run_blocks(has_names):
    names = {}
    for block in BLOCKS:
        if has_names or not re.search("from_name|for_topology", block):
            exec(block, names)
    return names


def test_code_runs_on_cpus():
    names = run_blocks(has_names=False)
    assert dict(names["mesh"].shape) == {"replica": 4, "model": 2}
    assert len(names["devices"]) == 8


@pytest.mark.tpu
def test_code_runs_by_name():
    names = run_blocks(has_names=True)
    assert names["named"].num_tasks == 4
    assert names["program"].num_replicas == 16


@pytest.mark.tpu
def test_table_of_names_is_right():
    rows = re.findall(
        r"^\| `(\w+:[\dx]+)` \| ([\d, ]+) \| (\d+) x (\d+) \| (\d+) \|",
        DOCUMENT.read_text(),
        re.MULTILINE,
    )
    assert len(rows) == 6
    for name, mesh_shape, tasks, devices, cores in rows:
        topology = Topology.from_name(name)
        assert topology.mesh_shape.tolist() == [
            int(size) for size in mesh_shape.split(", ")
        ]
        assert topology.num_tasks == int(tasks)
        assert topology.num_tpus_per_task == int(devices)
        assert int(tasks) * int(devices) == int(cores)
