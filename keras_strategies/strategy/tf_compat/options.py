"""Options of tf.distribute: for `run` and for communication."""

import dataclasses
import enum
from typing import Any

from keras_strategies.cluster.checks import check_number

_MAX_SECONDS = 7 * 24 * 3600
_FIX = "Omit it to use the default."


class CommunicationImplementation(enum.Enum):
    """The communication libraries that can be selected in tf.

    Here the choice has no effect, because XLA has one library for each
    platform, and chooses the algorithm.

    Example:
      >>> options = ks.experimental.CommunicationOptions(
      ...     implementation=ks.experimental.CommunicationImplementation.NCCL
      ... )
      >>> options.implementation.value
      'NCCL'
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Options of `MultiWorkerMirroredStrategy`, as in tf.

    Differs from tf: `bytes_per_pack` has no effect. XLA chooses which arrays it
    sends together; on GPUs, the flag
    `--xla_gpu_all_reduce_combine_threshold_bytes` in `XLA_FLAGS` controls this.

    Args:
      bytes_per_pack: The number of bytes that tf would send together. Not used.
      timeout_seconds: How long processes wait for each other before they exit
        and report the cause. None for the value of
        `KERAS_STRATEGIES_TIMEOUT_S`, or 600 if it is not set. The time applies
        to all strategies of this process.
      implementation: A `CommunicationImplementation` or its name.

    Raises:
      ValueError: if a number is negative, `timeout_seconds` is not positive or
        more than a week, or the implementation is unknown.
      TypeError: if a value is not a number.

    Example:
      ```python
      options = ks.experimental.CommunicationOptions(timeout_seconds=120)
      strategy = ks.MultiWorkerMirroredStrategy(
          communication_options=options
      )
      ```
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: Any = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        check_number("`bytes_per_pack`", self.bytes_per_pack, _FIX, minimum=0)
        if self.timeout_seconds is not None:
            check_seconds("timeout_seconds", self.timeout_seconds)
        name = getattr(self.implementation, "value", self.implementation)
        known = CommunicationImplementation.__members__
        if name not in list(known):
            raise ValueError(
                "`implementation` must be one of "
                f"{', '.join(map(repr, known))}. Received: "
                f"{self.implementation!r}. Omit it to use 'AUTO'."
            )
        object.__setattr__(self, "implementation", known[name])


def check_seconds(name: str, value: object) -> None:
    """Raises unless a value is a positive number of seconds.

    Args:
      name: The argument's name.
      value: The argument's value.

    Raises:
      TypeError: if the value is not a number.
      ValueError: if it is not positive, or more than a week.
    """
    check_number(
        f"`{name}`",
        value,
        _FIX,
        above=0,
        maximum=_MAX_SECONDS,
        is_whole=False,
        is_optional=False,
    )


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`, as in tf; none of them has an effect.

    Set XLA's options with the environment variable `XLA_FLAGS`. For each shape
    of the arguments, a separate program is compiled.

    Attributes:
      experimental_enable_dynamic_batch_size: Not used.
      experimental_bucketizing_dynamic_shape: Not used.
      experimental_xla_options: Not used.

    Example:
      ```python
      options = ks.RunOptions(experimental_enable_dynamic_batch_size=False)
      sums = strategy.run(step, args=batch, options=options)
      ```
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None
