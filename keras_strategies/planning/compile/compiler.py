"""A compiler of programs side by side, which keeps their figures.

XLA compiles without Python's lock, so that threads do it at once. Figures are
kept in files, by the program's text, what it is compiled for and by what.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from keras_strategies._core.compiled import Figures, without_jax_cache
from keras_strategies._core.jaxprs.hlo_text import COLLECTIVES
from keras_strategies._types import Tree
from keras_strategies.cluster.exchange.message_forms import Either, fault_of
from keras_strategies.cluster.untrusted import load_json, open_regular

_FOLDER = "keras_strategies"
_MOST_JOBS = 8
_BYTES_OF_JOB = 3e9
"""What a large program takes to compile."""
_VERSION = 1
_MOST_BYTES = 10_000
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Variables of the environment that compilers read."""

LOW_EFFORT = {"exec_time_optimization_effort": -1.0}
"""XLA's option by which large programs for TPUs compile in minutes."""
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_EXHAUSTED = "RESOURCE_EXHAUSTED"
_NEEDED = re.compile(r"temporaries \((?P<size>\d+(\.\d+)?)(?P<unit>[KMGT]?)")


class DoesNotFit(Exception):  # noqa: N818
    """The compiler says that a program needs too much memory.

    Attributes:
      needed: Bytes that it needs, as far as the compiler says.
    """

    def __init__(self, message: str, needed: float | None) -> None:
        super().__init__(message)
        self.needed = needed


Outcome = Figures | DoesNotFit


class Compiler:
    """Compiles lowered programs in threads.

    Args:
      num_threads: How many at once; None: as many as the machine has cores
        and memory for.
      folder: Where figures are kept; None: nowhere.
    """

    def __init__(
        self,
        *,
        num_threads: int | None = None,
        folder: pathlib.Path | None = None,
    ) -> None:
        number = num_threads or num_jobs()
        self._pool = concurrent.futures.ThreadPoolExecutor(number)
        self._stack = contextlib.ExitStack()
        self._folder = folder
        self._flags = tuple(map(os.environ.get, _FLAGS))

    def submit(
        self,
        lowered: jax.stages.Lowered,
        devices: Sequence[Any],
        *,
        is_full: bool,
    ) -> "concurrent.futures.Future[Outcome]":
        """Begins to compile.

        Args:
          lowered: A lowered program.
          devices: Those it is for, in the order of its mesh.
          is_full: Whether at full effort, as it would be run.

        Returns:
          What becomes its figures, or `DoesNotFit`.
        """
        is_tpu = devices[0].platform == "tpu"
        options = None if is_full or not is_tpu else dict(LOW_EFFORT)
        path = None
        if self._folder is not None:
            key = _key(lowered, devices, options, self._flags)
            path = self._folder / f"{key}.json"
            kept = _read(path)
            if kept is not None:
                done: Any = concurrent.futures.Future()
                done.set_result(kept)
                return done
        return self._pool.submit(_compiled, lowered, options, path)

    def __enter__(self) -> "Compiler":
        """Keeps programs out of JAX's own cache until the exit."""
        self._stack.enter_context(without_jax_cache())
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self.close()

    def close(self) -> None:
        """Lets running compilations end, and begins no other."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def as_misfit(error: jax.errors.JaxRuntimeError) -> DoesNotFit | None:
    """What the compiler's error says of a program that is too large.

    Returns:
      None: it is another error.
    """
    # Of its status JAX has the name alone, as the message's first word.
    message = str(error)
    if not message.startswith(_EXHAUSTED):
        return None
    found = _NEEDED.search(message)
    needed = None
    if found is not None:
        needed = float(found["size"]) * _UNITS[found["unit"]]
    return DoesNotFit(message.splitlines()[0], needed)


@functools.cache
def compilers() -> tuple[str, ...]:
    """The versions that a program's figures depend on."""
    import importlib.metadata as metadata

    found = []
    for name in ("jax", "jaxlib", "libtpu"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)


def cache_folder() -> pathlib.Path | None:
    """Where figures are kept, of this user; None: who has no home."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return pathlib.Path(base).expanduser() / _FOLDER / "plans"
    except RuntimeError:
        return None


def num_jobs(most: int = _MOST_JOBS) -> int:
    """Returns how many compilations the machine's cores and memory allow."""
    try:
        cores = len(os.sched_getaffinity(0))
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Not on macOS.
        cores, free = 2, 2 * _BYTES_OF_JOB
    return max(min(cores, int(free // _BYTES_OF_JOB), most, _MOST_JOBS), 1)


def _compiled(
    lowered: jax.stages.Lowered,
    options: dict[str, Any] | None,
    path: pathlib.Path | None,
) -> Outcome:
    start = time.perf_counter()
    try:
        executable = lowered.compile(compiler_options=options)
        outcome: Outcome = Figures.measure(
            executable, time.perf_counter() - start
        )
    except jax.errors.JaxRuntimeError as error:
        misfit = as_misfit(error)
        if misfit is None:
            raise
        outcome = misfit
    if path is not None:
        _write(path, outcome)
    return outcome


def _key(
    lowered: jax.stages.Lowered,
    devices: Sequence[Any],
    options: Mapping[str, Any] | None,
    flags: tuple[str | None, ...],
) -> str:
    """What a program's figures depend on, as a number in hex."""
    kind = devices[0].device_kind
    places = [(d.id, getattr(d, "coords", None)) for d in devices]
    facts = [kind, places, options, flags, compilers(), _VERSION]
    digest = hashlib.sha256(repr(facts).encode())
    digest.update(lowered.as_text().encode())
    return digest.hexdigest()


def _write(path: pathlib.Path, outcome: Outcome) -> None:
    if isinstance(outcome, DoesNotFit):
        kept: Any = {"misfit": str(outcome), "needed": outcome.needed}
    else:
        kept = dataclasses.asdict(outcome)
    # A full disk or a read-only home costs time alone.
    with contextlib.suppress(OSError):
        _make_private(path.parent)
        handle, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(kept, file)
            os.replace(name, path)
        except OSError:
            os.unlink(name)


def _make_private(folder: pathlib.Path) -> None:
    """Makes a folder, and those above it, for their owner alone."""
    if not folder.exists():
        _make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def _read(path: pathlib.Path) -> Outcome | None:
    """What was kept; None: nothing, or a file that is not ours."""
    try:
        with open_regular(path) as file:
            raw = file.read(_MOST_BYTES + 1)
        return _parsed(load_json(raw, max_characters=_MOST_BYTES))
    except (OSError, ValueError):
        return None


def _parsed(kept: Tree) -> Outcome | None:
    """Returns what a file's JSON says; None: it is not of our form."""
    for form in (_MISFIT, _FIGURES):
        if fault_of(kept, form) is None and set(kept) == set(form):
            if form is _MISFIT:
                return DoesNotFit(kept["misfit"], kept["needed"])
            return Figures(**kept)
    return None


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Whole numbers may be too large for a float.
    return is_number and 0 <= value <= sys.float_info.max


def _is_by_collective(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and set(value) <= set(COLLECTIVES)
        and all(map(_is_number, value.values()))
    )


_MISFIT = {"misfit": str, "needed": Either((None, _is_number))}
_FIGURES = {
    field.name: _is_number for field in dataclasses.fields(Figures)
} | dict.fromkeys(("counts", "sent"), _is_by_collective)
"""The forms of what is kept, in `fault_of`'s words."""
