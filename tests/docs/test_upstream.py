"""The scripts of docs/upstream.md show the faults that the page reports."""

import os
import pathlib
import re

import pytest

from keras_strategies.gpu.topology_devices import (
    complete_options,
    make_gpu_devices,
)
from tests.support.commands import python

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "upstream.md"


def read_scripts():
    text = DOCUMENT.read_text("utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


@pytest.mark.slow
def test_attention_on_tpus_is_causal():
    script, _ = read_scripts()
    done = python("-c", script, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    lines = [line.split(", ") for line in done.stdout.splitlines()]
    errors = {
        (case, of): [float(n) for n in numbers] for case, of, *numbers in lines
    }
    # All is causal attention without a scale, but for masks of rows.
    for case in ("no mask", "scale", "one mask", "masks of rows"):
        assert min(errors[case, "expected"]) > 1
        of_causal = errors[case, "causal"]
        is_causal = case != "masks of rows"
        assert (max(of_causal) < 1e-5) == is_causal


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["a100:8", "h100:8", "b200:2x4"])
def test_updates_delay_the_backward_pass_on_gpus(name):
    _, script = read_scripts()
    defined = {"__name__": "script"}
    exec(script, defined)
    devices = make_gpu_devices(name)
    options = complete_options(None, devices)
    counts = [
        defined["count_sums"](devices, has_barrier, options)
        for has_barrier in (False, True)
    ]
    assert counts == [4, 1]
