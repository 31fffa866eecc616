"""Compiles programs in parallel, and caches the costs that XLA reports.

The costs of a program are its bytes of memory, operations and collectives. XLA
releases Python's global lock while it compiles, so threads compile in parallel.
The costs are cached in files. A file's name is a hash of the program's text,
its devices, the compiler options and the compiler's version.
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

from keras_strategies._types import Tree
from keras_strategies.planning.program.costs import BY_KIND, BY_SOURCE, Costs
from keras_strategies.planning.seam import (
    chips,
    compiled,
    complete_options,
    describe_target,
    hlo,
    message_forms,
    read_flags,
    untrusted,
)

_DIRECTORY = "keras_strategies"
_MAX_JOBS = 8
_BYTES_OF_JOB = 3e9
"""Bytes of host memory needed to compile a large program."""
_VERSION = 8
_MAX_BYTES = 10_000
_PACKAGES = (
    *("jax", "jaxlib", "libtpu"),
    *("jax-cuda12-pjrt", "jax-cuda13-pjrt"),
)
_TPU_FLAGS = "LIBTPU_INIT_ARGS"

LOW_EFFORT = {"exec_time_optimization_effort": -1.0}
"""XLA options for low effort, with which large TPU programs compile faster."""
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_EXHAUSTED = "RESOURCE_EXHAUSTED"
_CALLING = "Exception encountered when calling"
_COLOR = re.compile(r"\x1b\[[\d;]*m")
_NEEDED = re.compile(r"temporaries \((?P<size>\d+(\.\d+)?)(?P<unit>[KMGT]?)")


class DoesNotFit(Exception):  # noqa: N818
    """The result of compiling a program that needs too much memory.

    It is created from the compiler's out-of-memory error.

    Attributes:
      needed: The bytes that the program needs, or None if the error does not
        contain the number.
    """

    def __init__(self, message: str, needed: float | None) -> None:
        super().__init__(message)
        self.needed = needed


Outcome = Costs | DoesNotFit


class Compiler:
    """Compiles lowered programs in threads.

    Args:
      num_threads: The number of threads. None to choose it from the machine's
        cores and memory.
      directory: The directory in which programs' costs are cached; None for no
        cache.
    """

    def __init__(
        self,
        *,
        num_threads: int | None = None,
        directory: pathlib.Path | None = None,
    ) -> None:
        number = num_threads or count_jobs()
        self._pool = concurrent.futures.ThreadPoolExecutor(number)
        self._directory = directory
        self._flags = read_flags(os.environ), os.environ.get(_TPU_FLAGS)

    def submit(
        self,
        lowered: jax.stages.Lowered,
        devices: Sequence[Any],
        *,
        is_full: bool,
    ) -> "concurrent.futures.Future[Outcome]":
        """Starts compiling a program, unless its costs are cached.

        Args:
          lowered: A lowered program.
          devices: The program's devices, in the order of its mesh.
          is_full: Whether to compile at full effort, as for training.

        Returns:
          A future of the program's costs, or of `DoesNotFit` if the program
          needs too much memory.
        """
        is_tpu = devices[0].platform == "tpu"
        options = None if is_full or not is_tpu else dict(LOW_EFFORT)
        path = None
        if self._directory is not None:
            key = _make_key(lowered, devices, options, self._flags)
            path = self._directory / f"{key}.json"
            kept = _read(path)
            if kept is not None:
                done: Any = concurrent.futures.Future()
                done.set_result(kept)
                return done
        return self._pool.submit(_compile, lowered, devices, options, path)

    def close(self) -> None:
        """Cancels compilations that have not started, without waiting."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def strip_colors(text: str) -> str:
    """Returns a text without the terminal's colors, which Keras writes."""
    return _COLOR.sub("", text)


def summarize_error(error: Exception) -> str:
    """Returns the first line of an error's message as a sentence.

    A message of Keras begins with the layer that was called; the line after it
    has the cause, and is returned, too.
    """
    lines = [line.strip() for line in strip_colors(str(error)).split("\n")]
    lines = list(filter(None, lines)) or [type(error).__name__]
    is_of_keras = lines[0].startswith(_CALLING) and len(lines) > 1
    text = " ".join(lines[: 1 + is_of_keras])
    return text if text.endswith(".") else f"{text}."


def parse_misfit(error: jax.errors.JaxRuntimeError) -> DoesNotFit | None:
    """Parses an out-of-memory error of the compiler.

    Returns:
      The parsed error, or None if it is not an out-of-memory error.
    """
    # JAX exposes the error's status only as the message's first word.
    message = str(error)
    if not message.startswith(_EXHAUSTED):
        return None
    match = _NEEDED.search(message)
    needed = None
    if match is not None:
        needed = float(match["size"]) * _UNITS[match["unit"]]
    return DoesNotFit(message.splitlines()[0], needed)


