"""The records of an Estimator's runs: results of evaluations, event files.

Results are a file of one JSON object a line beside the event files of an
evaluation, so that early stopping and `BestExporter` need no reader of these.
"""

import functools
import importlib.util
import json
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from keras_strategies.cluster.exchange.message_forms import (
    fault_of,
    is_count,
    load_form,
)
from keras_strategies.cluster.untrusted import open_regular
from keras_strategies.estimator.config.run_config import RunConfig

FILE = "evaluations.jsonl"
"""The name of the file in an evaluation's folder."""

GLOBAL_STEP = "global_step"
"""The result that each evaluation has beside its metrics."""

_MAX_LINE = 1 << 20
_logger = logging.getLogger(__name__)


def append(directory: str, step: int, metrics: Mapping[str, Any]) -> None:
    """Notes the result of one evaluation.

    Args:
      directory: The evaluation's folder; made if it is not there.
      step: The global step of the checkpoint that was evaluated.
      metrics: Numbers by name; what is none is left out.
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
        # A process that was killed may have left half a line.
        is_torn = file.tell() > 0 and _last_byte(file) != b"\n"
        file.write((b"\n" if is_torn else b"") + line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(directory: str) -> dict[int, dict[str, float]]:
    """The results of all evaluations of a folder by global step, in order.

    Of a step that was evaluated twice, the later values count. Lines that
    cannot be read are left out, with a line in the log.

    Args:
      directory: The evaluation's folder, which need not be there.
    """
    found: dict[int, dict[str, float]] = {}
    for number, line in enumerate(_lines(pathlib.Path(directory, FILE)), 1):
        entry = _parsed(line)
        if entry is None:
            _logger.warning(
                "Line %d of %s is no evaluation; it is left out.",
                number,
                os.path.join(directory, FILE),
            )
            continue
        step, metrics = entry
        found.setdefault(step, {}).update(metrics)
    return dict(sorted(found.items()))


def renamed(
    results: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, Any]:
    """Returns results under new names.

    Raises:
      ValueError: there is no result of a name.
    """
    for name in names:
        if name not in results:
            raise ValueError(
                "`metric_names_map` names results of evaluations. Received: "
                f"{name!r}; there are {sorted(results)}. Correct it."
            )
    return {names.get(name, name): value for name, value in results.items()}


def scalars(
    config: RunConfig, step: int, eval_name: str | None = None
) -> list[Any]:
    """Returns the callbacks that write and log the scalars of a run.

    Args:
      config: The RunConfig.
      step: The global step that the run begins at.
      eval_name: An evaluation's name, "" for one without; None for training.
    """
    is_training = eval_name is None
    writes = config.save_summary_steps or 0
    logs = (config.log_step_count_steps or 0) if is_training else 0
    has_files = bool(writes) and _can_write()
    if not (writes or logs) or not (is_training or has_files):
        return []
    # Importing it imports Keras.
    from keras_strategies.callbacks.scalars import Scalars

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


def _can_write() -> bool:
    if importlib.util.find_spec("tensorboardX") is not None:
        return True
    _warn_once()
    return False


@functools.cache
def _warn_once() -> None:
    # `train_and_evaluate` trains and evaluates in turn.
    _logger.warning(
        "No event files are written: tensorboardX is not installed. Run "
        "`pip install tensorboardX`, or set `save_summary_steps=None`."
    )


def _lines(path: pathlib.Path) -> Iterator[bytes]:
    """The lines of a file, if it is there; of a long one the beginning."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        while line := file.readline(_MAX_LINE + 1):
            yield line
            while len(line) > _MAX_LINE and not line.endswith(b"\n"):
                line = file.readline(_MAX_LINE + 1)


def _is_number(value: Any) -> bool:
    if getattr(value, "ndim", 0):
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str | bytes)


def _last_byte(file: BinaryIO) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)


def _parsed(line: bytes) -> tuple[int, dict[str, float]] | None:
    try:
        entry = load_form(line, _ENTRY, max_characters=_MAX_LINE, has_nan=True)
        metrics = {n: float(v) for n, v in entry["metrics"].items()}
    except (ValueError, OverflowError):
        return None
    return entry[GLOBAL_STEP], metrics


def _are_numbers(value: object) -> bool:
    is_dict = isinstance(value, dict)
    return is_dict and fault_of([*value.values()], [float]) is None


_ENTRY = {GLOBAL_STEP: is_count, "metrics": _are_numbers}
