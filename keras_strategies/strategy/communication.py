"""How processes communicate, as far as that can be chosen."""

import dataclasses
import enum
from typing import Any


class CommunicationImplementation(enum.Enum):
    """What tf chooses among; XLA knows one library for each platform.

    Differs from tf: `RING` is refused, and `NCCL` where there are no GPUs.
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
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: Any = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        _check_number("bytes_per_pack", self.bytes_per_pack, least=0)
        if self.timeout_seconds is not None:
            _check_number("timeout_seconds", self.timeout_seconds, least=None)
        name = getattr(self.implementation, "value", self.implementation)
        known = CommunicationImplementation.__members__
        if name not in known:
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


def checked_options(options: Any) -> CommunicationOptions:
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


def _check_number(name: str, value: Any, *, least: float | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"`{name}` is a number. Received: an object of type "
            f"{type(value).__name__}. Leave it out for the default."
        )
    is_allowed = value > 0 if least is None else value >= least
    if not is_allowed:
        raise ValueError(
            f"`{name}` is a {'positive' if least is None else 'natural'} "
            f"number. Received: {value}. Leave it out for the default."
        )
