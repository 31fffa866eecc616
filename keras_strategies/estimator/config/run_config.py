"""RunConfig: the configuration of an Estimator's runs."""

import copy
import dataclasses
import os
from typing import Any

from keras_strategies.estimator.config.run_checks import check_fields
from keras_strategies.estimator.config.run_cluster import parse_cluster
from keras_strategies.estimator.seam import (
    VARIABLE,
    ClusterSpec,
    shorten,
)

DEFAULT_SAVE_SECONDS = 600
"""Default number of seconds between checkpoints."""


# The default of arguments that differs from None, which may be given.
_USE_DEFAULT: Any = object()


def _from_cluster() -> Any:
    """Returns a field that the constructor sets from TF_CONFIG."""
    return dataclasses.field(init=False, repr=False, hash=False)


_STEPS, _SECS = "save_checkpoints_steps", "save_checkpoints_secs"


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The configuration of an `Estimator`'s runs, as in TensorFlow.

        config = ks.estimator.RunConfig(
            model_dir="models/digits",
            save_checkpoints_steps=500,
            train_distribute=ks.MirroredStrategy(),
        )
        config = config.replace(keep_checkpoint_max=20)

    A RunConfig is immutable; `replace` returns a modified copy. The constructor
    reads the environment variable TF_CONFIG once, and sets the attributes such
    as `cluster_spec` and `task_type` from it.

    Differs from tf: `session_config`, `device_fn`, `protocol`,
    `experimental_distribute` and `checkpoint_save_graph_def=False` are not
    supported on JAX, and raise an error (docs/parity.md).

    Args:
      model_dir: Directory for checkpoints and event files. None to use
        TF_CONFIG's "model_dir", the Estimator's `model_dir`, or a temporary
        directory.
      tf_random_seed: Seed for initial weights, dropout and shuffling; None for
        different random numbers in each run.
      save_summary_steps: Number of training steps between two writes of scalars
        to the event files; 0 or None to write none.
      save_checkpoints_steps: Number of training steps between checkpoints.
      save_checkpoints_secs: Number of seconds between checkpoints. It defaults
        to 600 if `save_checkpoints_steps` is not given either. If None or 0 is
        explicitly given and the other argument is not set, no checkpoint is
        saved during training.
      session_config: Must be None.
      keep_checkpoint_max: Number of newest checkpoints to keep; None or 0 to
        keep all.
      keep_checkpoint_every_n_hours: Number of hours between checkpoints that
        are kept in addition to the newest ones; None to keep only the newest.
      log_step_count_steps: Number of training steps between log lines with
        loss and speed; None to log none.
      train_distribute: The `ks` strategy for training; None to train on one
        device.
      device_fn: Must be None.
      protocol: Must be None.
      eval_distribute: The `ks` strategy for evaluation and prediction; None to
        use one device.
      experimental_distribute: Must be None.
      experimental_max_worker_delay_secs: An integer or None. It has no effect,
        because workers start without a delay.
      session_creation_timeout_secs: Number of seconds that an evaluator waits
        for the first checkpoint.
      checkpoint_save_graph_def: Must be True.

    Attributes:
      cluster_spec: The training cluster; empty for a local run and for an
        evaluator, which is not part of the training cluster.
      task_type: This process's task: "chief", "worker", "ps" or "evaluator".
      task_id: The index of this process among the processes of its type.
      is_chief: Whether this process is the training cluster's chief.
      num_ps_replicas: The number of parameter servers in the cluster.
      num_worker_replicas: The number of training processes, including the
        chief; 0 for an evaluator.

    Raises:
      ValueError: if both `save_checkpoints_steps` and `save_checkpoints_secs`
        are given, a number is too small, an argument is given that is not
        supported on JAX, `model_dir` differs from TF_CONFIG's "model_dir", or
        TF_CONFIG is invalid.
      TypeError: if a value has the wrong type.

    References:
      https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/RunConfig
    """

    model_dir: str | os.PathLike[str] | None = None
    tf_random_seed: int | None = None
    save_summary_steps: int | None = 100
    save_checkpoints_steps: int | None = _USE_DEFAULT
    save_checkpoints_secs: float | None = _USE_DEFAULT
    session_config: None = None
    keep_checkpoint_max: int | None = 5
    keep_checkpoint_every_n_hours: float | None = 10000
    log_step_count_steps: int | None = 100
    train_distribute: Any = None
    device_fn: None = None
    protocol: None = None
    eval_distribute: Any = None
    experimental_distribute: None = None
    experimental_max_worker_delay_secs: int | None = None
    session_creation_timeout_secs: float | None = 7200
    checkpoint_save_graph_def: bool = True
    cluster_spec: ClusterSpec = _from_cluster()
    task_type: str = _from_cluster()
    task_id: int = _from_cluster()
    is_chief: bool = _from_cluster()
    num_ps_replicas: int = _from_cluster()
    num_worker_replicas: int = _from_cluster()

    def __post_init__(self) -> None:
        given = {
            name: getattr(self, name)
            for name in (_STEPS, _SECS)
            if getattr(self, name) is not _USE_DEFAULT
        }
        rule = _switch_save_rule(given or {_SECS: DEFAULT_SAVE_SECONDS})
        self._set(**{_STEPS: None, _SECS: None} | rule)
        cluster = parse_cluster(
            os.environ.get(VARIABLE, ""),
            needs_chief=self.train_distribute is None,
        )
        directory = _choose_model_dir(
            _convert_path(self.model_dir), cluster.pop("model_dir")
        )
        self._set(**cluster, model_dir=directory)
        check_fields(self)

    def replace(self, **changes: Any) -> "RunConfig":
        """Returns a copy in which some fields have new values.

        The copy has the same cluster, because TF_CONFIG is not read again.
        Setting `save_checkpoints_steps` clears `save_checkpoints_secs`, and
        vice versa.

        Args:
          **changes: The new values, with the names of their fields.

        Raises:
          ValueError: if a name is not a field, the field is set by TF_CONFIG,
            both `save_checkpoints_steps` and `save_checkpoints_secs` are given,
            or the constructor would raise a ValueError for the value.
          TypeError: if a value has the wrong type.

        Example:
          >>> config = ks.estimator.RunConfig(save_checkpoints_secs=600)
          >>> config = config.replace(save_checkpoints_steps=50)
          >>> config.save_checkpoints_steps, config.save_checkpoints_secs
          (50, None)
        """
        for name in changes:
            if name not in _FIELDS:
                raise ValueError(
                    f"Replacing {name} is not supported. Received: {name}="
                    f"{shorten(changes[name])}. Replace {', '.join(_FIELDS)}, "
                    "or change TF_CONFIG and create a new `RunConfig`."
                )
        if "model_dir" in changes:
            changes["model_dir"] = _convert_path(changes["model_dir"])
        changes = _switch_save_rule(changes)
        config = copy.copy(self)
        config._set(**changes)
        check_fields(config)
        return config

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


_FIELDS = tuple(
    field.name for field in dataclasses.fields(RunConfig) if field.init
)


def _switch_save_rule(changes: dict[str, Any]) -> dict[str, Any]:
    """Returns changed fields; a new save interval clears the other one.

    Raises:
      ValueError: if both are given.
    """
    steps, secs = changes.get(_STEPS), changes.get(_SECS)
    if steps is not None and secs is not None:
        raise ValueError(
            "`save_checkpoints_steps` and `save_checkpoints_secs` cannot both "
            f"be set. Received: save_checkpoints_steps={shorten(steps)}, "
            f"save_checkpoints_secs={shorten(secs)}. Pass only one of the two."
        )
    if steps is not None:
        return changes | {_SECS: None}
    if secs is not None:
        return changes | {_STEPS: None}
    return changes


def _convert_path(path: object) -> object:
    """Converts a path to a str; leaves other objects for `check_fields`."""
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _choose_model_dir(directory: object, cluster_dir: str | None) -> object:
    if cluster_dir and directory and cluster_dir != directory:
        raise ValueError(
            "`model_dir` of RunConfig, if set, must have the same value as "
            f"model_dir in TF_CONFIG. Received: {shorten(directory)} and "
            f"{shorten(cluster_dir)}. Omit one of the two."
        )
    # "" is kept, so that `check_fields` raises an error for it.
    return cluster_dir if directory is None else directory
