"""The notebook of the examples, run from its first cell to its last."""

import os
import pathlib
import re

import nbclient
import nbformat
import pytest

from tests.support.commands import WITHOUT_PACKAGES

NOTEBOOK = pathlib.Path(__file__).parents[2] / "examples" / "tour.ipynb"


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def list_outputs(notebook):
    """What the cells show: {kind: texts}."""
    found = {}
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            for kind, text in output.get("data", {}).items():
                found.setdefault(kind, []).append(text)
            if output.get("name") == "stdout":
                found.setdefault("stdout", []).append(output["text"])
    return found


def test_it_is_kept_without_outputs(notebook):
    nbformat.validate(notebook)
    assert list_outputs(notebook) == {}
    assert all(not cell.get("execution_count") for cell in notebook.cells)


@pytest.mark.slow
def test_it_trains_on_eight_devices_and_shows_what_it_promises(notebook):
    environ = os.environ | {
        "JAX_PLATFORMS": "cpu",
        WITHOUT_PACKAGES: "tensorflow",
    }
    del environ["XLA_FLAGS"]  # The first cell sets it.
    client = nbclient.NotebookClient(notebook, timeout=300)
    client.execute(env=environ)
    shown = list_outputs(notebook)
    texts = "\n".join(shown["text/plain"])
    assert shown["text/plain"][0] == "8"
    (picture,) = shown["image/svg+xml"]
    assert picture.startswith("<svg")
    assert len(re.findall(r"\(cpu:\d\)", picture)) == 8
    assert "FullySharded(min_size=1,024)" in texts
    assert re.search(r"dense/kernel +.*P\('replica',\)", texts)
    assert "time of a step" in texts
    assert re.search(r"\d+ % of the time .*\.", texts)
    accuracy, losses = shown["stdout"]
    assert float(accuracy.split()[-1]) >= 0.95
    assert losses.startswith("one device:")
