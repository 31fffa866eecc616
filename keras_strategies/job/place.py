"""Finds this process's role in a job, and joins the job.

The role comes from a cluster resolver, from the arguments
`coordinator_address`, `num_processes` and `process_id`, or from JAX.
"""

import os
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from keras_strategies.cluster import spec, tasks
from keras_strategies.cluster.exchange import kv_store
from keras_strategies.cluster.resolvers import (
    launchers,
    tf_config_resolver,
    union_resolver,
)
from keras_strategies.job import bootstrap
from keras_strategies.names import dry_run
from keras_strategies.watchdog import launcher_pipe, watchdog

_MAX_DIGITS = 9


def join(
    resolver: tasks.AnyResolver | None,
    numbers: tuple[str | None, int | None, int | None],
    strategy: str,
    timeout_s: float,
) -> tasks.AnyResolver:
    """Joins the job that the arguments or TF_CONFIG describe. Collective.

    Args:
      resolver: The user's cluster resolver, or None.
      numbers: The coordinator's address, the number of processes, and this
        process's number; None for each that the user omitted.
      strategy: The name of the strategy; it must be the same in all processes.
      timeout_s: How long to wait for all processes to arrive, in seconds.

    Returns:
      The argument `resolver`, or the resolver for TF_CONFIG. If there is
      neither, a new resolver that describes this process's role in the job.

    Raises:
      TypeError: if `resolver` is not a resolver.
      ValueError: if both a resolver and numbers are passed, or only some of
        the numbers are passed.
      RuntimeError: see `bootstrap.join`.
    """
    names = "coordinator_address", "num_processes", "process_id"
    by_name: dict[str, Any] = dict(zip(names, numbers, strict=True))
    _check_one_way(resolver, by_name)
    if dry_run.get() is not None:
        return resolver or _make_job_resolver()
    resolver, task = _resolve(resolver, by_name)
    if task is not None:
        bootstrap.join(
            task,
            strategy=strategy,
            timeout_s=float(timeout_s),
            resolver=resolver,
        )
    if kv_store.is_available() and kv_store.get_place()[1] > 1:
        # The devices start next. If this fails in one process, the watchdog
        # tells the others, which may wait for it.
        watchdog.start()
    if resolver is None:
        _warn_if_alone()
        resolver = _make_job_resolver()
    return resolver


def list_devices() -> tuple[jax.Device, ...]:
    """Returns the devices of all processes, ordered by process."""
    devices = jax.devices()
    return tuple(sorted(devices, key=lambda d: (d.process_index, d.id)))


def set_timeout(seconds: float | None) -> None:
    """Sets the watchdog's timeout if it runs and `seconds` is not None."""
    if watchdog.get_runner() is not None and seconds is not None:
        watchdog.start(seconds)


def find_unjoined_job(
    environ: Mapping[str, str],
) -> tuple[launchers.Launcher, int] | None:
    """Finds a job of several processes that environment variables describe.

    The caller must check whether this process has joined a job.

    Args:
      environ: The environment variables.

    Returns:
      The launcher that started the job, and the number of processes; None if
      no launcher's variables are set, or they describe only one process.
    """
    for launcher in launchers.LAUNCHERS:
        text = environ.get(launcher.counts.partition(" ")[0], "")
        is_number = text.isascii() and text.isdigit()
        if not is_number or len(text) > _MAX_DIGITS or int(text) < 2:
            continue
        if launcher.has_started(environ):
            return launcher, int(text)
    return None


def _check_one_way(resolver: object, numbers: dict[str, Any]) -> None:
    """Raises an error if a job is described in two ways, or incompletely.

    Args:
      resolver: The user's cluster resolver, or None.
      numbers: The other arguments that describe a job, by name.
    """
    missing = [name for name, value in numbers.items() if value is None]
    if len(missing) == len(numbers):
        return
    if resolver is not None:
        passed = ", ".join(f"`{n}`" for n in numbers if n not in missing)
        raise ValueError(
            "A job must be described either by `cluster_resolver` or by "
            "`coordinator_address`, `num_processes` and `process_id`. "
            f"Received: both `cluster_resolver` and {passed}. Omit one of them."
        )
    if missing:
        raise ValueError(
            "`coordinator_address`, `num_processes` and `process_id` must be "
            "passed together. "
            f"Received: {numbers}. Pass {' and '.join(missing)} as well."
        )


def _resolve(
    resolver: tasks.AnyResolver | None, numbers: dict[str, Any]
) -> tuple[tasks.AnyResolver | None, spec.TaskInfo | None]:
    """Returns the cluster resolver and this process's role; None if unknown.

    Without arguments, TF_CONFIG is used if it is set.
    """
    if resolver is None and numbers["num_processes"] is not None:
        return None, tasks.make_task_info(**numbers)
    if resolver is None:
        if not os.environ.get("TF_CONFIG"):
            return None, None
        resolver = tf_config_resolver.TFConfigClusterResolver()
    if not hasattr(resolver, "cluster_spec"):
        raise TypeError(
            "`cluster_resolver` must have `cluster_spec()`, `task_type` and "
            "`task_id`, which describe the job. Received: an object of type "
            f"{type(resolver).__name__}. Pass a resolver from "
            "`ks.cluster_resolver`, or omit the argument to use TF_CONFIG."
        )
    return resolver, tasks.task_info(resolver)


def _warn_if_alone() -> None:
    """Warns if a launcher started several processes that did not join a job.

    Each of these processes would train a separate model.
    """
    job = find_unjoined_job(os.environ)
    is_launched = launcher_pipe.LAUNCHER_FD in os.environ
    if job is None or is_launched or jax.distributed.is_initialized():
        return
    if os.environ.get("TF_CONFIG"):
        return
    launcher, count = job
    use = f"`cluster_resolver=ks.cluster_resolver.{launcher.use}`"
    warnings.warn(
        "`MultiWorkerMirroredStrategy` needs a description of the cluster. It "
        f"has none in one of {count} processes of {launcher.name}. Each "
        "process now trains a separate model. To train one model together, "
        f"pass {launcher.argument or use}.",
        UserWarning,
        stacklevel=4,
    )


def warn_of_unused_cluster(name: str) -> None:
    """Warns if TF_CONFIG describes processes that a strategy does not join.

    Args:
      name: The name of the strategy's class.
    """
    is_joined = jax.distributed.is_initialized() or dry_run.get() is not None
    if not os.environ.get("TF_CONFIG") or is_joined:
        return
    try:
        info = tasks.task_info(tf_config_resolver.TFConfigClusterResolver())
    except (TypeError, ValueError):
        return
    if info.num_processes > 1 and info.type != "evaluator":
        warnings.warn(
            f"`{name}` uses only the devices of this process. Received: a "
            f"TF_CONFIG with {info.num_processes} processes, each of which now "
            "trains a separate model. To train one model together, use "
            "`ks.MultiWorkerMirroredStrategy()`.",
            UserWarning,
            stacklevel=3,
        )


def _make_job_resolver() -> union_resolver.SimpleClusterResolver:
    """Makes a resolver whose `task_id` is this process's index in JAX."""
    is_alone = jax.process_count() == 1
    return union_resolver.SimpleClusterResolver(
        spec.ClusterSpec({}),
        task_type=None if is_alone else "worker",
        task_id=None if is_alone else jax.process_index(),
    )
