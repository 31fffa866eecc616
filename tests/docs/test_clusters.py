"""What docs/clusters.md shows is read as it says."""

import pathlib
import re

import pytest

import keras_strategies as ks

pytestmark = pytest.mark.quick

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs/clusters.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S)


def blocks(kind):
    return [text for name, text in BLOCKS if name == kind]


def test_scripts_run_in_one_process(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    # One task of one node, as srun would say.
    for name, value in {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_NODELIST": "host0",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        # Of mpirun.
        "OMPI_COMM_WORLD_SIZE": "1",
        "OMPI_COMM_WORLD_RANK": "0",
    }.items():
        monkeypatch.setenv(name, value)
    scripts = blocks("python")
    assert len(scripts) == 4
    names = {"ks": ks}
    for script in scripts:
        exec(script, names)
        assert names["strategy"].num_replicas_in_sync == 8
    assert names["resolver"].task_id == 0
    assert names["options"].timeout_seconds == 120


@pytest.mark.parametrize("text", blocks("json"))
def test_tf_configs_are_read(text):
    info = ks.cluster_resolver.task_info(
        ks.cluster_resolver.TFConfigClusterResolver(environ={"TF_CONFIG": text})
    )
    assert (info.num_processes, info.process_id) == (3, 2)
    assert info.coordinator_address == "host0:2222"


def test_every_resolver_is_in_the_table():
    for name in dir(ks.cluster_resolver):
        if name.endswith("Resolver") and name not in (
            "ClusterResolver",
            "UnionClusterResolver",
        ):
            assert f"| `{name}(" in DOCUMENT.read_text(), name
