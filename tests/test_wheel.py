"""The wheel and the sdist: what is in them, and the wheel alone at work."""

import os
import pathlib
import re
import shutil
import sys
import tarfile
import zipfile

import pytest

from tests.support.commands import call as call_with

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[1]
IGNORED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist")


def call(*words, cwd):
    """What a command prints, without the variables of this process."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KERAS_", "XLA_", "JAX_", "PYTHON"))
    }
    return call_with(*words, cwd=cwd, env=inherited)


def environment(directory, *packages):
    """A fresh environment's directory of commands."""
    call(sys.executable, "-m", "venv", directory, cwd=directory.parent)
    call(
        *(directory / "bin" / "python", "-m", "pip", "install", "--quiet"),
        *packages,
        cwd=directory.parent,
    )
    return directory / "bin"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The directory that a release's two files lie in, and its tools'."""
    directory = tmp_path_factory.mktemp("built")
    source = shutil.copytree(ROOT, directory / "source", ignore=IGNORED)
    tools = environment(directory / "tools", "build", "twine")
    call(tools / "python", "-m", "build", "-o", directory / "dist", cwd=source)
    return directory / "dist", tools


def test_the_files_hold_the_package(built):
    dist, tools = built
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    call(tools / "twine", "check", "--strict", wheel, sdist, cwd=dist)
    names = zipfile.ZipFile(wheel).namelist()
    modules = ROOT / "keras_strategies"
    sources = [*modules.rglob("*.py"), *modules.rglob("*.pyi")]
    expected = {str(path.relative_to(ROOT)) for path in sources}
    expected.add("keras_strategies/py.typed")
    found = {name for name in names if ".dist-info/" not in name}
    assert found == expected
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert expected | {"README.md", "LICENSE", "pyproject.toml"} <= inside


@pytest.fixture(scope="module")
def commands(built, tmp_path_factory):
    """An environment's commands, with the wheel and what examples need."""
    (wheel,) = built[0].glob("*.whl")
    return environment(tmp_path_factory.mktemp("env"), f"{wheel}[examples]")


def test_the_wheel_alone_trains(commands, tmp_path):
    shutil.copy(ROOT / "examples" / "digits_fit.py", tmp_path)
    shown = call(commands / "python", "digits_fit.py", cwd=tmp_path)
    assert "accuracy" in shown
    shown = call(commands / "keras-strategies", "doctor", cwd=tmp_path)
    assert "nothing to change" in shown


def test_the_code_of_the_readme_trains(commands, tmp_path):
    text = (ROOT / "README.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    layers, count = "[keras.layers.Dense(10, activation='softmax')]", 2560
    assert code.count("[...]") == 1
    script = f"""
import numpy as np
x, y = np.random.rand({count}, 8), np.arange({count}) % 10
{code.replace("[...]", layers)}"""
    shown = call(commands / "python", "-c", script, cwd=tmp_path)
    assert "Epoch 5/5" in shown
    assert f"{count // 256}/{count // 256}" in shown
