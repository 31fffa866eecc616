"""Bytes of a device by kind, of what a compiler says of a program."""

from collections.abc import Mapping

from keras_strategies.planning.compile.figures import Figures
from keras_strategies.planning.compile.lines import Line, bytes_needed


def by_kind(state: Mapping[str, float], line: Line) -> Mapping[str, float]:
    """Bytes of weights, slots, other state, gradients, activations and rest.

    Args:
      state: Weights, slots and other state, and all gradients, by arithmetic.
      line: The program's figures for two numbers of rows.
    """
    first, second = line.figures
    if isinstance(first, Figures):
        standing = first.argument_bytes + first.output_bytes
        temporary = first.temporary_bytes
    elif first.needed is not None:
        # Of which the compiler says no more.
        held = state["weights"] + state["slots"] + state["other"]
        standing = min(held, first.needed)
        temporary = first.needed - standing
    else:
        return {}
    sizes = bytes_needed(first), bytes_needed(second)
    if isinstance(first, Figures) and isinstance(second, Figures):
        sizes = first.temporary_bytes, second.temporary_bytes
    activations = 0.0
    if sizes[0] is not None and sizes[1] is not None:
        low, high = line.rows
        growing = max(sizes[1] - sizes[0], 0.0) * low / max(high - low, 1)
        activations = min(growing, temporary)
    gradients = min(state["gradients"], temporary - activations)
    known = state["weights"] + state["slots"]
    return {
        "weights": state["weights"],
        "slots": state["slots"],
        "other": max(standing - known, 0.0),
        "gradients": gradients,
        "activations": activations,
        "temporary": temporary - activations - gradients,
    }
