"""ReduceOp: the reductions of values of several replicas."""

import enum
from typing import Any


class ReduceOp(enum.Enum):
    """A reduction over replicas; its name as a string will do too."""

    SUM = "SUM"
    MEAN = "MEAN"


def as_reduce_op(op: Any) -> ReduceOp:
    """The operation that a user named.

    Args:
      op: A `ReduceOp`, or its name in any case.

    Raises:
      ValueError: an unknown name.
      TypeError: neither an operation nor a name.
    """
    if isinstance(op, ReduceOp):
        return op
    if not isinstance(op, str):
        raise TypeError(
            "A reduction is a `ReduceOp` or its name. Received: "
            f"{op!r} of type {type(op).__name__}. Pass ReduceOp.SUM or "
            "ReduceOp.MEAN."
        )
    try:
        return ReduceOp(op.upper())
    except ValueError:
        raise ValueError(
            f"{op!r} is not a valid ReduceOp. Choose SUM or MEAN."
        ) from None
