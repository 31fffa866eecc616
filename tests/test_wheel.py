"""The wheel and the sdist: what is in them, and the wheel alone at work."""

import os
import pathlib
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


def environment(folder, *packages):
    """A fresh environment's folder of commands."""
    call(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    call(
        *(folder / "bin" / "python", "-m", "pip", "install", "--quiet"),
        *packages,
        cwd=folder.parent,
    )
    return folder / "bin"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder that a release's two files lie in, and its tools'."""
    folder = tmp_path_factory.mktemp("built")
    source = shutil.copytree(ROOT, folder / "source", ignore=IGNORED)
    tools = environment(folder / "tools", "build", "twine")
    call(tools / "python", "-m", "build", "-o", folder / "dist", cwd=source)
    return folder / "dist", tools


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


def test_the_wheel_alone_trains(built, tmp_path):
    (wheel,) = built[0].glob("*.whl")
    commands = environment(tmp_path / "env", f"{wheel}[examples]")
    shutil.copy(ROOT / "examples" / "digits_fit.py", tmp_path)
    shown = call(commands / "python", "digits_fit.py", cwd=tmp_path)
    assert "accuracy" in shown
    shown = call(commands / "keras-strategies", "doctor", cwd=tmp_path)
    assert "nothing to change" in shown
