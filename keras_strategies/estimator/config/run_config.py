"""RunConfig: what an Estimator saves and logs, how often, and where."""

import copy
import dataclasses
import enum
import os
from typing import Any

from keras_strategies.cluster.addresses import shown
from keras_strategies.cluster.resolvers.tf_config_resolver import VARIABLE
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.estimator.config.run_checks import check_fields
from keras_strategies.estimator.config.run_cluster import RunCluster, cluster_of

DEFAULT_SAVE_SECONDS = 600
"""Seconds between checkpoints where neither steps nor seconds are given."""


class _Default(enum.Enum):
    """Stands for an argument that was not given."""

    NOT_GIVEN = enum.auto()

    def __repr__(self) -> str:
        return "<default>"


_USE_DEFAULT: Any = _Default.NOT_GIVEN

_BOTH = (
    "`save_checkpoints_steps` and `save_checkpoints_secs` cannot be both set. "
    "Received: save_checkpoints_steps={}, save_checkpoints_secs={}. Give one "
    "of the two."
)
_MODEL_DIR = "model_dir"
_STEPS, _SECS = "save_checkpoints_steps", "save_checkpoints_secs"


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The configuration of an `Estimator`'s runs; as tf's.

        config = ks.estimator.RunConfig(
            model_dir="models/digits",
            save_checkpoints_steps=500,
            train_distribute=ks.MirroredStrategy(),
        )
        config = config.replace(keep_checkpoint_max=20)

    Never changes; `replace` makes another one. TF_CONFIG is read once, when
    it is made: `cluster_spec`, `task_type` and the other read-only properties
    come from there.

    Differs from tf: `session_config`, `device_fn`, `protocol` and
    `checkpoint_save_graph_def=False` have no meaning on JAX and are refused
    (docs/parity.md).

    Args:
      model_dir: Where checkpoints and event files go: a path, or None for
        TF_CONFIG's, or the Estimator's, or a temporary one.
      tf_random_seed: What initial weights, dropout and shuffling are drawn
        from; None for other ones in each run.
      save_summary_steps: Training steps between two writes of scalars; 0 or
        None for none.
      save_checkpoints_steps: Training steps between two checkpoints.
      save_checkpoints_secs: Seconds between two checkpoints. 600 if neither
        of the two is given; no checkpoints during training where the given
        ones are None or 0.
      session_config: Refused.
      keep_checkpoint_max: How many of the last checkpoints to keep; None or
        0 for all.
      keep_checkpoint_every_n_hours: Beyond these, one for each so many hours
        is kept; None for none.
      log_step_count_steps: Training steps between two lines in the log with
        loss and speed; None for none.
      train_distribute: A strategy of keras_strategies for training; None for
        one device.
      device_fn: Refused.
      protocol: Refused.
      eval_distribute: The strategy for evaluation and prediction, likewise.
      experimental_distribute: An object with `train_distribute` and
        `eval_distribute`, instead of these.
      experimental_max_worker_delay_secs: The longest that a worker may wait
        before it starts; none waits here.
      session_creation_timeout_secs: How long an evaluator waits for the first
        checkpoint, in seconds.
      checkpoint_save_graph_def: True.

    Raises:
      ValueError: both ways of saving are given, a number is too small, a
        field without a meaning is given, `model_dir` differs from
        TF_CONFIG's, or TF_CONFIG cannot be followed.
      TypeError: a value of another type.

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
    experimental_distribute: Any = None
    experimental_max_worker_delay_secs: int | None = None
    session_creation_timeout_secs: float | None = 7200
    checkpoint_save_graph_def: bool = True
    _cluster: RunCluster = dataclasses.field(init=False, repr=False, hash=False)

    def __post_init__(self) -> None:
        steps, secs = _save_rule(
            self.save_checkpoints_steps, self.save_checkpoints_secs
        )
        self._set(save_checkpoints_steps=steps, save_checkpoints_secs=secs)
        self._take_experimental()
        cluster = cluster_of(
            os.environ.get(VARIABLE, ""),
            needs_chief=self.train_distribute is None,
        )
        directory = _agreed_model_dir(_path_text(self.model_dir), cluster)
        self._set(_cluster=cluster, model_dir=directory)
        check_fields(self)

    def replace(self, **changes: Any) -> "RunConfig":
        """Another one with some fields changed; the cluster stays.

        Giving `save_checkpoints_steps` clears `save_checkpoints_secs`, and
        the other way round.

        Args:
          **changes: New values by field.

        Raises:
          ValueError: a name that is no field or that TF_CONFIG sets, or both
            ways of saving; and what the constructor raises.

        Example:
          >>> config = ks.estimator.RunConfig(save_checkpoints_secs=600)
          >>> config = config.replace(save_checkpoints_steps=50)
          >>> config.save_checkpoints_steps, config.save_checkpoints_secs
          (50, None)
        """
        for name in changes:
            if name not in _FIELDS:
                raise ValueError(
                    f"Replacing {name} is not supported. Allowed properties "
                    f"are {', '.join(_FIELDS)}. Received: {name}="
                    f"{shown(changes[name])}. What TF_CONFIG sets is read "
                    "when a `RunConfig` is made."
                )
        if _MODEL_DIR in changes:
            changes[_MODEL_DIR] = _path_text(changes[_MODEL_DIR])
        changes = _switched(changes)
        made = copy.copy(self)
        made._set(**changes)
        if "experimental_distribute" in changes:
            given = {"train_distribute", "eval_distribute"} - {*changes}
            made._set(**dict.fromkeys(given))
            made._take_experimental()
        check_fields(made)
        return made

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The training cluster; empty for a local run and an evaluator."""
        return self._cluster.cluster_spec

    @property
    def task_type(self) -> str:
        """What this process is: "chief", "worker", "ps" or "evaluator"."""
        return self._cluster.task_type

    @property
    def task_id(self) -> int:
        """The index of this process among those of its type."""
        return self._cluster.task_id

    @property
    def master(self) -> str:
        """This process's "grpc://host:port"; "" if it is alone."""
        return self._cluster.master

    @property
    def evaluation_master(self) -> str:
        """TF_CONFIG's "eval_session_master", else ""."""
        return self._cluster.evaluation_master

    @property
    def is_chief(self) -> bool:
        """Whether this process is the training cluster's chief."""
        return self._cluster.is_chief

    @property
    def num_ps_replicas(self) -> int:
        """How many parameter servers the cluster has."""
        return self._cluster.num_ps_replicas

    @property
    def num_worker_replicas(self) -> int:
        """How many processes train, the chief's included."""
        return self._cluster.num_worker_replicas

    @property
    def global_id_in_cluster(self) -> int | None:
        """This process's number among all: the chief, workers, servers."""
        return self._cluster.global_id_in_cluster

    @property
    def service(self) -> dict[str, Any] | None:
        """TF_CONFIG's "service", which a platform writes."""
        return self._cluster.service

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _take_experimental(self) -> None:
        """Takes the strategies of `experimental_distribute`, if it has any."""
        given = self.experimental_distribute
        if given is None:
            return
        for name in ("train_distribute", "eval_distribute"):
            if not hasattr(given, name):
                raise TypeError(
                    "`experimental_distribute` has the attributes "
                    "`train_distribute` and `eval_distribute`. Received: an "
                    f"object of type {type(given).__name__}. Pass the two "
                    "strategies as arguments of `RunConfig` instead."
                )
            strategy = getattr(given, name)
            if strategy is None:
                continue
            if getattr(self, name) is not None:
                raise ValueError(
                    f"Either `{name}` or `experimental_distribute.{name}` can "
                    "be set. Received: both. Leave one of the two out."
                )
            self._set(**{name: strategy})
        if getattr(given, "remote_cluster", None):
            raise ValueError(
                "No client starts work on a remote cluster here. Received: "
                "`experimental_distribute.remote_cluster`. Start the script "
                "once for each process, with its TF_CONFIG (docs/clusters.md)."
            )


