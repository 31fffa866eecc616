"""What docs/checkpoints.md shows is what there is."""

import dataclasses
import io
import pathlib
import re

import pytest
from rich.console import Console

from keras_strategies.checkpoint.directory.names import (
    find_partial_saves,
    find_quarantined,
    parse_step,
)
from keras_strategies.checkpoint.directory.retention import Keep
from keras_strategies.cli.checkpoints.checkpoint_list import look_at
from keras_strategies.cli.checkpoints.checkpoints import print_listing
from tests.support.checkpoint.damages import flip
from tests.support.checkpoint.written import VARIABLES, write_small

pytestmark = pytest.mark.quick

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "checkpoints.md"
TEXT = DOCUMENT.read_text()
BLOCKS = re.findall(r"^```text\n(.*?)^```", TEXT, re.M | re.S)
HOUR = 3600.0


def test_output_is_that_of_the_command(tmp_path):
    logs = {"accuracy": 0.912, "loss": 0.2871, "val_loss": 0.3112}
    better = {"accuracy": 0.934, "loss": 0.2204, "val_loss": 0.2519}
    for epoch, (step, said) in enumerate(
        {800: logs, 1200: better, 1400: better}.items(), start=2
    ):
        path = write_small(
            tmp_path,
            step,
            {"epoch": epoch, "logs": said},
            VARIABLES,
            created=1.8e9 + epoch * HOUR,
        )
    flip(path / "run" / "metadata")
    left = tmp_path / "1600.orbax-checkpoint-tmp"
    left.mkdir()
    (left / "file").write_bytes(bytes(12000))
    (shown,) = (block for block in BLOCKS if block.startswith("$"))
    listing = look_at(str(tmp_path))
    console = Console(width=80, file=io.StringIO())
    print_listing(
        dataclasses.replace(listing, directory="/home/me/run1"),
        console,
    )
    output = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert output == shown.splitlines()[1:]


def test_names_on_disk_are_known(tmp_path):
    names = re.findall(r"^    (\d\S*)/", BLOCKS[0], re.M)
    for name in names:
        (tmp_path / name).mkdir()
    assert len(names) == 4
    assert [name for name in names if parse_step(name) is not None] == ["1200"]
    assert len(find_partial_saves(tmp_path)) == 2
    assert len(find_quarantined(tmp_path)) == 1


def test_table_has_every_rule_with_its_default():
    for field in dataclasses.fields(Keep):
        default = repr(field.default).replace("'", '"')
        assert f"`{field.name}={default}`" in TEXT
