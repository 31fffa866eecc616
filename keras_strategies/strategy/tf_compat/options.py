"""Options of tf.distribute that are accepted for its signatures."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`, as in tf; none changes anything here.

    XLA's options are set by the environment variable `XLA_FLAGS`; every shape
    of the arguments has a program of its own.

    Attributes:
      experimental_enable_dynamic_batch_size: Not used.
      experimental_bucketizing_dynamic_shape: Not used.
      experimental_xla_options: Not used.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None


def check_options(options: Any) -> None:
    """Raises TypeError unless options are None or `RunOptions`."""
    if options is not None and not isinstance(options, RunOptions):
        raise TypeError(
            "`options` of `run` are `RunOptions`. Received: an object of type "
            f"{type(options).__name__}. Leave them out: none is used."
        )
