"""Accumulated gradients that each replica keeps for itself between steps.

While the steps of `fit` accumulate gradients, each replica's summand of an
accumulator is an entry of an array of shape (replicas, ...): the accumulator is
"stacked". Steps over the global batch need the sums over the replicas, and so
do the variables, which callbacks read and checkpoints save. The sums are
computed when they are read. From a sum, replica 0 gets the sum as its summand,
and the others get zeros.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.sharding import NamedSharding

from keras_strategies.hooks.summands import (
    list_accumulators,
    unwrap,
)
from keras_strategies.keras_bridge.step_context import Group
from keras_strategies.passes.specs import Sharded
from keras_strategies.spmd.buffers import choose_buffering, sum_arrays
from keras_strategies.spmd.dispatch import dispatch
from keras_strategies.spmd.identity import IdentitySet
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.replica_map import (
    keep_first,
    replica_map,
    replicated_spec,
    split_spec,
)
from keras_strategies.step.state.layout import OPTIMIZER, Layout, Step
from keras_strategies.variables.host_memory import to_device, to_host
from keras_strategies.variables.shardings import get_sharding, get_spec


class LocalSums(Layout):
    """The accumulators of a training step that may be stacked.

    Args:
      accumulators: The accumulators.
      variables: The group of the optimizer's variables.
      mesh: The mesh of the replicas.

    Attributes:
      accumulators: The accumulators.
    """

    def __init__(
        self,
        accumulators: Sequence[keras.Variable],
        variables: Sequence[keras.Variable],
        mesh: ReplicaMesh,
    ) -> None:
        self._mesh, self._size = mesh, len(variables)
        targets = IdentitySet(accumulators)
        self.local_sums = [i for i, v in enumerate(variables) if v in targets]
        self.places = {OPTIMIZER: self.local_sums}
        self.accumulators = [variables[i] for i in self.local_sums]
        self._stack = self._jit(self.stack_accumulators, is_stacked=True)
        self._sum = self._jit(self.sum_accumulators, is_stacked=False)

    def _jit(self, fn: Callable[..., Any], *, is_stacked: bool) -> Any:
        """Maps a function of accumulators over the replicas, and compiles it.

        Args:
          fn: The function.
          is_stacked: Whether it returns stacked accumulators, not their sums.
        """
        whole, split = replicated_spec(), split_spec(self._mesh)
        before, to = (whole, split) if is_stacked else (split, whole)
        mapped = replica_map(
            fn, self._mesh, in_specs=(before,), out_specs=(whole, to)
        )

        def program(arrays: list[Any]) -> tuple[Any, list[Any]]:
            done, results = mapped(to_device(arrays, self.accumulators))
            return done, to_host(results, self.accumulators)

        shardings = [get_sharding(v, self._mesh) for v in self.accumulators]
        if is_stacked:
            shardings = list(map(self._stack_sharding, shardings))
        return jax.jit(program, out_shardings=(None, shardings))

    def stack_accumulators(self, sums: list[Any]) -> tuple[Any, list[Any]]:
        """Returns a replica's summands; to be mapped. See `dispatch`."""
        axis = self._mesh.all_replicas
        return jnp.zeros(()), [keep_first(a, axis)[None] for a in sums]

    def sum_accumulators(self, stacked: list[Any]) -> tuple[Any, list[Any]]:
        """Returns the sums of the replicas' summands; to be mapped."""
        arrays, mesh = [a[0] for a in stacked], self._mesh
        return jnp.zeros(()), sum_arrays(
            arrays, axis=mesh.all_replicas, buffering=choose_buffering(mesh)
        )

    def convert(self, state: Mapping[int, Group], *, is_packed: bool) -> None:
        """Stacks the accumulators of a state, or sums them; in place.

        Collective, if the accumulators are stacked and shall be sums.
        """
        group = state[OPTIMIZER]
        arrays = [group[i] for i in self.local_sums]
        ndim = len(self.accumulators[0].shape)
        if (len(arrays[0].shape) > ndim) == is_packed:
            return
        program = self._stack if is_packed else self._sum
        if isinstance(arrays[0], jax.ShapeDtypeStruct):
            _, arrays = program.eval_shape(arrays)
        else:
            _, arrays = dispatch(self._mesh, program, arrays)
        for i, array in zip(self.local_sums, arrays, strict=True):
            group[i] = array

    def _stack_sharding(self, sharding: NamedSharding) -> NamedSharding:
        return self._mesh.split.update(memory_kind=sharding.memory_kind)

    def find_shardings(
        self, shardings: list[list[Any]]
    ) -> Sequence[Sequence[Any]]:
        """Returns the shardings of a state with stacked accumulators."""
        found = [list(group) for group in shardings]
        for i in self.local_sums:
            found[OPTIMIZER][i] = self._stack_sharding(found[OPTIMIZER][i])
        return found

    def wrap_loop(self, body: Step) -> Step:
        """Makes mapped steps take and return stacked arrays."""

        def call(state: Any, *args: Any) -> tuple[Any, ...]:
            groups, slots = list(map(list, state)), self.local_sums
            stacked = [groups[OPTIMIZER][i] for i in slots]
            stacked = to_device(stacked, self.accumulators)
            for i, array in zip(slots, stacked, strict=True):
                groups[OPTIMIZER][i] = array[0]
            results, new, changed = body(groups, *args)
            groups = list(map(list, new))
            stacked = [groups[OPTIMIZER][i][None] for i in slots]
            stacked = to_host(stacked, self.accumulators)
            for i, array in zip(slots, stacked, strict=True):
                groups[OPTIMIZER][i] = array
            return results, groups, changed

        return call

    def find_specs(self) -> Any:
        """Returns the specs of the state in a mapped program."""
        whole, split = replicated_spec(), split_spec(self._mesh)
        slots = [whole] * self._size
        for i in self.local_sums:
            slots[i] = split
        return [whole, whole, slots, whole]


def find_local_sums(
    model: keras.Model,
    variables: tuple[list[keras.Variable], ...],
    mesh: ReplicaMesh,
) -> LocalSums | None:
    """Finds the accumulators that train steps sum only in updates.

    Args:
      model: The model.
      variables: The groups of the train step's variables.
      mesh: The mesh of the replicas.

    Returns:
      The accumulators. None if the optimizer accumulates no gradients, or if
      the numbers could differ: a user-defined optimizer may use the gradients
      of each step, and a weight that is overwritten with its gradient needs the
      largest gradient.
    """
    optimizer, inner = model.optimizer, unwrap(model.optimizer)
    accumulators = list_accumulators(inner)
    flat = [v for group in variables for v in group]
    if (
        model.run_eagerly
        or not accumulators
        or mesh.num_replicas == 1
        or mesh.cores_per_replica > 1
        or not getattr(inner, "gradient_accumulation_steps", None)
        or not all(map(_is_of_keras, (optimizer, inner)))
        or any(isinstance(get_spec(v, mesh), Sharded) for v in flat)
        or any(getattr(v, "overwrite_with_gradient", False) for v in flat)
    ):
        return None
    return LocalSums(accumulators, variables[OPTIMIZER], mesh)


def _is_of_keras(optimizer: object) -> bool:
    """Returns whether Keras defines all methods of an optimizer."""
    kind = type(optimizer)
    is_changed = any(callable(getattr(kind, n, None)) for n in vars(optimizer))
    return kind.__module__.split(".")[0] == "keras" and not is_changed
