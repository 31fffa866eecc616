"""A patch of JAX's lowering that omits empty sharding constraints.

In a mapped program that is manual over the replicas and automatic over each
replica's cores, jax 0.10 emits a sharding constraint after every operation,
with all dimensions open (unspecified). The constraint itself has no effect, but
it hides constants from XLA's pass that duplicates a constant for each use. The
TPU compiler then shards a constant as one of its uses requires, and propagates
this sharding to all values of the same shape, so activations and weights are
gathered unnecessarily. For example, the train step of a small MLP gets 15
all-gathers although it needs none. JAX's authors intend to omit these
constraints (a TODO in the source). See
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
# Names of the replica axes for which constraints are omitted.
_axes: set[str] = set()


def leave_out_open_constraints(axis: str) -> None:
    """Omits open sharding constraints from programs that are mapped later.

    Only programs of `replica_map` are affected, not programs that the user maps
    or compiles with JAX. Does nothing if this version of JAX does not emit such
    constraints.

    Args:
      axis: Name of the replica axis.
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
    """Returns whether a program's mesh was set up by `replica_map`.

    Such a mesh is manual over the replicas and automatic over their cores.
    """
    types = mesh.axis_types
    return (
        not _axes.isdisjoint(mesh.axis_names[:1])
        and types[0] == AxisType.Manual
        and AxisType.Explicit not in types
    )
