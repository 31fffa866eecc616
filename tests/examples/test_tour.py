"""The notebooks of the examples, run from their first cell to their last."""

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
    assert re.search(r"rows of replicas +(12(, )?){8}$", texts, re.MULTILINE)
    assert "FullySharded(min_size=1,024)" in texts
    assert re.search(r"dense/kernel +.*P\('replica',\)", texts)
    assert "time of a step" in texts
    assert re.search(r"\d+ % of the time [^.]*\.", texts)
    accuracy, losses = shown["stdout"]
    assert float(accuracy.split()[-1]) >= 0.95
    assert losses.startswith("one device:")


@pytest.mark.slow
def test_kaggles_notebook_trains_on_eight_devices(tmp_path):
    notebook = nbformat.read(NOTEBOOK.with_name("kaggle_tpu.ipynb"), 4)
    nbformat.validate(notebook)
    assert list_outputs(notebook) == {}
    environ = os.environ | {
        "JAX_PLATFORMS": "cpu",
        WITHOUT_PACKAGES: "tensorflow",
    }
    del environ["XLA_FLAGS"]
    client = nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=environ)
    shown = list_outputs(notebook)
    assert "8" in shown["text/plain"]
    texts = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(shown["stdout"]))
    assert re.search(r"jax +0\.", texts)
    plain = "\n".join(shown["text/plain"])
    assert re.search(r"\d+ % of the time [^.]*\.", plain)
    assert re.search(r"not seen: (1\.0|0\.9[5-9])", texts)
    assert (tmp_path / "digits.keras").exists()
    assert list((tmp_path / "checkpoints").iterdir())
