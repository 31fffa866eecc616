"""Options of tf.distribute: those of `run`, and of communication."""

import dataclasses
import enum
from typing import Any

from keras_strategies.cluster.checks import check_number

_MAX_SECONDS = 7 * 24 * 3600
_CURE = "Leave it out for the default."


class CommunicationImplementation(enum.Enum):
    """What tf chooses among; XLA knows one library for each platform.

    Differs from tf: `RING` is refused, and `NCCL` where there are no GPUs.

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

    Differs from tf: `bytes_per_pack` has no effect. XLA decides what it sends
    together; the flag `--xla_gpu_all_reduce_combine_threshold_bytes` in
    `XLA_FLAGS` sets that for GPUs.

    Args:
      bytes_per_pack: 0, or how many bytes tf would send together.
      timeout_seconds: How long processes wait for each other before they end
        with the cause; None for what `KERAS_STRATEGIES_TIMEOUT_S` says, else
        600. It holds for all strategies of this process.
      implementation: A `CommunicationImplementation` or its name.

    Raises:
      ValueError: a number that is negative, no time, an unknown
        implementation, or one that XLA has not.
      TypeError: what is no number.

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
        check_number("`bytes_per_pack`", self.bytes_per_pack, _CURE, least=0)
        if self.timeout_seconds is not None:
            check_seconds("timeout_seconds", self.timeout_seconds)
        name = getattr(self.implementation, "value", self.implementation)
        known = CommunicationImplementation.__members__
        if name not in list(known):
            raise ValueError(
                "`implementation` is one of "
                f"{', '.join(map(repr, known))}. Received: "
                f"{self.implementation!r}. Leave it out for 'AUTO'."
            )
        if name == "RING":
            raise ValueError(
                "XLA chooses the algorithm: gloo's on CPU, NCCL's on GPU, that "
                "of the links on TPU. Received: implementation='RING'. Leave "
                "it out."
            )
        object.__setattr__(self, "implementation", known[name])

    def check_platform(self, platform: str) -> None:
        """Raises ValueError where `implementation` cannot be had.

        Args:
          platform: `"cpu"`, `"gpu"` or `"tpu"`.
        """
        implementation = CommunicationImplementation.NCCL
        if self.implementation is implementation and platform != "gpu":
            raise ValueError(
                "NCCL connects GPUs. Received: implementation='NCCL' and "
                f"devices of platform {platform!r}. Leave it out: XLA uses "
                "what the platform has."
            )


def checked_options(options: object) -> CommunicationOptions:
    """The options given, or the default ones.

    Raises:
      TypeError: something else was given.
    """
    if options is None:
        return CommunicationOptions()
    if not isinstance(options, CommunicationOptions):
        raise TypeError(
            "`communication_options` are `ks.experimental."
            "CommunicationOptions`. Received: an object of type "
            f"{type(options).__name__}. Make such an object, or leave it out."
        )
    return options


def check_seconds(name: str, value: object) -> None:
    """Raises unless a value is a positive number of seconds.

    Args:
      name: The argument's name.
      value: What was given.

    Raises:
      TypeError: it is no number.
      ValueError: it is none that can be waited for: above a week, too.
    """
    check_number(
        f"`{name}`",
        value,
        _CURE,
        above=0,
        most=_MAX_SECONDS,
        is_whole=False,
        is_optional=False,
    )


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`, as in tf; none changes anything here.

    XLA's options are set by the environment variable `XLA_FLAGS`; every shape
    of the arguments has a program of its own.

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


def check_options(options: object) -> None:
    """Raises TypeError unless options are None or `RunOptions`."""
    if options is not None and not isinstance(options, RunOptions):
        raise TypeError(
            "`options` of `run` are `RunOptions`. Received: an object of type "
            f"{type(options).__name__}. Leave them out: none is used."
        )
