"""MultiWorkerMirroredStrategy: one replica on each device of all processes."""

import os
from typing import Any

import jax

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.cluster import bootstrap
from keras_strategies.strategy.strategy import Strategy


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
      cluster_resolver: Tells who is in the job (`ks.cluster_resolver`); None
        for what TF_CONFIG says, if it is set.
      communication_options: Must be None: XLA chooses how devices
        communicate.
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
        communication_options: None = None,
        *,
        coordinator_address: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        startup_timeout_s: float = bootstrap.STARTUP_TIMEOUT_S,
        predict_in: str = "all",
    ) -> None:
        if communication_options is not None:
            raise ValueError(
                "`communication_options` is not supported. Received: "
                f"{communication_options!r}. Leave it out: XLA chooses how "
                "devices communicate."
            )
        if predict_in not in ("all", "chief"):
            raise ValueError(
                "`predict` returns its rows in all processes or in the chief. "
                f"Received: predict_in={predict_in!r}. Pass 'all' or 'chief'."
            )
        task = _task(
            cluster_resolver,
            {
                "coordinator_address": coordinator_address,
                "num_processes": num_processes,
                "process_id": process_id,
            },
        )
        if task is not None:
            bootstrap.join(
                task,
                strategy="MultiWorkerMirroredStrategy",
                timeout_s=startup_timeout_s,
            )
        devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
        super().__init__(
            ReplicaMesh(devices=tuple(devices)),
            outputs_on_chief=predict_in == "chief",
        )


def _task(resolver: Any, given: dict[str, Any]) -> Any:
    """This process's place, a `TaskInfo`; None where nothing tells."""
    # They would take a tenth of the time of importing this package.
    from keras_strategies.cluster import tasks, tf_config_resolver

    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        if resolver is None and "TF_CONFIG" in os.environ:
            resolver = tf_config_resolver.TFConfigClusterResolver()
        return None if resolver is None else tasks.task_info(resolver)
    if resolver is not None:
        raise ValueError(
            "A job is described by a resolver or by numbers. Received: "
            "`cluster_resolver` and "
            f"{', '.join(n for n in given if n not in missing)}. Give one of "
            "the two."
        )
    if missing:
        raise ValueError(
            "A job of several processes is described by "
            "`coordinator_address`, `num_processes` and `process_id` together. "
            f"Received: {given}. Give {' and '.join(missing)} as well."
        )
    return tasks.task_of_process(**given)
