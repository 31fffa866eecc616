"""Peers that are measured in turns, each in a process of its own.

All are warmed up first; then they take turns while the others sleep, so that
a drift of the machine's speed meets all of them.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time

ATTEMPTS = 5


class PeerEnded(Exception):
    """A peer's process has ended; what it printed last."""

    def __init__(self, peer, text):
        super().__init__(text)
        self.peer = peer


def serve(work, steps, facts=dict):
    """The peer's side: works twice, then once for every line read.

    Args:
      work: What is measured.
      steps: Its number of steps.
      facts: Returns what else to tell after each turn.
    """
    work()
    work()
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
        told = {"ms": seconds / steps * 1e3} | facts()
        print(json.dumps(told), flush=True)


def start(arguments, *, on_tensorflow, devices, log):
    """Starts this script again as one peer, on virtual CPU devices."""
    return subprocess.Popen(
        [sys.executable, sys.argv[0], *arguments],
        env=environment(on_tensorflow=on_tensorflow, devices=devices),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )


def environment(*, on_tensorflow, devices):
    """The environment of a peer that has virtual CPU devices."""
    return os.environ | {
        "KERAS_BACKEND": "tensorflow" if on_tensorflow else "jax",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }


def session(peers, start_peer, repeats):
    """Measures peers in turns; again if XLA aborts one that is not ours.

    The collectives of keras.distribution's programs can wait for each other
    for ever where there are more virtual CPU devices than cores. A peer that
    is aborted every time is left out.

    Args:
      peers: Their names.
      start_peer: `start_peer(peer, log)`, a process.
      repeats: Number of turns.

    Returns:
      For each peer that was measured, what it told after each turn.
    """
    left = list(peers)
    aborts = dict.fromkeys(peers, 0)
    while True:
        try:
            return _one_session(left, start_peer, repeats)
        except PeerEnded as ended:
            if ended.peer == "ours":
                raise
            aborts[ended.peer] += 1
            given_up = aborts[ended.peer] == ATTEMPTS
            if given_up:
                left.remove(ended.peer)
            print(
                f"{ended.peer} was aborted by XLA (attempt "
                f"{aborts[ended.peer]} of {ATTEMPTS}); starting the session "
                f"again{' without it' if given_up else ''}. It said:\n{ended}",
                file=sys.stderr,
            )


def _one_session(peers, start_peer, repeats):
    told = {peer: [] for peer in peers}
    with contextlib.ExitStack() as stack:
        running = {}
        for peer in peers:
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = start_peer(peer, log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            running[peer] = process, log
        for peer, (process, log) in running.items():
            while _answer(peer, process, log).strip() != "ready":
                pass
        for _ in range(repeats):
            for peer, (process, log) in running.items():
                process.stdin.write("\n")
                process.stdin.flush()
                told[peer].append(json.loads(_answer(peer, process, log)))
    return told


def _answer(peer, process, log):
    """The next line that a peer prints."""
    line = process.stdout.readline()
    if not line:
        log.seek(0)
        raise PeerEnded(
            peer,
            f"Peer {peer!r} ended with exit status {process.wait()}:\n"
            f"{log.read()[-2000:]}",
        )
    return line