_FIELDS = tuple(
    field.name for field in dataclasses.fields(RunConfig) if field.init
)


def _save_rule(steps: object, secs: object) -> tuple[object, object]:
    """The two ways of saving, of which at most one is given."""
    if steps is _USE_DEFAULT and secs is _USE_DEFAULT:
        return None, DEFAULT_SAVE_SECONDS
    steps = None if steps is _USE_DEFAULT else steps
    secs = None if secs is _USE_DEFAULT else secs
    if steps is not None and secs is not None:
        raise ValueError(_BOTH.format(shown(steps), shown(secs)))
    return steps, secs


def _switched(changes: dict[str, Any]) -> dict[str, Any]:
    """The changes, with the other way of saving cleared."""
    steps, secs = changes.get(_STEPS), changes.get(_SECS)
    if steps is not None and secs is not None:
        raise ValueError(_BOTH.format(shown(steps), shown(secs)))
    if steps is not None:
        return changes | {_SECS: None}
    if secs is not None:
        return changes | {_STEPS: None}
    return changes


def _path_text(path: object) -> object:
    """A path as text; what is none stays for the check."""
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _agreed_model_dir(directory: object, cluster: RunCluster) -> object:
    of_cluster = cluster.model_dir
    if of_cluster and directory and of_cluster != directory:
        raise ValueError(
            "`model_dir` of RunConfig, if set, must have the same value as "
            f"model_dir in TF_CONFIG. Received: {shown(directory)}, and "
            f"{shown(of_cluster)} in TF_CONFIG. Leave one of the two out."
        )
    # "" is refused by the check, and not replaced.
    return of_cluster if directory is None else directory
