"""The structure of a replica function's results, known when it is traced."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import jax
import keras
import numpy as np
from jax.tree_util import PyTreeDef

from keras_strategies._types import Leaf, Tree


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TraceReport:
    """What the trace of a run program found; a result of it without arrays.

    Attributes:
      structure: The nest of the user's results.
      constants: For each leaf None if it is an array; else its value, or of
        the variants' values, see `regrouped_constants`.
      summed: Which arrays are summed over the replicas beside.
      unchecked: Positions of written variables that all replicas must have
        written alike.
      shapes: Each replica's shapes of the arrays; None where all have one.
    """

    structure: Any
    constants: list[list[Any] | None]
    summed: list[int]
    unchecked: list[int]
    shapes: list[list[tuple[int, ...]]] | None

    def shapes_of(self, position: int) -> tuple[tuple[int, ...], ...] | None:
        """Each replica's shape of an array; None where they are one."""
        if self.shapes is None:
            return None
        shapes = tuple(of_replica[position] for of_replica in self.shapes)
        return shapes if len(set(shapes)) > 1 else None


def constant_of(leaf: object) -> list[Any] | None:
    """Returns None for a result that is an array, else a list of its value.

    Raises:
      TypeError: neither.
    """
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return None
    if leaf is None or isinstance(
        leaf, bool | int | float | complex | str | bytes | keras.Variable
    ):
        return [leaf]
    raise TypeError(
        "A function given to `run` returns arrays, numbers, strings or None, "
        "in nests of tuples, lists and dicts. Received: a result of type "
        f"{type(leaf).__name__}. Return its arrays instead."
    )


def regrouped_constants(structures: list[Any]) -> list[list[Any] | None]:
    """The results that are no arrays, of the variants of a function.

    Args:
      structures: Each variant's `Note.structure`.

    Returns:
      For each leaf None if it is an array; a list of its one value; or of the
      variants' numbers, where they differ.

    Raises:
      ValueError: the variants return nests of different structures.
    """
    trees = [tree for tree, _ in structures]
    kinds = [[c is None for c in constants] for _, constants in structures]
    if any(t != trees[0] for t in trees) or any(k != kinds[0] for k in kinds):
        _refuse(trees, kinds)
    result: list[list[Any] | None] = []
    for column in zip(*[constants for _, constants in structures], strict=True):
        if column[0] is None:
            result.append(None)
            continue
        values = [value for (value,) in column]
        if all(v is values[0] or _is_same(v, values[0]) for v in values):
            result.append(values[:1])
        elif all(isinstance(v, bool | int | float | complex) for v in values):
            result.append(values)
        else:
            _refuse(trees, values)
    return result


def nest_of(
    structure: PyTreeDef,
    constants: list[list[Any] | None],
    arrays: Iterable[Any],
    differing: Callable[[list[Any]], Any],
) -> Tree:
    """The results as the function returned them.

    Args:
      structure: Their nest.
      constants: What `regrouped_constants` returned.
      arrays: Those of them that are arrays.
      differing: Makes one result of the variants' different numbers.

    Returns:
      A nest of arrays, `PerReplica` and constants.
    """
    rest = iter(arrays)

    def leaf(values: list[Any] | None) -> Leaf:
        if values is None:
            return next(rest)
        return values[0] if len(values) == 1 else differing(values)

    return jax.tree.unflatten(structure, map(leaf, constants))


def _is_same(a: object, b: object) -> bool:
    is_plain = isinstance(a, bool | int | float | complex | str | bytes)
    return is_plain and type(a) is type(b) and a == b


def _refuse(trees: list[Any], leaves: list[Any]) -> NoReturn:
    raise ValueError(
        "All replicas must return results of one structure. Received: "
        f"{[str(tree) for tree in trees]} with leaves {leaves}. Return the "
        "same nest on every replica."
    )
