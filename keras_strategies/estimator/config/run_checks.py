"""The checks of a RunConfig's fields."""

from typing import Any

from keras_strategies.cluster.addresses import shown
from keras_strategies.cluster.checks import check_number, check_type
from keras_strategies.estimator.config.run_cluster import EVALUATOR, SERVER

_NUMBERS: dict[str, dict[str, Any]] = {
    "save_summary_steps": {"least": 0},
    "save_checkpoints_steps": {"least": 0},
    "keep_checkpoint_max": {"least": 0},
    "log_step_count_steps": {"least": 1},
    "save_checkpoints_secs": {"least": 0, "is_whole": False},
    "keep_checkpoint_every_n_hours": {"above": 0, "is_whole": False},
    "session_creation_timeout_secs": {"above": 0, "is_whole": False},
    "tf_random_seed": {},
    "experimental_max_worker_delay_secs": {},
}
# Fields of sessions and graphs, which JAX has not: what they may be, and
# what to use instead.
_WITHOUT_MEANING = {
    "session_config": (
        None,
        "Set XLA_FLAGS or `jax.config` before JAX starts, and choose devices "
        "by `train_distribute`.",
    ),
    "device_fn": (
        None,
        "Choose devices by `train_distribute`, and where variables lie by "
        "`TPUStrategy(layout_map=...)`.",
    ),
    "protocol": (
        None,
        "JAX chooses it. `ks.experimental.CommunicationOptions` has what can "
        "be set.",
    ),
    "checkpoint_save_graph_def": (
        True,
        "Checkpoints never hold a graph. `Estimator.export_saved_model` writes "
        "what is served.",
    ),
}


def check_fields(config: Any) -> None:
    """Raises ValueError or TypeError for the first field that is wrong."""
    _check_model_dir(config.model_dir)
    for name, bounds in _NUMBERS.items():
        cure = "Give such a number, or None."
        check_number(f"`{name}`", getattr(config, name), cure, **bounds)
    for name, (default, cure) in _WITHOUT_MEANING.items():
        given = getattr(config, name)
        if given is not default:
            raise ValueError(
                f"`{name}` has no meaning on JAX. Received: {name}="
                f"{shown(given)}. Leave it out. {cure}"
            )
    for name in ("train_distribute", "eval_distribute"):
        _check_strategy(name, getattr(config, name))


def check_trains(config: Any, num_processes: int) -> None:
    """Raises ValueError unless this process can train.

    Args:
      config: The RunConfig.
      num_processes: How many processes the strategy is over.
    """
    if config.task_type in (SERVER, EVALUATOR):
        raise ValueError(
            "Train has been called with a wrong configuration: task type "
            f"{config.task_type!r} does not train. Received: a TF_CONFIG with "
            "that task. Call `ks.estimator.train_and_evaluate`, which does "
            "what each task is for; parameter servers are not supported."
        )
    if config.num_worker_replicas > 1 and num_processes == 1:
        raise ValueError(
            "Processes of a cluster train together. Received: a TF_CONFIG "
            f"with {config.num_worker_replicas} training processes, and "
            f"train_distribute={shown(config.train_distribute)} on one. "
            "Pass `train_distribute=ks.MultiWorkerMirroredStrategy()`."
        )


def _check_model_dir(directory: object) -> None:
    cure = "Pass a str or a `pathlib.Path`."
    check_type("`model_dir`", directory, str | None, "a path", cure)
    if directory == "":
        raise ValueError(
            "model_dir should be non-empty. Received: ''. Give a path, or "
            "None for a temporary one."
        )


def _check_strategy(name: str, strategy: object) -> None:
    if strategy is None:
        return
    # Where no strategy is given, neither Keras nor JAX need be there.
    from keras_strategies.strategy.strategy import Strategy

    if not isinstance(strategy, Strategy):
        kind = type(strategy)
        given = f"an object of type {kind.__module__}.{kind.__name__}"
        cure = "Use, for example, `ks.MirroredStrategy()`."
        if isinstance(strategy, type) and issubclass(strategy, Strategy):
            given = f"the class {strategy.__name__}"
            cure = f"Make one: `{strategy.__name__}()`."
        raise TypeError(
            f"`{name}` is a strategy of keras_strategies. Received: {given}. "
            f"{cure}"
        )
