"""MultiWorkerMirroredStrategy: one replica on each device of all processes."""

import jax

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.strategy.strategy import Strategy


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on the devices of several processes.

    Every process runs the same script. Variables are mirrored on every device
    of all processes and start with the chief's values (process 0); a batch's
    rows are divided over them. Calls of `fit`, `evaluate`, `predict`, `run`
    and `reduce` are collective: all processes make them, in the same order.

    Make it before anything else uses JAX's devices, or after
    `jax.distributed.initialize`. In one process that is told of no others it
    is a `MirroredStrategy`.

    Args:
      cluster_resolver: Must be None. Give the three arguments below, or call
        `jax.distributed.initialize` first.
      communication_options: Must be None: XLA chooses how devices
        communicate.
      coordinator_address: "host:port" of process 0, where it is to listen.
      num_processes: How many processes there are.
      process_id: Which of them this one is.
      predict_in: "all": `predict` returns all rows in every process;
        "chief": in the chief, and arrays without rows in the others.

    Raises:
      ValueError: an unknown `predict_in`; some of the three are given and
        others not; processes with different numbers of devices.
      RuntimeError: JAX's devices are in use already.

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
        cluster_resolver: None = None,
        communication_options: None = None,
        *,
        coordinator_address: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        predict_in: str = "all",
    ) -> None:
        for name, value in (
            ("cluster_resolver", cluster_resolver),
            ("communication_options", communication_options),
        ):
            if value is not None:
                raise ValueError(
                    f"`{name}` is not supported. Received: {value!r}. Pass "
                    "`coordinator_address`, `num_processes` and `process_id`, "
                    "or call `jax.distributed.initialize` before."
                )
        if predict_in not in ("all", "chief"):
            raise ValueError(
                "`predict` returns its rows in all processes or in the chief. "
                f"Received: predict_in={predict_in!r}. Pass 'all' or 'chief'."
            )
        given = {
            "coordinator_address": coordinator_address,
            "num_processes": num_processes,
            "process_id": process_id,
        }
        if any(value is not None for value in given.values()):
            _join(given)
        devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
        super().__init__(
            ReplicaMesh(devices=tuple(devices)),
            outputs_on_chief=predict_in == "chief",
        )


def _join(given: dict[str, str | int | None]) -> None:
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise ValueError(
            "A job of several processes is described by "
            "`coordinator_address`, `num_processes` and `process_id` together. "
            f"Received: {given}. Give {' and '.join(missing)} as well."
        )
    if jax.distributed.is_initialized():
        known = (jax.process_count(), jax.process_index())
        if known != (given["num_processes"], given["process_id"]):
            raise ValueError(
                "This process is part of a job already. Received: "
                f"num_processes={given['num_processes']}, process_id="
                f"{given['process_id']}, in a job of {known[0]} as process "
                f"{known[1]}. Leave the arguments out."
            )
        return
    jax.distributed.initialize(**given)  # pyright: ignore[reportArgumentType]
