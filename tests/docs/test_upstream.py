"""The scripts of docs/upstream.md show the problems that the page reports."""

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


def find_blocks(heading, language):
    """The blocks of code of a section."""
    text = DOCUMENT.read_text("utf-8")
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.M | re.S)


def run_script(heading):
    (script,) = find_blocks(heading, "python")
    done = python("-c", script, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_report_has_a_state():
    text = DOCUMENT.read_text("utf-8")
    headings = re.findall(r"^## (.*)$", text, re.M)
    rows = re.findall(r"^\| \[(.*?)\]\(#\S+\) \| (.*) \|$", text, re.M)
    assert [name for name, _ in rows] == headings
    link = r"\[[\w-]+/[\w-]+#\d+\]\(https://github\.com/[\w/-]+\d\)"
    issues = f"{link}(, {link})*, (open|closed)"
    form = f"not reported yet(; related: {issues})?|{issues}"
    for name, state in rows:
        assert re.fullmatch(form, state), name


@pytest.mark.slow
def test_an_lstm_in_half_precision_cannot_be_lowered():
    heading = "Keras: LSTM in half precision on GPUs"
    assert [run_script(heading)] == find_blocks(heading, "text")


@pytest.mark.slow
def test_attention_on_tpus_is_what_the_page_says():
    printed = run_script("Keras: attention on TPUs is causal and unscaled")
    lines = [line.split(", ") for line in printed.splitlines()]
    errors = {
        (case, of): [float(n) for n in numbers] for case, of, *numbers in lines
    }
    # All is causal attention without a scale, but for masks of rows.
    for case in ("no mask", "scale", "one mask", "masks of rows"):
        assert min(errors[case, "expected"]) > 1
        causal_error = errors[case, "causal"]
        is_causal = case != "masks of rows"
        assert (max(causal_error) < 1e-5) == is_causal


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["a100:8", "h100:8", "b200:2x4"])
def test_updates_delay_the_backward_pass_on_gpus(name):
    heading = "XLA: updates delay the backward pass on GPUs"
    (script,) = find_blocks(heading, "python")
    defined = {"__name__": "script"}
    exec(script, defined)
    devices = make_gpu_devices(name)
    options = complete_options(None, devices)
    counts = [
        defined["count_sums"](devices, has_barrier, options)
        for has_barrier in (False, True)
    ]
    assert counts == [4, 1]
