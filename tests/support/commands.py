"""Commands that tests call."""

import subprocess
import sys


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
