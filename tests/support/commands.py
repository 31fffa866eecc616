"""Commands that tests call."""

import os
import pathlib
import subprocess
import sys

# The packages that child processes do not find, by a space between. Keras
# imports sklearn if it is there, and TensorFlow when it saves a model: that is
# half of the time of a short process, and most use nothing of them.
WITHOUT_PACKAGES = "KERAS_STRATEGIES_TESTS_WITHOUT"
CHILD = pathlib.Path(__file__).with_name("child")


def start_children_fast(environ):
    """Lets the child processes of an environment begin with `CHILD`."""
    path = environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [str(CHILD), *filter(None, path)]
    environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
    environ.setdefault(WITHOUT_PACKAGES, "sklearn")


def call(*words, limit_s=600, **options):
    """What a command prints; it must succeed."""
    done = subprocess.run(
        [str(word) for word in words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        **options,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def python(*words, timeout=300, check=False, **options):
    """A process of Python, ended: its code, and as text what it printed."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=check,
        **options,
    )
