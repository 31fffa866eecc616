"""What docs/clusters.md shows is read as it says."""

import pathlib
import re

import pytest

import keras_strategies as ks

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs/clusters.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S)


def blocks(kind):
    return [text for name, text in BLOCKS if name == kind]


def test_script_runs_in_one_process(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    (script,) = blocks("python")
    names = {}
    exec(script, names)
    assert names["info"].num_processes == 1
    assert names["strategy"].num_replicas_in_sync == 8


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
