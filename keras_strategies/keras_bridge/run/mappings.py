"""Mappings, and subclasses of lists and tuples, as nodes of a nest.

JAX takes dicts apart, and of other classes those alone that were registered.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from keras_strategies._types import Leaf, Tree


class _Opened:
    """Stands for a mapping until JAX has taken it apart.

    Args:
      mapping: The mapping.
      open_value: Opens one of its values.
    """

    def __init__(
        self, mapping: Mapping[Any, Any], open_value: Callable[[Any], Any]
    ) -> None:
        self.cls = type(mapping)
        self.keys = tuple(mapping)
        self.values = [open_value(mapping[key]) for key in self.keys]


def _rebuilt(
    kept: tuple[Callable[..., Any], Any], values: Iterable[Any]
) -> Any:
    cls, keys = kept
    try:
        return cls(dict(zip(keys, values, strict=True)))
    except TypeError as error:
        raise TypeError(
            "A mapping in a nest must be of a class that makes one of a dict. "
            f"Received: {cls!r}, which raises: {error}. Use a dict."
        ) from error


jax.tree_util.register_pytree_node(
    _Opened, lambda node: (node.values, (node.cls, node.keys)), _rebuilt
)


def opened(
    nest: Tree,
    is_leaf: Callable[[Any], bool],
    *,
    having: Callable[[Any], bool] | None = None,
) -> Tree:
    """Returns a nest that JAX takes apart as far as tf does.

    What is made of its structure has the classes of the mappings again; lists
    and tuples of other classes become plain ones.

    Args:
      nest: The nest.
      is_leaf: As that of `jax.tree.map`.
      having: Those without such a leaf stay leaves; None: no one does.

    Returns:
      The nest; its mappings, lists and tuples are nodes for JAX.
    """

    def open_(value: Tree) -> Tree:
        return jax.tree.map(one, value, is_leaf=is_leaf)

    def one(leaf: Leaf) -> Leaf:
        if not is_closed(leaf):
            return leaf
        if isinstance(leaf, Mapping):
            node = _Opened(leaf, open_)
        else:
            kind = list if isinstance(leaf, list) else tuple
            node = kind(map(open_, leaf))
        if having is None:
            return node
        leaves = jax.tree.leaves(node, is_leaf=is_leaf)
        return node if any(map(having, leaves)) else leaf

    return open_(nest)


def is_closed(leaf: object) -> bool:
    """Returns whether a leaf for JAX is a nest for tf."""
    return isinstance(leaf, Mapping | list | tuple)
