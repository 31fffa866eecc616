"""The sweep's worker processes, and the turns that they take on a point."""

import contextlib
import json
import math
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time

import multi_process
import turns

ATTEMPTS = 3
# A turn of all peers takes about so long, in so many steps.
TURN_SECONDS = 0.15
# Of several processes, which agree on an epoch's steps when it begins.
LONG_TURN_SECONDS = 0.6
MIN_STEPS, MAX_STEPS = 4, 200
# Peers that need not take every turn.
FEW_TURNS = {"one": 5, "tf": 3}
# What a peer runs as, where that is not its name.
ROLES = {"ours_even": "ours", "nightly": "dataparallel"}
START_SECONDS = 90
# A program that hangs is aborted by XLA after 40 seconds.
PREPARE_SECONDS, MIN_SECONDS = 100, 30
MIN_TURNS = 5


class Ended(Exception):
    """A worker's process has ended by itself; what it printed last."""


class Late(Exception):
    """A worker did not answer in time, and was killed."""


class Refused(Exception):
    """A worker's command raised."""


def environment(role, devices):
    """A worker's environment, which finds fit.py beside this directory."""
    beside = str(pathlib.Path(__file__).parents[1])
    paths = [beside, os.environ.get("PYTHONPATH", "")]
    found = turns.environment(on_tensorflow=role == "tf", devices=devices)
    return found | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Worker:
    """One peer's process (and those it starts), on virtual CPU devices."""

    def __init__(self, peer, devices, processes, python=sys.executable):
        role = ROLES.get(peer, peer)
        local = 1 if role == "one" else devices // processes
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        words = {
            "--role": role,
            "--devices": devices,
            "--processes": processes,
            "--address": f"127.0.0.1:{multi_process.free_port()}",
        }
        script = pathlib.Path(__file__).with_name("sweep_worker.py")
        self.process = subprocess.Popen(
            [python, script, *(str(p) for item in words.items() for p in item)],
            env=environment(role, local),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            start_new_session=True,
        )
        self.answers = queue.SimpleQueue()
        threading.Thread(target=self.listen, daemon=True).start()
        self.versions = self.answer(START_SECONDS)["versions"]

    def listen(self):
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put(None)

    def ask(self, command, *arguments, seconds):
        """The answer to a command.

        Raises:
          Ended, Late, Refused: See there.
        """
        try:
            self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Ended(self.last_words()) from None
        return self.answer(seconds)

    def answer(self, seconds):
        try:
            line = self.answers.get(timeout=max(seconds, 0.01))
        except queue.Empty:
            self.kill()
            raise Late(f"no answer in {seconds:.0f} s") from None
        if line is None:
            raise Ended(self.last_words())
        told = json.loads(line)
        if "error" in told:
            raise Refused(told["error"])
        return told

    def last_words(self):
        status = self.process.wait()
        self.log.seek(0)
        return f"ended with exit status {status}: {self.log.read()[-400:]}"

    def kill(self):
        """Ends the process and those that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()


class Crew:
    """The workers of one number of devices and processes, kept alive."""

    def __init__(self, nightly_python=None):
        self.nightly_python = nightly_python
        self.workers = {}
        self.place = None

    def worker(self, peer, point):
        """The peer's worker, started if there is none."""
        place = point["devices"], point["processes"]
        if place != self.place:
            self.dismiss()
            self.place = place
        if peer not in self.workers:
            python = (
                self.nightly_python if peer == "nightly" else sys.executable
            )
            self.workers[peer] = Worker(peer, *place, python=python)
        return self.workers[peer]

    def lose(self, peer):
        """Ends a worker; the next call starts another."""
        if peer in self.workers:
            self.workers.pop(peer).kill()

    def dismiss(self):
        for peer in list(self.workers):
            self.lose(peer)


