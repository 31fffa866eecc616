"""MultiWorkerMirroredStrategy: one replica on each device of all processes."""

import os
import warnings
from typing import Any

import jax

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.strategy.strategy import Strategy
from keras_strategies.strategy.tf_compat.communication import (
    CommunicationOptions,
    check_seconds,
    checked_options,
)


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on the devices of several processes.

    Every process runs the same script. Variables are mirrored on every device
    of all processes and start with the chief's values (process 0); a batch's
    rows are divided over them. Calls of `fit`, `evaluate`, `predict`, `run`
    and `reduce` are collective: all processes make them, in the same order.

    Make it before anything else uses JAX's devices, or after
    `jax.distributed.initialize`. A process that is told of no others, by its
    arguments or by TF_CONFIG, has a `MirroredStrategy`. What keeps the
    processes from meeting (one that is missing, there twice, or of another
    version) is raised by all that are there.

    Args:
      cluster_resolver: Tells who is in the job (`ks.cluster_resolver`, or one
        of tf's); None for what TF_CONFIG says, if it is set.
      communication_options: `ks.experimental.CommunicationOptions`.
      coordinator_address: "host:port" of process 0, where it is to listen;
        with the next two, instead of a resolver.
      num_processes: How many processes there are.
      process_id: Which of them this one is.
      startup_timeout_s: How long to wait for all processes, in seconds.
      predict_in: "all": `predict` returns all rows in every process;
        "chief": in the chief, and arrays without rows in the others.

    Raises:
      ValueError: an unknown `predict_in`; some of the three are given and
        others not; a cluster that cannot be followed; processes with
        different numbers of devices.
      RuntimeError: JAX's devices are in use already; the processes did not
        meet in time, or differ.

    Example:
      ```python
      strategy = ks.MultiWorkerMirroredStrategy(
          coordinator_address="10.0.0.1:12345", num_processes=2, process_id=0
      )
      with strategy.scope():
          model = keras.Sequential([keras.layers.Dense(1)])
          model.compile("adam", "mse")
      model.fit(x, y, batch_size=256)
      ```
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        communication_options: CommunicationOptions | None = None,
        *,
        coordinator_address: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        startup_timeout_s: float = 300.0,
        predict_in: str = "all",
    ) -> None:
        # It would take a tenth of the time of importing this package.
        from keras_strategies.cluster.job import bootstrap
        from keras_strategies.cluster.watchdog import watchdog

        options = checked_options(communication_options)
        check_seconds("startup_timeout_s", startup_timeout_s)
        if predict_in not in ("all", "chief"):
            raise ValueError(
                "`predict` returns its rows in all processes or in the chief. "
                f"Received: predict_in={predict_in!r}. Pass 'all' or 'chief'."
            )
        numbers = {
            "coordinator_address": coordinator_address,
            "num_processes": num_processes,
            "process_id": process_id,
        }
        _check_one_way(cluster_resolver, numbers)
        resolver, task = _place(cluster_resolver, numbers)
        if task is not None:
            bootstrap.join(
                task, strategy=type(self).__name__, timeout_s=startup_timeout_s
            )
        if resolver is None:
            _warn_if_alone()
            resolver = _resolver_of_job()
        devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
        options.check_platform(devices[0].platform)
        super().__init__(
            ReplicaMesh(devices=tuple(devices)),
            outputs_on_chief=predict_in == "chief",
        )
        self._cluster_resolver = resolver
        if watchdog.is_running() and options.timeout_seconds is not None:
            watchdog.start(options.timeout_seconds)

    @property
    def cluster_resolver(self) -> Any:
        """The resolver given, or one of this process's place in the job.

        Its `task_type` and `task_id` say who writes files, as in tf: the
        chief, or worker 0 where there is none.
        """
        return self._cluster_resolver


def _check_one_way(resolver: Any, numbers: dict[str, Any]) -> None:
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


def _place(resolver: Any, numbers: dict[str, Any]) -> tuple[Any, Any]:
    """A resolver and this process's `TaskInfo`; None where nothing tells."""
    from keras_strategies.cluster import tasks
    from keras_strategies.cluster.resolvers import tf_config_resolver

    if resolver is None and numbers["num_processes"] is not None:
        return None, tasks.task_of_process(**numbers)
    if resolver is None:
        if not os.environ.get("TF_CONFIG"):
            return None, None
        resolver = tf_config_resolver.TFConfigClusterResolver()
    if not hasattr(resolver, "cluster_spec"):
        raise TypeError(
            "`cluster_resolver` gives the processes of the job, by "
            "`cluster_spec()`, `task_type` and `task_id`. Received: an "
            "object of type "
            f"{type(resolver).__name__}. Pass one of `ks.cluster_resolver`, or "
            "none for what TF_CONFIG says."
        )
    return resolver, tasks.task_info(resolver)


def _warn_if_alone() -> None:
    """Warns where each process of a job would train a model of its own."""
    from keras_strategies.cluster.resolvers import other_launchers
    from keras_strategies.cluster.watchdog import launcher_pipe

    job = other_launchers.unjoined_job(os.environ)
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
        stacklevel=3,
    )


def _resolver_of_job() -> Any:
    """A resolver that answers for a process which JAX knows the place of."""
    from keras_strategies.cluster import spec
    from keras_strategies.cluster.resolvers import simple_resolver

    is_alone = jax.process_count() == 1
    return simple_resolver.SimpleClusterResolver(
        spec.ClusterSpec({}),
        task_type=None if is_alone else "worker",
        task_id=None if is_alone else jax.process_index(),
    )
