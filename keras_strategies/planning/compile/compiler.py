"""Compiles programs in parallel, and returns the costs that XLA reports.

The costs of a program are its bytes of memory, operations and collectives. XLA
releases Python's global lock while it compiles, so threads compile in parallel.
"""

import concurrent.futures
import os
import re
import time
from collections.abc import Sequence
from typing import Any

import jax

from keras_strategies.planning.program.costs import Costs
from keras_strategies.planning.seam import (
    chips,
    compiled,
    complete_options,
)

_MAX_JOBS = 8
_BYTES_OF_JOB = 3e9
"""Bytes of host memory needed to compile a large program."""
LOW_EFFORT = {"exec_time_optimization_effort": -1.0}
"""XLA options for low effort, with which large TPU programs compile faster."""
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_EXHAUSTED = "RESOURCE_EXHAUSTED"
_MAX_LETTERS = 300
_COLOR = re.compile(r"\x1b\[[\d;]*m")
_NEEDED = re.compile(r"temporaries \((?P<size>\d+(\.\d+)?)(?P<unit>[KMGT]?)")


class DoesNotFit(Exception):  # noqa: N818
    """The result of compiling a program that needs too much memory.

    It is created from the compiler's out-of-memory error.

    Attributes:
      bytes_in_all: The bytes that the program needs on a device, or None if
        the error does not contain the number.
    """

    def __init__(self, message: str, bytes_in_all: float | None) -> None:
        super().__init__(message)
        self.bytes_in_all = bytes_in_all


Outcome = Costs | DoesNotFit


class Compiler:
    """Compiles lowered programs in threads.

    Args:
      num_threads: The number of threads. None to choose it from the machine's
        cores and memory.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        number = num_threads or count_jobs()
        self._pool = concurrent.futures.ThreadPoolExecutor(number)

    def submit(
        self,
        lowered: jax.stages.Lowered,
        devices: Sequence[Any],
        *,
        is_full: bool,
    ) -> "concurrent.futures.Future[Outcome]":
        """Starts compiling a program.

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
        return self._pool.submit(_compile, lowered, devices, options)

    def close(self) -> None:
        """Cancels compilations that have not started, without waiting."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def strip_colors(text: str) -> str:
    """Returns a text without the terminal's colors, which Keras writes."""
    return _COLOR.sub("", text)


def summarize_error(error: Exception) -> str:
    """Returns the start of an error's message, in one line."""
    words = strip_colors(str(error)).split() or [type(error).__name__]
    text = " ".join(words)[:_MAX_LETTERS]
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
) -> Outcome:
    start = time.perf_counter()
    try:
        with compiled.without_jax_cache():
            executable = lowered.compile(
                compiler_options=complete_options(options, devices)
            )
        seconds = time.perf_counter() - start
        chip = chips.find_chip(devices[0])
        return Costs.measure(executable, seconds, chip, devices)
    except jax.errors.JaxRuntimeError as error:
        misfit = parse_misfit(error)
        if misfit is None:
            raise
        return misfit
