"""Keys of functions and arguments of `run`, and nests that JAX can flatten.

Functions with equal keys have the same program. A function that a loop creates
again in every step (a lambda, a local `def`, a partial) has the same code and
equal closure cells each time, so it need not be traced again.
"""

import dis
import functools
import inspect
import types
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import jax

from keras_strategies._types import Leaf, Tree
from keras_strategies.spmd import values
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.step.lower_step import get_shape

_CALLABLES = (types.FunctionType, types.MethodType, functools.partial)
_PLAIN = (bool, int, str, bytes, type(None))
# Bytecode instructions that look up a global name, but not an attribute.
_LOOKUPS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


class Same:
    """A key that is equal only for the same object; keeps the object alive.

    The object's id would not suffice: if another object is assigned to a
    closure's variable, the first object may be freed, and a new object may get
    the same id.

    Args:
      thing: The object.
    """

    __slots__ = ("_thing",)

    def __init__(self, thing: object) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other._thing is self._thing

    def __hash__(self) -> int:
        return id(self._thing)


def make_key(value: Any, inside: frozenset[int] = frozenset()) -> Hashable:
    """Returns a key that is the same for equal functions and values.

    Functions are equal if they have the same code, defaults and closure cells,
    and if the global names that they look up have the same values. Methods are
    equal if they are the same method of the same object. Partials are equal if
    their functions and arguments are equal. Numbers, strings, functions, and
    tuples of these are compared by value, and anything else by identity.

    Args:
      value: A function, method, partial or other object.
      inside: The ids of the functions whose keys are being made and will
        contain this key. They end the recursion for a recursive function.
    """
    if isinstance(value, float | complex):
        # `repr` distinguishes 0.0 from -0.0, and NaN equals itself.
        return type(value), repr(value)
    if isinstance(value, _PLAIN):
        return type(value), value
    if type(value) is not tuple and not isinstance(value, _CALLABLES):
        return Same(value)
    if id(value) in inside:
        return "recursion"
    key = functools.partial(make_key, inside=inside | {id(value)})
    if isinstance(value, tuple):
        return "tuple", *map(key, value)
    if isinstance(value, functools.partial):
        keywords = tuple(sorted(value.keywords.items()))
        return "partial", key(value.func), key(value.args), key(keywords)
    if inspect.ismethod(value):
        return "method", Same(value.__self__), key(value.__func__)
    code, scope = value.__code__, value.__globals__
    names = _find_global_names(code)
    used = [_make_global_key(scope, name, key) for name in names]
    used += [_make_cell_key(cell, key) for cell in value.__closure__ or ()]
    keywords = tuple(sorted((value.__kwdefaults__ or {}).items()))
    defaults = key(value.__defaults__), key(keywords)
    return "function", code, id(scope), *used, *defaults


@functools.cache
def _find_global_names(code: types.CodeType) -> tuple[str, ...]:
    """Returns the global names that code and its inner functions look up."""
    names = {
        instruction.argval: None
        for instruction in dis.get_instructions(code)
        if instruction.opname in _LOOKUPS
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= dict.fromkeys(_find_global_names(constant))
    return tuple(names)


def _make_global_key(
    scope: dict[str, Any], name: str, make: Callable[[Any], Hashable]
) -> Hashable:
    if name not in scope:
        return None  # A built-in.
    value = scope[name]
    if isinstance(value, types.FunctionType) and (
        value.__globals__ is not scope
    ):
        # The function is from another module, whose globals are assumed not to
        # change.
        return Same(value)
    return make(value)


def _make_cell_key(
    cell: types.CellType, make: Callable[[Any], Hashable]
) -> Hashable:
    try:
        return make(cell.cell_contents)
    except ValueError:  # Not assigned yet.
        return "empty"


REPLICATED = "whole"
"""The layout of a replicated argument."""
STATIC = "static"
"""The layout of an argument that is not an array. Such an argument is part of
the program."""


def describe_argument(leaf: Leaf, mesh: ReplicaMesh) -> tuple[Any, Any]:
    """Describes an argument of a program, its shape and its sharding.

    Args:
      leaf: A leaf of the arguments; see `Strategy.compile_run`.
      mesh: The mesh of the replicas.

    Returns:
      A pair: the description of the argument that `Runner` uses, and the
      argument's shape with its sharding. The second is None if the argument is
      not an array.

    Raises:
      ValueError: if the rows cannot be split evenly among the replicas.
    """
    layout, sharding, array = REPLICATED, mesh.whole, leaf
    if isinstance(leaf, values.Mirrored):
        array = leaf.array
    elif isinstance(leaf, values.PerReplica):
        values.check_home(leaf, mesh)
        if leaf.layout == values.PARTS or leaf.shapes is not None:
            raise ValueError(
                "A program can be compiled only for a batch in which all "
                f"replicas have the same number of rows. Received: {leaf!r}. "
                "Pass the shapes of such a batch."
            )
        layout, sharding, array = leaf.layout, mesh.split, leaf.arrays[0]
    elif getattr(leaf, "shape", None) is None or not hasattr(leaf, "dtype"):
        return (STATIC, None, None, make_key(leaf), leaf), None
    elif leaf.shape:
        layout, sharding, rows = values.ROWS, mesh.split, leaf.shape[0]
        if rows is not None and (rows % mesh.num_replicas or not rows):
            raise ValueError(
                "The number of rows of a distributed batch must be a multiple "
                f"of the number of replicas. Received: an array of {rows} rows "
                f"for {mesh.num_replicas} replicas. Change the number of rows, "
                "or pass `ks.Mirrored(array)` to replicate the array."
            )
    shape = get_shape(array).update(sharding=sharding)
    return (layout, shape.shape, shape.dtype, None), shape


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
    return cls(dict(zip(keys, values, strict=True)))


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