@functools.cache
def list_compilers() -> tuple[str, ...]:
    """Returns the versions of the packages that affect compilation."""
    import importlib.metadata as metadata

    versions = []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return tuple(versions)


def find_cache_directory() -> pathlib.Path | None:
    """Returns the cache directory, or None if the user has no home."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return pathlib.Path(base).expanduser() / _DIRECTORY / "plans"
    except RuntimeError:
        return None


def count_jobs(maximum: int = _MAX_JOBS) -> int:
    """Returns how many compilations to run in parallel.

    The number depends on the machine's cores and free memory.
    """
    try:
        cores = len(os.sched_getaffinity(0))
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # For example, on macOS.
        cores, free = 2, 2 * _BYTES_OF_JOB
    return max(min(cores, int(free // _BYTES_OF_JOB), maximum, _MAX_JOBS), 1)


def _compile(
    lowered: jax.stages.Lowered,
    devices: Sequence[Any],
    options: dict[str, Any] | None,
    path: pathlib.Path | None,
) -> Outcome:
    start = time.perf_counter()
    try:
        with compiled.without_jax_cache():
            executable = lowered.compile(
                compiler_options=complete_options(options, devices)
            )
        seconds = time.perf_counter() - start
        outcome: Outcome = Costs.measure(
            executable, seconds, chips.find_chip(devices[0]), devices
        )
    except jax.errors.JaxRuntimeError as error:
        misfit = parse_misfit(error)
        if misfit is None:
            raise
        outcome = misfit
    is_unread = isinstance(outcome, Costs) and bool(outcome.unread)
    if path is not None and not is_unread:
        _write(path, outcome)
    return outcome


def _make_key(
    lowered: jax.stages.Lowered,
    devices: Sequence[Any],
    options: Mapping[str, Any] | None,
    flags: tuple[str | None, ...],
) -> str:
    """Returns a hex digest of everything that a program's costs depend on."""
    kind = devices[0].device_kind, describe_target(devices[0])
    places = [
        (d.id, d.process_index, getattr(d, "coords", None)) for d in devices
    ]
    facts = [kind, places, options, flags, list_compilers(), _VERSION]
    digest = hashlib.sha256(repr(facts).encode())
    digest.update(lowered.as_text().encode())
    return digest.hexdigest()


def _write(path: pathlib.Path, outcome: Outcome) -> None:
    if isinstance(outcome, DoesNotFit):
        kept: Any = {"misfit": str(outcome), "needed": outcome.needed}
    else:
        kept = dataclasses.asdict(outcome)
    # Errors such as a full disk or a read-only home are ignored. In this case
    # nothing is cached, and the next plan takes longer.
    with contextlib.suppress(OSError):
        _make_private(path.parent)
        handle, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(kept, file)
            os.replace(name, path)
        except OSError:
            os.unlink(name)


def _make_private(directory: pathlib.Path) -> None:
    """Creates a directory and its parents, readable only by the user."""
    if not directory.exists():
        _make_private(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


def _read(path: pathlib.Path) -> Outcome | None:
    """Returns the result in a cache file; None if it is absent or invalid."""
    try:
        with untrusted.open_regular(path) as file:
            raw = file.read(_MAX_BYTES + 1)
        return _parse(untrusted.load_json(raw, max_characters=_MAX_BYTES))
    except (OSError, ValueError):
        return None


def _parse(kept: Tree) -> Outcome | None:
    """Converts a cache file's JSON to a result, or None if it is not valid."""
    for form in (_MISFIT, _COSTS):
        if message_forms.find_problem(kept, form) is None and set(kept) == set(
            form
        ):
            if form is _MISFIT:
                return DoesNotFit(kept["misfit"], kept["needed"])
            return Costs(**kept)
    return None


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Integers in JSON may be too large for a float.
    return is_number and 0 <= value <= sys.float_info.max


def _is_by_collective(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and set(value) <= set(hlo.COLLECTIVES)
        and all(map(_is_number, value.values()))
    )


def _is_by_source(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_is_number, value.values()))


_MISFIT = {"misfit": str, "needed": message_forms.Either((None, _is_number))}
_COSTS = (
    {field.name: _is_number for field in dataclasses.fields(Costs)}
    | dict.fromkeys(BY_KIND, _is_by_collective)
    | dict.fromkeys(BY_SOURCE, _is_by_source)
    | {"unread": str}
)
"""The expected fields of a program's costs in a cache file."""
