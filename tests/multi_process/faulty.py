"""The fit of restarted.py, whose chief stops where a test wants to kill it.

python -m tests.multi_process.faulty DIRECTORY EPOCHS KIND

DIRECTORY/fault.json is the next fault: a dict of the arguments of `Stop`. When
the chief has reached this place, it writes its id and the place to
DIRECTORY/reached, and waits until the test has deleted DIRECTORY/fault.json.
"""

import contextlib
import dataclasses
import json
import os
import re
import sys
import time

from jax._src import lru_cache

from tests.multi_process import restarted
from tests.multi_process.restarted import CHECKPOINTS, DIRECTORY, TASK

FAULT, REACHED = DIRECTORY / "fault.json", DIRECTORY / "reached"
MAX_SECONDS = 120.0
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
SAVING = re.compile(r"(\d+)\.(saving|orbax-checkpoint-tmp)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
    """A place in which the chief stops.

    Attributes:
      place: "save" or "cache".
      number: The operation on the directory of checkpoints, counted from the
        second save of a start; or the write of the cache.
      share: The part of the cache's file that is written before.
    """

    place: str
    number: int
    share: float


def find_stop(place):
    """Returns the stop in a place that has not been reached, or None."""
    with contextlib.suppress(FileNotFoundError):
        stop = Stop(**json.loads(FAULT.read_text()))
        if stop.place == place and not REACHED.exists():
            return stop
    return None


def stop_here(where):
    temporary = DIRECTORY / "reached.new"
    temporary.write_text(f"{os.getpid()} {where}")
    temporary.rename(REACHED)
    end = time.monotonic() + MAX_SECONDS
    while FAULT.exists() and time.monotonic() < end:
        time.sleep(0.01)


def stop_in_saves():
    """Counts the operations of saves; the first one is left in peace.

    So the job ends at other steps than before: the launcher gives up after
    three equal ends in a row.
    """
    saves, count = set(), 0

    def note(event, arguments):
        nonlocal count
        if event not in EVENTS or not isinstance(
            arguments[0], str | os.PathLike
        ):
            return
        path = os.fspath(arguments[0])
        if not path.startswith(f"{CHECKPOINTS}/"):
            return
        name = path.removeprefix(f"{CHECKPOINTS}/").split("/")[0]
        if match := SAVING.match(name):
            saves.add(match[1])
        if name.startswith(".") or len(saves) < 2:
            return
        count += 1
        stop = find_stop("save")
        if stop is not None and count > stop.number:
            stop_here(f"{event} {path.removeprefix(f'{CHECKPOINTS}/')}")

    sys.addaudithook(note)


def stop_in_cache():
    """Counts the writes of new programs and of the times of their use."""
    kind, count = type(lru_cache.pathlib.Path()), 0
    write = kind.write_bytes

    def write_bytes(path, data):
        nonlocal count
        is_new = path.name.endswith(("-cache", "-atime")) and not path.exists()
        stop = find_stop("cache") if is_new else None
        count += stop is not None
        if stop is None or count <= stop.number:
            return write(path, data)
        length = round(len(data) * stop.share)
        with open(path, "wb") as file:
            file.write(data[:length])
            file.flush()
            stop_here(f"{path.name[:9]}...{path.name[-6:]}, byte {length}")
            file.write(data[length:])
        return len(data)

    kind.write_bytes = write_bytes


if __name__ == "__main__":
    if TASK == 0:
        stop_in_saves()
        stop_in_cache()
    restarted.main()
