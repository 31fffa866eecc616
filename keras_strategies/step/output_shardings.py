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


def constrain_values(values: Tree, shardings: Tree) -> Tree:
    """Constrains the shardings of values, for use in a program.

    Args:
      values: A nest of arrays. Those in the memory of the host stay as they
        are.
      shardings: The shardings, as a nest of the same structure or a prefix of
        it.
    """
    return jax.tree.map(
        _constrain_array, values, jax.tree.broadcast(shardings, values)
    )


def _constrain_array(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    if is_in_host_memory(array):
        return array
    return jax.lax.with_sharding_constraint(array, on_device(sharding))


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
        outputs = program(written, copies, to_device(seen, read), *args)
        split, whole = mesh.split, mesh.whole
        new = [get_sharding(v, mesh) for v in variables]
        shardings = split, split, whole, whole, new, whole
        *others, values, report = constrain_values(outputs, shardings)
        return *others, to_host(values, variables), report

    return with_shardings
