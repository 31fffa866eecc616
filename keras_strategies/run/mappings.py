"""Mappings, and subclasses of lists and tuples, as nodes of a pytree.

JAX flattens dicts, lists and tuples, but objects of other classes only if the
class is registered with JAX.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from keras_strategies._types import Leaf, Tree


class _Opened:
    """A pytree node that replaces a mapping whose class JAX does not know.

    When JAX unflattens the nest, the node becomes a mapping of the original
    class again.

    Args:
      mapping: The mapping.
      open_value: A function that turns a value of the mapping into a nest that
        JAX can flatten.
    """

    def __init__(
        self, mapping: Mapping[Any, Any], open_value: Callable[[Any], Any]
    ) -> None:
        self.cls = type(mapping)
        self.keys = tuple(mapping)
        self.values = [open_value(mapping[key]) for key in self.keys]


def _rebuild(
    kept: tuple[Callable[..., Any], Any], values: Iterable[Any]
) -> Any:
    cls, keys = kept
    try:
        return cls(dict(zip(keys, values, strict=True)))
    except TypeError as error:
        raise TypeError(
            "The class of a mapping in a nest must accept a dict, so that the "
            f"mapping can be created again. Received: {cls!r}, which raises: "
            f"{error}. Use a plain dict."
        ) from error


jax.tree_util.register_pytree_node(
    _Opened, lambda node: (node.values, (node.cls, node.keys)), _rebuild
)


def open_nest(
    nest: Tree,
    is_leaf: Callable[[Any], bool],
    *,
    having: Callable[[Any], bool] | None = None,
) -> Tree:
    """Makes a nest in which JAX flattens everything that TensorFlow flattens.

    By default, JAX treats mappings that are not dicts, and objects of
    subclasses of list and tuple, as leaves. Unflattening the structure
    restores the classes of mappings. Objects of subclasses of list and tuple
    become plain lists and tuples.

    Args:
      nest: The nest.
      is_leaf: The same as in `jax.tree.map`.
      having: A function from a leaf to a boolean. A mapping, list or tuple in
        which it is true for no leaf stays a leaf itself. If None, all
        mappings, lists and tuples are flattened.

    Returns:
      The nest, in which mappings, lists and tuples are nodes for JAX.
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
    """Returns whether TensorFlow would flatten an object that JAX does not."""
    return isinstance(leaf, Mapping | list | tuple)
