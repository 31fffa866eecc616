"""The structure of the results of a function given to `run`."""

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
    """A report of the trace of a `RunProgram`.

    The program returns it as a static result, in addition to its arrays.

    Attributes:
      structure: The structure of the user's results.
      constants: For each leaf of the results, None if it is an array, and else
        a list of its values as returned by `merge_constants`.
      summed: Positions of the arrays that are also summed over the replicas.
      unchecked: Positions of written variables to which all replicas must
        write the same value. The caller checks that.
      shapes: For each replica, the shapes of its arrays; or None if all
        replicas have the same shapes.
    """

    structure: Any
    constants: list[list[Any] | None]
    summed: list[int]
    unchecked: list[int]
    shapes: list[list[tuple[int, ...]]] | None

    def shapes_of(self, position: int) -> tuple[tuple[int, ...], ...] | None:
        """Returns an array's shape on each replica; None if all are equal."""
        if self.shapes is None:
            return None
        shapes = tuple(of_replica[position] for of_replica in self.shapes)
        return shapes if len(set(shapes)) > 1 else None


def read_constant(leaf: object) -> list[Any] | None:
    """Returns the value of a result that is not an array, in a list.

    Returns None if the result is an array.

    Raises:
      TypeError: if the result is neither an array nor a supported value.
    """
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return None
    if leaf is None or isinstance(
        leaf, bool | int | float | complex | str | bytes | keras.Variable
    ):
        return [leaf]
    raise TypeError(
        "A function given to `run` must return arrays, numbers, strings or "
        "None, in nests of tuples, lists and dicts. Received: a result of type "
        f"{type(leaf).__name__}. Return its arrays instead."
    )


def merge_constants(structures: list[Any]) -> list[list[Any] | None]:
    """Combines the results that are not arrays, from all variants of a call.

    A function is traced in several variants if the replicas have different
    numbers of rows. In debug mode the call of each replica is a variant.

    Args:
      structures: Each variant's `BranchFacts.structure`.

    Returns:
      A list with an entry for each leaf: None if the leaf is an array; a list
      of one value if all variants returned the same; else a list of the
      numbers that the variants returned.

    Raises:
      ValueError: if the variants return nests of different structures.
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


def rebuild_nest(
    structure: PyTreeDef,
    constants: list[list[Any] | None],
    arrays: Iterable[Any],
    differing: Callable[[list[Any]], Any],
) -> Tree:
    """Rebuilds the nest of results that the function returned.

    Args:
      structure: The structure of the nest.
      constants: The result of `merge_constants`.
      arrays: The results that are arrays.
      differing: A function that makes one result from a list of the different
        numbers that the variants returned.

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
        "All replicas must return results of the same structure. Received: "
        f"{[str(tree) for tree in trees]} with leaves {leaves}. Return the "
        "same nest on every replica."
    )
