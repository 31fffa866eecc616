"""The parts of loops' equations."""

from collections.abc import Sequence
from typing import Any


def scan_operands(
    equation: Any, values: Sequence[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """Splits what belongs to the operands of a `scan` by what they are.

    Args:
      equation: An equation of `jax.lax.scan`.
      values: One for each operand.

    Returns:
      Those of the constants, of the carry, and of what is scanned.
    """
    params = equation.params
    if "ft_in" in params:  # Of JAX 0.12.
        parts = params["ft_in"].update(list(values)).unpack()
        consts, carry, scanned = map(list, parts)
        return consts, carry, scanned
    split = params["num_consts"]
    end = split + params["num_carry"]
    return list(values[:split]), list(values[split:end]), list(values[end:])