class Session:
    """The peers' turns on one point.

    Attributes:
      left_out: Why a peer does not take part, by peer.
      aborts: How often a peer's process ended by itself, by peer.
      told: What peers answered to `prepare`, by peer.
      ms: Milliseconds a step of each turn, by peer.
    """

    def __init__(self, crew, point, deadline, wanted_end):
        self.crew, self.point = crew, point
        self.deadline, self.wanted_end = deadline, wanted_end
        self.left_out, self.aborts, self.told, self.ms = {}, {}, {}, {}
        self.steps = None

    def measure(self, peers, count):
        """Prepares the peers, and lets them take turns.

        Args:
          peers: Their names; `ours` first.
          count: Turns of each peer.
        """
        for peer in peers:
            point = self.find_point(peer)
            self.asked(peer, "prepare", point)
            if "ours" in self.left_out:
                return
        self.steps = self.steps_of_a_turn()
        for peer in self.present():
            self.asked(peer, "size", self.steps)
        for index in range(count):
            now = time.monotonic()
            is_over = now > self.wanted_end and index >= MIN_TURNS
            if is_over or now > self.deadline:
                break
            for peer in self.present():
                if index < FEW_TURNS.get(peer, count):
                    self.take_turn(peer)

    def present(self):
        return [peer for peer in self.told if peer not in self.left_out]

    def find_point(self, peer):
        if peer == "ours_even":
            return self.point | {"extra": 0}
        return self.point

    def take_turn(self, peer):
        answer = self.asked(peer, "turn")
        if answer:
            self.ms.setdefault(peer, []).append(round(answer["ms"], 5))

    def steps_of_a_turn(self):
        """As many as take a turn's time: between our time and the least."""
        fastest = min(
            self.told[peer]["ms"]
            for peer in self.present()
            if peer not in FEW_TURNS
        )
        ms = (fastest * self.told["ours"]["ms"]) ** 0.5
        is_long = self.point["processes"] > 1
        seconds = LONG_TURN_SECONDS if is_long else TURN_SECONDS
        steps = min(max(seconds * 1e3 / ms, MIN_STEPS), MAX_STEPS)
        spe = self.point["spe"]
        return max(round(steps / spe), 1) * spe

    def asked(self, peer, command, *arguments):
        """A peer's answer; None once it is left out.

        A peer that ended by itself is started and prepared again.
        """
        is_started = False
        while True:
            try:
                worker = self.crew.worker(peer, self.point)
                if is_started and command != "prepare":
                    self.tell(worker, "prepare", self.find_point(peer))
                    if command != "size":
                        self.tell(worker, "size", self.steps)
                told = self.tell(worker, command, *arguments)
                if command == "prepare":
                    self.told[peer] = told | {"versions": worker.versions}
                return told
            except Ended as ended:
                self.crew.lose(peer)
                self.aborts[peer] = self.aborts.get(peer, 0) + 1
                if self.aborts[peer] == ATTEMPTS:
                    self.left_out[peer] = str(ended)
                    return None
                is_started = True
            except (Late, Refused) as why:
                if isinstance(why, Late):
                    self.crew.lose(peer)
                self.left_out[peer] = str(why)
                return None

    def tell(self, worker, command, *arguments):
        seconds = max(self.deadline - time.monotonic(), MIN_SECONDS)
        if command == "prepare":
            seconds = min(seconds, PREPARE_SECONDS)
        return worker.ask(command, *arguments, seconds=seconds)

    def free(self):
        """Lets every worker forget the point."""
        for peer, worker in list(self.crew.workers.items()):
            try:
                worker.ask("free", seconds=30)
            except (Ended, Late, Refused):
                self.crew.lose(peer)

    def record(self):
        """What is kept of the point."""
        return {
            "id": self.point["id"],
            "steps": self.steps,
            "ms": self.ms,
            "told": self.told,
            "left_out": self.left_out,
            "aborts": self.aborts,
        }


def measured(crew, point, peers, count, seconds, wanted_seconds=math.inf):
    """A point's record.

    Args:
      crew: The workers.
      point: See sweep_points.py.
      peers: Who takes part; `ours` first.
      count: Turns of each peer.
      seconds: After so long, what does not answer is killed.
      wanted_seconds: After so long, MIN_TURNS are enough.
    """
    begun = time.monotonic()
    session = Session(crew, point, begun + seconds, begun + wanted_seconds)
    with contextlib.ExitStack() as stack:
        stack.callback(session.free)
        session.measure(peers, count)
    return session.record() | {"seconds": round(time.monotonic() - begun, 1)}
