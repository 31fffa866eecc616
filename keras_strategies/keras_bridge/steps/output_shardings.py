"""Output shardings of programs: results stay where the next call wants them.

With several cores per replica, XLA chooses which results it divides over the
cores, and the next call would compile another program for them. With one core
a replica there is nothing to choose, and programs stay as they are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._types import Tree
from keras_strategies.keras_bridge.step_context import Group
from keras_strategies.keras_bridge.variables.shardings import (
    any_sharded,
    sharding_of,
)

Program = Callable[..., Any]
Variables = Sequence[keras.Variable]


def step(
    body: Program,
    written: Sequence[Variables],
    read: Sequence[Variables],
    mesh: ReplicaMesh,
    results: NamedSharding,
) -> Program:
    """A step: `(...) -> (results, new values, changed values by position)`.

    Args:
      body: The step.
      written: Groups of variables, of the new values.
      read: Groups of variables, of the changed values.
      mesh: The replicas.
      results: The sharding of logs or outputs.
    """

    def with_shardings(*args: Tree) -> tuple[Any, ...]:
        found, new, changed = body(*args)
        new = [
            _values(*group, mesh) for group in zip(new, written, strict=True)
        ]
        changed = [
            _changes(*group, mesh) for group in zip(changed, read, strict=True)
        ]
        return _whole(found, results), new, changed

    return with_shardings


def run(program: Program, variables: Variables, mesh: ReplicaMesh) -> Program:
    """A program of `RunProgram`.

    Args:
      program: It returns results and copies of variables, split over the
        replicas; sums and comparisons; values; and what holds no arrays.
      variables: Those of the values.
      mesh: The replicas.
    """
    if mesh.cores_per_replica == 1 and not any_sharded(variables, mesh):
        return program

    def with_shardings(*args: Tree) -> tuple[Any, ...]:
        results, copies, sums, same, values, report = program(*args)
        split, whole = mesh.split, mesh.whole
        return (
            _whole(results, split),
            _whole(copies, split),
            _whole(sums, whole),
            _whole(same, whole),
            _values(values, variables, mesh),
            report,
        )

    return with_shardings


def _whole(values: Tree, sharding: NamedSharding) -> Tree:
    return jax.tree.map(
        lambda a: jax.lax.with_sharding_constraint(a, sharding), values
    )


def _values(
    values: Group, variables: Variables, mesh: ReplicaMesh
) -> list[Any]:
    return [
        jax.lax.with_sharding_constraint(value, sharding_of(variable, mesh))
        for value, variable in zip(values, variables, strict=True)
    ]


def _changes(
    changes: dict[str, Any], variables: Variables, mesh: ReplicaMesh
) -> dict[str, Any]:
    changed = [variables[int(k)] for k in changes]
    values = _values(list(changes.values()), changed, mesh)
    return dict(zip(changes, values, strict=True))
