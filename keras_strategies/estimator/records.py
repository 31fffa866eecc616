"""Records results of an Estimator's evaluations, and scalars for TensorBoard.

The results are stored in a file next to the evaluation's event files, as one
JSON object per line. Early stopping and `BestExporter` read this file, so that
they do not have to parse event files.
"""

import functools
import importlib.util
import json
import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any, BinaryIO

from keras_strategies.estimator.config.run_config import RunConfig
from keras_strategies.estimator.seam import (
    Scalars,
    has_form,
    is_count,
    load_form,
    open_regular,
)

FILE = "evaluations.jsonl"
"""The name of the file with the results in an evaluation's directory."""

GLOBAL_STEP = "global_step"
"""The name of the global step in the results of an evaluation."""

_MAX_LINE = 1 << 20
_MAX_BYTES = 64 << 20
_logger = logging.getLogger(__name__)


def append(directory: str, step: int, metrics: Mapping[str, Any]) -> None:
    """Appends the results of one evaluation to the directory's file.

    Args:
      directory: The evaluation's directory, created if needed.
      step: The global step of the evaluated checkpoint.
      metrics: The results by name. Values that are not numbers are left out.
    """
    numbers = {
        name: float(value)
        for name, value in metrics.items()
        if _is_number(value)
    }
    line = json.dumps({GLOBAL_STEP: int(step), "metrics": numbers})
    path = pathlib.Path(directory, FILE)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        # The last line is incomplete if a process was killed while writing it.
        is_torn = file.tell() > 0 and _read_last_byte(file) != b"\n"
        file.write((b"\n" if is_torn else b"") + line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(directory: str) -> dict[int, dict[str, float]]:
    """Returns the results of an evaluation's directory, by global step.

    The steps are in ascending order. If a step was evaluated more than once,
    the dict contains the latest value of each result. Lines that cannot be
    parsed are skipped, and a warning is logged.

    Args:
      directory: The evaluation's directory, which may not exist yet.
    """
    results: dict[int, dict[str, float]] = {}
    try:
        with open_regular(pathlib.Path(directory, FILE)) as file:
            lines = file.read(_MAX_BYTES).splitlines()
    except FileNotFoundError:
        return results
    for number, line in enumerate(lines, 1):
        entry = _parse_line(line)
        if entry is None:
            _logger.warning(
                "Line %d of %s is skipped, because it is not a valid result of "
                "an evaluation.",
                number,
                os.path.join(directory, FILE),
            )
            continue
        step, metrics = entry
        results.setdefault(step, {}).update(metrics)
    return dict(sorted(results.items()))


def make_scalars(
    config: RunConfig, step: int, eval_name: str | None = None
) -> list[Any]:
    """Creates the callbacks that write scalars to event files and log them.

    Args:
      config: The RunConfig.
      step: The global step at the start of the run.
      eval_name: The evaluation's name; "" for an evaluation without a name,
        None for training.
    """
    is_training = eval_name is None
    writes = config.save_summary_steps or 0
    logs = (config.log_step_count_steps or 0) if is_training else 0
    has_files = bool(writes) and _can_write()
    if not (writes or logs) or not (is_training or has_files):
        return []
    directory = config.model_dir or ""
    return [
        Scalars(
            directory if has_files else None,
            every_n_steps=writes if is_training else 0,
            log_every_n_steps=logs,
            eval_name=eval_name or None,
            initial_step=step,
        )
    ]


# Without `cache`, `train_and_evaluate` would repeat the warning for each
# evaluation.
@functools.cache
def _can_write() -> bool:
    can_write = importlib.util.find_spec("tensorboardX") is not None
    if not can_write:
        _logger.warning(
            "No event files are written, because tensorboardX is not "
            "installed. Run `pip install tensorboardX`, or set "
            "`save_summary_steps=None`."
        )
    return can_write


def _is_number(value: Any) -> bool:
    if getattr(value, "ndim", 0):
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str | bytes)


def _read_last_byte(file: BinaryIO) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)


def _parse_line(line: bytes) -> tuple[int, dict[str, float]] | None:
    try:
        entry = load_form(line, _ENTRY, max_characters=_MAX_LINE, has_nan=True)
        metrics = {n: float(v) for n, v in entry["metrics"].items()}
    except (ValueError, OverflowError):
        return None
    return entry[GLOBAL_STEP], metrics


def _are_numbers(value: object) -> bool:
    is_dict = isinstance(value, dict)
    return is_dict and has_form([*value.values()], [float])


_ENTRY = {GLOBAL_STEP: is_count, "metrics": _are_numbers}
