"""Checks the fields of a RunConfig."""

from typing import Any

from keras_strategies.estimator.config.run_cluster import EVALUATOR, SERVER
from keras_strategies.estimator.seam import (
    Strategy,
    check_number,
    check_type,
    shorten,
)

_NUMBERS: dict[str, dict[str, Any]] = {
    "save_summary_steps": {"minimum": 0},
    "save_checkpoints_steps": {"minimum": 0},
    "keep_checkpoint_max": {"minimum": 0},
    "log_step_count_steps": {"minimum": 1},
    "save_checkpoints_secs": {"minimum": 0, "is_whole": False},
    "keep_checkpoint_every_n_hours": {"above": 0, "is_whole": False},
    "session_creation_timeout_secs": {"above": 0, "is_whole": False},
    "tf_random_seed": {},
    "experimental_max_worker_delay_secs": {},
}
# Fields about sessions and graphs, which do not exist in JAX, with the only
# valid value of each.
_WITHOUT_MEANING = {
    "session_config": None,
    "device_fn": None,
    "protocol": None,
    "experimental_distribute": None,
    "checkpoint_save_graph_def": True,
}


def check_fields(config: Any) -> None:
    """Raises ValueError or TypeError for the first field that is invalid."""
    directory, fix = config.model_dir, "Pass a str or a `pathlib.Path`."
    check_type("`model_dir`", directory, str | None, "a path", fix)
    if directory == "":
        raise ValueError(
            "model_dir should be non-empty. Received: ''. Pass a path, or "
            "None for a temporary directory."
        )
    for name, bounds in _NUMBERS.items():
        fix = "Pass a valid number, or None."
        check_number(f"`{name}`", getattr(config, name), fix, **bounds)
    for name, default in _WITHOUT_MEANING.items():
        check_unsupported(name, getattr(config, name), default)
    for name in ("train_distribute", "eval_distribute"):
        fix = "Pass, for example, `ks.MirroredStrategy()`."
        strategy, what = getattr(config, name), "a strategy of keras_strategies"
        check_type(f"`{name}`", strategy, Strategy | None, what, fix)


def check_unsupported(name: str, value: object, default: object = None) -> None:
    """Raises ValueError unless an argument of TensorFlow has its default."""
    if value is not default:
        raise ValueError(
            f"`{name}` is not supported on JAX. Received: {name}="
            f"{shorten(value)}. Omit it; docs/estimator.md lists what to use "
            "instead."
        )


def check_trains(config: Any, num_processes: int) -> None:
    """Raises ValueError unless this process can train.

    Args:
      config: The RunConfig.
      num_processes: The number of processes that the training strategy spans.
    """
    if config.task_type in (SERVER, EVALUATOR):
        raise ValueError(
            f"Task type {config.task_type!r} does not train. Call "
            "`ks.estimator.train_and_evaluate`, which trains or evaluates "
            "according to the task type. Parameter servers are not supported."
        )
    if config.num_worker_replicas > 1 and num_processes == 1:
        raise ValueError(
            f"The {config.num_worker_replicas} training processes of TF_CONFIG "
            "must train together. Received: train_distribute="
            f"{shorten(config.train_distribute)}, which uses one process. Pass "
            "`train_distribute=ks.MultiWorkerMirroredStrategy()`."
        )
