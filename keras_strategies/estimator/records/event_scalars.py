"""The event files and log lines of an Estimator."""

import functools
import importlib.util
import logging
from typing import Any

from keras_strategies.callbacks.scalars import Scalars
from keras_strategies.estimator.config.run_config import RunConfig

_logger = logging.getLogger(__name__)


def train_scalars(config: RunConfig, step: int) -> list[Any]:
    """The callbacks that write and log what a training comes to.

    Args:
      config: The RunConfig.
      step: The global step that the training begins at.
    """
    writes = config.save_summary_steps or 0
    logs = config.log_step_count_steps or 0
    if not (writes or logs):
        return []
    has_files = bool(writes) and _can_write()
    return [
        Scalars(
            config.model_dir or "" if has_files else None,
            every_n_steps=writes,
            log_every_n_steps=logs,
            initial_step=step,
        )
    ]


def eval_scalars(config: RunConfig, name: str | None, step: int) -> list[Any]:
    """The callbacks that write what an evaluation comes to.

    Args:
      config: The RunConfig.
      name: The evaluation's.
      step: The global step that is evaluated.
    """
    if not config.save_summary_steps or not _can_write():
        return []
    return [
        Scalars(
            config.model_dir or "",
            every_n_steps=0,
            log_every_n_steps=0,
            eval_name=name or None,
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
