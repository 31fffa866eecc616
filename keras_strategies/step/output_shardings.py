"""Sets the output shardings of programs to those that the next call needs.

Programs compute with values in the memory of the devices. The values of
variables on the host (`FullySharded(offload="optimizer")`) are moved there
first, and back at the end.

With several cores per replica, XLA would choose how to shard results over the
cores, and the next call would be compiled again for these shardings. With one
core per replica there is no choice, so programs stay unchanged.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
from jax.sharding import NamedSharding

from keras_strategies._types import Tree
from keras_strategies.keras_bridge.step_context import Group
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.variables.host_memory import (
    is_in_host_memory,
    to_device,
    to_host,
)
from keras_strategies.variables.shardings import (
    any_sharded,
    get_sharding,
    is_on_host,
    on_device,
)

Program = Callable[..., Any]
Variables = Sequence[keras.Variable]
Shardings = Sequence[NamedSharding | None]


def constrain_step(
    body: Program,
    written: Sequence[Shardings],
    read: Sequence[Shardings],
    results: NamedSharding,
) -> Program:
    """Constrains the shardings of a step's outputs.

    Args:
      body: The step: `(...) -> (results, new values, changed values)`.
      written: The shardings of the groups of new values; None for a place
        without a value.
      read: The shardings of the groups that the changed values belong to.
      results: The sharding of the step's logs or outputs.
    """

    def with_shardings(*args: Tree) -> tuple[Any, ...]:
        outputs, new, changed = body(*args)
        new = list(map(_constrain_group, new, written))
        changed = list(map(_constrain_group, changed, read))
        return _constrain(outputs, results), new, changed

    return with_shardings


def constrain_run(
    program: Program, variables: Variables, read: Variables, mesh: ReplicaMesh
) -> Program:
    """Constrains the shardings of the outputs of a `RunProgram`'s program.

    Args:
      program: A function that returns six things: the results and the
        variables' separate copies, both split over the replicas; the sums of
        results; the outcomes of comparisons; the new values of variables; and a
        report without arrays.
      variables: The variables that the new values belong to.
      read: The variables that are only read.
      mesh: The mesh of the replicas.
    """
    has_placed = any_sharded(variables, mesh) or any(
        map(is_on_host, [*variables, *read])
    )
    if mesh.cores_per_replica == 1 and not has_placed:
        return program

    def with_shardings(
        written: Group, copies: Group, seen: Group, *args: Tree
    ) -> tuple[Any, ...]:
        written = to_device(written, variables[: len(written)])
        results, copies, sums, same, values, report = program(
            written, copies, to_device(seen, read), *args
        )
        split, replicated = mesh.split, mesh.whole
        shardings = [get_sharding(v, mesh) for v in variables]
        return (
            _constrain(results, split),
            _constrain(copies, split),
            _constrain(sums, replicated),
            _constrain(same, replicated),
            to_host(_constrain_group(values, shardings), variables),
            report,
        )

    return with_shardings


def _constrain(values: Tree, sharding: NamedSharding | None) -> Tree:
    if sharding is None:
        return None
    return jax.tree.map(
        lambda a: (
            a
            if is_in_host_memory(a)
            else jax.lax.with_sharding_constraint(a, on_device(sharding))
        ),
        values,
    )


def _constrain_group(values: Group, shardings: Shardings) -> list[Any]:
    return [_constrain(*pair) for pair in zip(values, shardings, strict=True)]
