"""A patch that shows the TPU compiler constants in partly manual programs.

A program that is manual over the replicas and automatic over their cores is
lowered by jax 0.10 with a constraint after every operation that leaves all
dimensions open. It says nothing, but hides constants from XLA's pass that
gives each use its own. The TPU compiler then divides a constant as one use
asks, whatever has the same shape follows, and it gathers activations and whole
weights again: 15 all-gathers in the train step of a small MLP that needs none.
JAX means to leave those constraints out (a TODO in its source). See
`test_open_constraints_are_still_emitted` in tests/contract.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

from jax.sharding import AbstractMesh, AxisType

_NAME = "lower_with_sharding_in_types"
_lock = threading.Lock()
_is_installed = False
# Names of the replicas' axes.
_axes: set[str] = set()


def leave_out_open_constraints(axis: str) -> None:
    """From now on, in programs that `replica_map` maps; users' are untouched.

    Does nothing where JAX has no such constraints.

    Args:
      axis: The name of the replicas' axis.
    """
    global _is_installed
    from jax._src.interpreters import mlir

    with _lock:
        _axes.add(axis)
        original = getattr(mlir, _NAME, None)
        if _is_installed or original is None:
            return
        setattr(mlir, _NAME, _leaving_out(original))
        _is_installed = True


def _leaving_out(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def lower(ctx: Any, op: Any, aval: Any) -> Any:
        return op if _is_ours(aval.sharding.mesh) else original(ctx, op, aval)

    return lower


def _is_ours(mesh: AbstractMesh) -> bool:
    """Whether an operation is manual over the replicas, automatic in them."""
    types = mesh.axis_types
    return (
        not _axes.isdisjoint(mesh.axis_names[:1])
        and types[0] == AxisType.Manual
        and AxisType.Explicit not in types
    )
