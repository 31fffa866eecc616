"""The script of docs/upstream.md shows the faults that the page reports."""

import os
import pathlib
import re

import pytest

from tests.support.commands import python

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "upstream.md"


@pytest.mark.slow
def test_the_script_shows_what_the_page_says():
    text = DOCUMENT.read_text("utf-8")
    (script,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
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
