"""docs/migration.md and the script of examples/migration, before and after."""

import os
import pathlib
import re

import pytest

import keras_strategies as ks
from keras_strategies.migrate.porting import port_sources
from tests.support.commands import python

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/migration.md"
BEFORE = ROOT / "examples/migration/custom_loop_tf.py"
AFTER = ROOT / "examples/migration/custom_loop.py"
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


def test_the_script_after_is_the_port_of_the_script_before():
    ported = port_sources({"script": ("script", BEFORE.read_text())})["script"]
    assert ported.code == AFTER.read_text()
    assert ported.left == ()
    assert ported.num_changed > 15


def test_the_script_after(capsys):
    exec(AFTER.read_text(), {"__name__": "__main__"})
    assert_learned(capsys.readouterr().out)


@pytest.mark.slow
def test_the_script_before():
    environment = os.environ | {"KERAS_BACKEND": "tensorflow"}
    script = TWO_DEVICES_OF_TF + BEFORE.read_text()
    done = python("-c", script, env=environment)
    assert done.returncode == 0, done.stderr
    assert_learned(done.stdout)


def test_the_page_begins_with_the_command_and_the_diff():
    command, diff = re.findall(
        r"```(\w+)\n(.*?)```", DOCUMENT.read_text(), re.S
    )[:2]
    assert command[0] == "sh"
    first, *_ = [c for c in command[1].splitlines() if c[0] != "#"]
    assert first.startswith("keras-strategies migrate ")
    assert diff[0] == "diff"
    lines = AFTER.read_text().splitlines()
    added = [line[1:] for line in diff[1].splitlines() if line[:1] == "+"]
    assert len(added) > 15
    assert set(added) <= set(lines)


def test_every_name_in_the_table_that_is_ours_exists():
    table = DOCUMENT.read_text().split("## Names")[1]
    names = set(re.findall(r"`ks\.([A-Za-z_]+)", table))
    assert len(names) > 20
    missing = {name for name in names if not hasattr(ks, name)}
    assert not missing
    for name in SEEDS_NAMES:
        assert f"{name}" in table
        assert name in dir(ks.Strategy)
