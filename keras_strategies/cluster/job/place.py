"""This process's place in a job: from a resolver, from numbers, or from JAX."""

import dataclasses
import os
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from keras_strategies.cluster import spec, tasks
from keras_strategies.cluster.job import bootstrap
from keras_strategies.cluster.resolvers import (
    simple_resolver,
    tf_config_resolver,
)
from keras_strategies.cluster.watchdog import launcher_pipe, watchdog

_MAX_DIGITS = 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnjoinedJob:
    """A job of several processes, by its launcher.

    Attributes:
      variable: The environment variable that says how many there are.
      count: How many.
      cure: What to give the strategy to join them.
    """

    variable: str
    count: int
    cure: str


# The variable of the number of processes, others that it comes with, and how
# to join: SLURM's steps, Open MPI and torchrun.
_LAUNCHERS = (
    (
        "SLURM_STEP_NUM_TASKS",
        ("SLURM_PROCID",),
        "`cluster_resolver=ks.cluster_resolver.SlurmClusterResolver()`",
    ),
    (
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_RANK",),
        "`coordinator_address`, and the numbers of OMPI_COMM_WORLD_SIZE and "
        "OMPI_COMM_WORLD_RANK as `num_processes` and `process_id`",
    ),
    (
        "WORLD_SIZE",
        ("RANK", "MASTER_ADDR"),
        "`cluster_resolver=ks.cluster_resolver.TorchrunClusterResolver()`",
    ),
)


def join(
    resolver: tasks.AnyResolver | None,
    numbers: tuple[str | None, int | None, int | None],
    strategy: str,
    timeout_s: float,
) -> tasks.AnyResolver:
    """Joins the job that a resolver, numbers or TF_CONFIG describe. Collective.

    Args:
      resolver: The cluster resolver given, or None.
      numbers: The coordinator's address, the number of processes, and which of
        them this is; None for what was not given.
      strategy: The name of the strategy, which is the same in all.
      timeout_s: How long to wait for all processes, in seconds.

    Returns:
      The resolver, or one of this process's place in the job.

    Raises:
      TypeError: the resolver is none.
      ValueError: a resolver and numbers, or some of the numbers.
      RuntimeError: see `bootstrap.join`.
    """
    names = "coordinator_address", "num_processes", "process_id"
    named: dict[str, Any] = dict(zip(names, numbers, strict=True))
    _check_one_way(resolver, named)
    resolver, task = _resolved(resolver, named)
    if task is not None:
        bootstrap.join(task, strategy=strategy, timeout_s=float(timeout_s))
    if resolver is None:
        _warn_if_alone()
        resolver = _resolver_of_job()
    return resolver


def devices() -> tuple[jax.Device, ...]:
    """The devices of all processes, each process's after each other."""
    found = jax.devices()
    return tuple(sorted(found, key=lambda d: (d.process_index, d.id)))


def set_timeout(seconds: float | None) -> None:
    """Sets how long a program may be waited for, where there are several."""
    if watchdog.is_running() and seconds is not None:
        watchdog.start(seconds)


def unjoined_job(environ: Mapping[str, str]) -> UnjoinedJob | None:
    """The job of several processes that a launcher has started, if any.

    Args:
      environ: The environment.
    """
    for variable, others, cure in _LAUNCHERS:
        text = environ.get(variable, "")
        is_number = text.isascii() and text.isdigit()
        if not is_number or len(text) > _MAX_DIGITS or int(text) < 2:
            continue
        if all(other in environ for other in others):
            return UnjoinedJob(variable=variable, count=int(text), cure=cure)
    return None


def _check_one_way(resolver: object, numbers: dict[str, Any]) -> None:
    """Raises unless a job is described in one way, and wholly."""
    missing = [name for name, value in numbers.items() if value is None]
    if len(missing) == len(numbers):
        return
    if resolver is not None:
        given = ", ".join(f"`{n}`" for n in numbers if n not in missing)
        raise ValueError(
            "A job is described by a resolver or by numbers. Received: "
            f"`cluster_resolver` and {given}. Give one of the two."
        )
    if missing:
        raise ValueError(
            "A job of several processes is described by "
            "`coordinator_address`, `num_processes` and `process_id` together. "
            f"Received: {numbers}. Give {' and '.join(missing)} as well."
        )


def _resolved(
    resolver: tasks.AnyResolver | None, numbers: dict[str, Any]
) -> tuple[tasks.AnyResolver | None, spec.TaskInfo | None]:
    """A resolver and this process's `TaskInfo`; None where neither is given."""
    if resolver is None and numbers["num_processes"] is not None:
        return None, tasks.task_of_process(**numbers)
    if resolver is None:
        if not os.environ.get("TF_CONFIG"):
            return None, None
        resolver = tf_config_resolver.TFConfigClusterResolver()
    if not hasattr(resolver, "cluster_spec"):
        raise TypeError(
            "`cluster_resolver` gives the processes of the job, by "
            "`cluster_spec()`, `task_type` and `task_id`. Received: an object "
            f"of type {type(resolver).__name__}. Pass one of "
            "`ks.cluster_resolver`, or none for what TF_CONFIG says."
        )
    return resolver, tasks.task_info(resolver)


def _warn_if_alone() -> None:
    """Warns where each process of a job would train a model of its own."""
    job = unjoined_job(os.environ)
    is_launched = launcher_pipe.LAUNCHER_FD in os.environ
    if job is None or is_launched or jax.distributed.is_initialized():
        return
    if os.environ.get("TF_CONFIG"):
        return
    warnings.warn(
        "`MultiWorkerMirroredStrategy` joins the processes that it is given. "
        f"Received: nothing, in one of {job.count} processes "
        f"({job.variable}={job.count}), each of which now trains a model of "
        f"its own. Pass {job.cure}.",
        UserWarning,
        stacklevel=4,
    )


def _resolver_of_job() -> simple_resolver.SimpleClusterResolver:
    """A resolver of a process whose place is known to JAX alone."""
    is_alone = jax.process_count() == 1
    return simple_resolver.SimpleClusterResolver(
        spec.ClusterSpec({}),
        task_type=None if is_alone else "worker",
        task_id=None if is_alone else jax.process_index(),
    )
