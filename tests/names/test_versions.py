"""Versions of Keras and JAX: what works, what warns, what is refused."""

import re
import sys

import jax
import keras
import pytest

import keras_strategies  # noqa: F401
from keras_strategies.names import versions
from tests.test_import import run_python

# Packages of a directory, as an installer leaves them, that nothing imports.
FAKE = """
import pathlib, sys, tempfile
directory = pathlib.Path(tempfile.mkdtemp())
for package, name, text in {files!r}:
    path = directory / package / name
    path.parent.mkdir(parents=True)
    (directory / package / "__init__.py").write_text("raise SystemExit(9)")
    path.write_text(text)
sys.path.insert(0, str(directory))
import keras_strategies
assert not {{"jax", "keras"}} & set(sys.modules)
print("imported")
"""


def importing(keras_version="3.15.1", jax_version="0.10.2", **environ):
    """Imports the package beside a Keras and a JAX of some versions."""
    found = {"keras": keras_version, "jax": jax_version}
    files = [(name, "empty.py", "") for name in found]
    files += [
        (
            f"{name}-{version}.dist-info",
            "METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        )
        for name, version in found.items()
    ]
    environ = {versions.SILENCE: ""} | environ
    return run_python(FAKE.format(files=files), **environ)


def test_installed_versions_are_those_of_the_modules(monkeypatch):
    assert versions.installed_version("keras") == keras.__version__
    assert versions.installed_version("jax") == jax.__version__
    for name in ("keras", "jax"):
        monkeypatch.delitem(sys.modules, name)
    assert versions.installed_version("keras") == keras.__version__
    assert versions.installed_version("jax") == jax.__version__
    assert versions.installed_version("no_such_package") is None


@pytest.mark.parametrize(
    ("keras_version", "jax_version"),
    [("3.15.0", "0.10.0"), ("3.15.9", "0.12.0.1"), ("3.15.1", "0.11.3.dev1")],
)
def test_versions_that_work_say_nothing(keras_version, jax_version):
    done = importing(keras_version, jax_version)
    assert (done.stdout.split(), done.stderr) == (["imported"], "")


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"keras_version": "3.14.2"}, "keras 3.15 or newer.*: keras 3.14.2"),
        ({"jax_version": "0.9.9"}, "jax 0.10 or newer.*Received: jax 0.9.9"),
    ],
)
def test_an_old_version_is_refused_before_it_is_imported(found, text):
    for silence in ({}, {versions.SILENCE: "1"}):
        done = importing(**found, **silence)
        assert done.returncode == 1, done.stderr
        last = done.stderr.strip().splitlines()[-1]
        assert re.match(f"ImportError: .*{text}.*pip install '", last), last


@pytest.mark.parametrize(
    ("found", "name"),
    [
        ({"keras_version": "3.16.0.dev2026102704"}, "keras"),
        ({"keras_version": "4.0"}, "keras"),
        ({"jax_version": "0.13.0"}, "jax"),
    ],
)
def test_a_newer_version_warns_and_is_silenced(found, name):
    done = importing(**found)  # UserWarnings are errors there.
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("UserWarning: "), last
    for word in (name, *found.values(), versions.TESTED[name], "pip install"):
        assert word in last
    assert versions.SILENCE in last
    done = importing(**found, **{versions.SILENCE: "1"})
    assert done.stdout.split() == ["imported"], done.stderr
