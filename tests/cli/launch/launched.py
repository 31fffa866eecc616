"""What the processes of test_launch.py do; imports nothing that is slow.

    python -m tests.cli.launch.launched WORDS...

has a word for each process: an exit code ("1"), a code after some seconds
("75@0.2"), a signal to itself ("SIGKILL"), "sleep", "stubborn" (ignores
SIGTERM and SIGINT), "heard" (says that it had a SIGINT), "guarded" (stubborn,
but ends with 71 when the launcher tells or is gone), "preempted" (75 at
SIGTERM), "stopped", "chatty" (prints), "parent" (starts a sleeping process of
its own). With a directory in the variable STARTED, they wait there until all
have started.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from tests.support.waiting import wait_until

LONG = 180.0


def main():
    config = json.loads(os.environ["TF_CONFIG"])
    index = config["task"]["index"]
    word, _, seconds = sys.argv[1 + index].partition("@")
    if word in ("stubborn", "guarded"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if word == "heard":
        signal.signal(signal.SIGINT, lambda *_: print("heard"))
    if word == "preempted":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    if word == "parent":
        started = subprocess.Popen([sys.executable, "-c", SLEEP])
        print(f"started {started.pid}")
    print(f"pid {os.getpid()}")
    if directory := os.environ.get("STARTED"):
        wait_for_all(pathlib.Path(directory), index, config["cluster"])
    time.sleep(float(seconds or 0))
    if word == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif word == "guarded":
        line = os.fdopen(int(os.environ["KERAS_STRATEGIES_LAUNCHER_FD"]))
        print(f"told: {line.readline().strip() or 'the launcher is gone'}")
        sys.exit(71)
    elif word.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[word])
    elif word == "chatty":
        while True:
            print("still here")
            time.sleep(0.05)
    elif word.isdigit():
        sys.exit(int(word))
    else:
        time.sleep(LONG)


def wait_for_all(directory, index, cluster):
    (directory / str(index)).touch()
    count = sum(map(len, cluster.values()))
    wait_until(lambda: len(list(directory.iterdir())) == count, LONG)


SLEEP = f"import time; time.sleep({LONG})"

if __name__ == "__main__":
    main()
