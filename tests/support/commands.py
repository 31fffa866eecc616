"""Commands that tests call."""

import subprocess


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
