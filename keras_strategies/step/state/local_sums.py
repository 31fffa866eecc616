"""Accumulated gradients that each replica keeps for itself between steps.

While the steps of `fit` accumulate gradients, each replica's summand of an
accumulator is an entry of an array of shape (replicas, ...): the accumulator is
"stacked". Steps over the global batch need the sums over the replicas, and so
do the variables, which callbacks read and checkpoints save. The sums are
computed when they are read. From a sum, replica 0 gets the sum as its summand,
and the others get zeros.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.sharding import NamedSharding, PartitionSpec

from keras_strategies._types import Groups
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
        self.accumulators = [variables[i] for i in self.local_sums]
        split, whole = split_spec(mesh), replicated_spec()
        self._stack = self._jit(self.stack_accumulators, whole, split)
        self._sum = self._jit(self.sum_accumulators, split, whole)

    def _jit(
        self, fn: Callable[..., Any], before: PartitionSpec, to: PartitionSpec
    ) -> Any:
        """Maps a function of accumulators over the replicas, and compiles it.

        Args:
          fn: The function.
          before: The spec of the accumulators that it takes.
          to: The spec of those that it returns.
        """
        mapped = replica_map(
            fn,
            self._mesh,
            in_specs=(before,),
            out_specs=(replicated_spec(), to),
        )

        def program(arrays: list[Any]) -> tuple[Any, list[Any]]:
            done, results = mapped(to_device(arrays, self.accumulators))
            return done, to_host(results, self.accumulators)

        return jax.jit(program)

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

    def convert(self, state: Groups, *, is_packed: bool) -> None:
        """Stacks the accumulators of a state, or sums them; in place.

        Collective, if the accumulators are stacked and shall be sums.
        """
        group = state[OPTIMIZER]
        arrays = [group[i] for i in self.local_sums]
        if self._are_stacked(arrays) == is_packed:
            return
        if isinstance(arrays[0], jax.ShapeDtypeStruct):
            arrays = self._convert_shapes(arrays, is_packed)
        else:
            program = self._stack if is_packed else self._sum
            _, arrays = dispatch(self._mesh, program, arrays)
        for i, array in zip(self.local_sums, arrays, strict=True):
            group[i] = array

    def differs(self, number: int, place: int) -> bool:
        """Returns whether a place of a group may have an accumulator."""
        return number == OPTIMIZER and place in self.local_sums

    def read(self, number: int, arrays: list[Any]) -> tuple[Group, Group]:
        """Returns the arrays, and the sums of stacked accumulators.

        Collective, if the accumulators are stacked.
        """
        state: Any = [[] for _ in range(number)] + [list(arrays)]
        self.convert(state, is_packed=False)
        pairs = zip(arrays, state[number], strict=True)
        return arrays, [None if new is old else new for old, new in pairs]

    def _are_stacked(self, arrays: Sequence[Any]) -> bool:
        return len(arrays[0].shape) > len(self.accumulators[0].shape)

    def _convert_shapes(
        self, shapes: Sequence[Any], is_stacked: bool
    ) -> list[Any]:
        count = (self._mesh.num_replicas,) if is_stacked else ()
        return [
            jax.ShapeDtypeStruct(
                (*count, *v.shape),
                s.dtype,
                sharding=self._find_sharding(v, is_stacked),
            )
            for s, v in zip(shapes, self.accumulators, strict=True)
        ]

    def _find_sharding(
        self, variable: keras.Variable, is_stacked: bool
    ) -> NamedSharding:
        sharding, split = get_sharding(variable, self._mesh), self._mesh.split
        if not is_stacked:
            return sharding
        return split.update(memory_kind=sharding.memory_kind)

    def find_shardings(
        self, shardings: list[list[Any]]
    ) -> Sequence[Sequence[Any]]:
        """Returns the shardings of a state with stacked accumulators."""
        found = [list(group) for group in shardings]
        for i, variable in zip(self.local_sums, self.accumulators, strict=True):
            found[OPTIMIZER][i] = self._find_sharding(variable, is_stacked=True)
        return found

    def wrap_loop(self, body: Step, written: Sequence[int]) -> Step:
        """Makes mapped steps take and return stacked arrays."""
        place = written.index(OPTIMIZER)

        def call(written: Any, read: Any, data: Any) -> tuple[Any, ...]:
            written = self._change(written, place, to_device)
            written = self._change(
                written, place, lambda arrays, _: [a[0] for a in arrays]
            )
            results, written, changed = body(written, read, data)
            written = self._change(
                written, place, lambda arrays, _: [a[None] for a in arrays]
            )
            return results, self._change(written, place, to_host), changed

        return call

    def _change(
        self, written: Sequence[Group], place: int, fn: Callable[..., list[Any]]
    ) -> list[Group]:
        groups = list(map(list, written))
        sums = [groups[place][i] for i in self.local_sums]
        changed = fn(sums, self.accumulators)
        for i, array in zip(self.local_sums, changed, strict=True):
            groups[place][i] = array
        return groups

    def find_specs(self, written: Sequence[int]) -> Any:
        """Returns the specs of the written groups of a mapped program."""
        whole, split = replicated_spec(), split_spec(self._mesh)
        stacked = set(self.local_sums)
        optimizer_specs = [
            split if i in stacked else whole for i in range(self._size)
        ]
        return [optimizer_specs if i == OPTIMIZER else whole for i in written]


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
      The accumulators, or None if there are none.
    """
    if model.run_eagerly:
        return None
    flat = [v for group in variables for v in group]
    accumulators = _find_accumulators(model.optimizer, flat, mesh)
    if not accumulators:
        return None
    return LocalSums(accumulators, variables[OPTIMIZER], mesh)


def _find_accumulators(
    optimizer: Any, variables: Sequence[keras.Variable], mesh: ReplicaMesh
) -> list[keras.Variable]:
    """Finds the accumulators that need to be summed only in updates.

    Args:
      optimizer: The model's optimizer, or None.
      variables: All variables of the training step.
      mesh: The mesh of the replicas.

    Returns:
      The accumulators. Empty if the optimizer accumulates no gradients, or if
      the numbers could differ: a user-defined optimizer may use the gradients
      of each step, and a weight that is overwritten with its gradient needs the
      largest gradient.
    """
    inner = unwrap(optimizer)
    accumulators = list_accumulators(inner)
    if (
        mesh.num_replicas == 1
        or mesh.cores_per_replica > 1
        or not getattr(inner, "gradient_accumulation_steps", None)
        or not all(map(_is_of_keras, (optimizer, inner)))
        or any(isinstance(get_spec(v, mesh), Sharded) for v in variables)
        or any(getattr(v, "overwrite_with_gradient", False) for v in variables)
    ):
        return []
    return accumulators


def _is_of_keras(optimizer: object) -> bool:
    """Returns whether Keras defines all methods of an optimizer."""
    kind = type(optimizer)
    is_changed = any(callable(getattr(kind, n, None)) for n in vars(optimizer))
    return kind.__module__.split(".")[0] == "keras" and not is_changed
