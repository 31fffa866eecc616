"""The scripts of docs/migration.md run, before and after."""

import ast
import os
import pathlib
import re

import pytest

import keras_strategies as ks
from tests.support.commands import python

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs/migration.md"
SCRIPTS = re.findall(
    r"^(Before|After):\n\n```python\n(.*?)^```",
    DOCUMENT.read_text(),
    re.M | re.S,
)
SEEDS_NAMES = (
    "scope",
    "reduce",
    "num_replicas_in_sync",
    "extended",
    "experimental_run_v2",
    "experimental_make_numpy_dataset",
    "experimental_local_results",
    "experimental_distribute_datasets_from_function",
    "experimental_distribute_dataset",
)


# Two virtual devices, before anything else runs.
TWO_DEVICES_OF_TF = (
    "import tensorflow as tf\n"
    "tf.config.set_logical_device_configuration("
    "tf.config.list_physical_devices('CPU')[0],"
    "[tf.config.LogicalDeviceConfiguration()] * 2)\n"
)


def assert_learned(shown):
    assert float(shown.split("accuracy")[-1]) > 0.9


def test_there_are_two_scripts_before_and_after():
    kinds = [kind for kind, _ in SCRIPTS]
    assert kinds == ["Before", "After", "Before", "After"]


@pytest.mark.parametrize("index", [1, 3])
def test_a_script_after(index, capsys):
    exec(SCRIPTS[index][1], {"__name__": "__main__"})
    assert_learned(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 2])
def test_a_script_before(index):
    environment = os.environ | {"KERAS_BACKEND": "tensorflow"}
    script = TWO_DEVICES_OF_TF + SCRIPTS[index][1]
    done = python("-c", script, env=environment)
    assert done.returncode == 0, done.stderr
    assert_learned(done.stdout)


def test_every_name_in_the_table_that_is_ours_exists():
    table = DOCUMENT.read_text().split("## Names")[1]
    names = set(re.findall(r"`ks\.([A-Za-z_]+)", table))
    assert len(names) > 20
    missing = {name for name in names if not hasattr(ks, name)}
    assert not missing
    for name in SEEDS_NAMES:
        assert f"{name}" in table
        assert name in dir(ks.Strategy)


def test_the_scripts_after_use_no_other_name_of_tf_than_data():
    for kind, script in SCRIPTS:
        used = {
            ast.unparse(node)
            for node in ast.walk(ast.parse(script))
            if isinstance(node, ast.Attribute)
            and ast.unparse(node).startswith("tf.")
        }
        if kind == "After":
            assert all(name.startswith("tf.data") for name in used), used
