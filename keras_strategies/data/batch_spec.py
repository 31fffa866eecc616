"""The structure, shapes and dtypes of a batch, as a text to compare."""

import collections
import functools
import inspect
import json
import sys
from types import ModuleType
from typing import Any

import jax
import numpy as np

from keras_strategies._types import Array, Shape, Tree
from keras_strategies.cluster.array_kinds import dtype_named, is_shape
from keras_strategies.cluster.exchange.message_forms import fault_of
from keras_strategies.cluster.untrusted import load_json

_MAX_CHARACTERS = 1 << 20
_MAX_NAME = 1024
# An entry of a dict.
_PAIR = (str | int | float | bool, object)


def spec_of(batch: Tree) -> str:
    """The structure of a nest, and its arrays' dtypes and shapes but rows."""
    return json.dumps(_encoded(batch))


def empty(spec: str, *, has_classes: bool = True) -> Tree:
    """A nest of that structure, of arrays without rows.

    Args:
      spec: What `spec_of` gave; it may come from another process or a file,
        and say anything. Nothing is imported and nothing is called for it.
      has_classes: Whether it may name classes of named tuples: those that are
        defined at the top of a module that was imported already.

    Raises:
      ValueError: it is no structure.
      TypeError: the class of a named tuple is not here.
    """
    try:
        document = load_json(spec, max_characters=_MAX_CHARACTERS)
    except ValueError as error:
        raise _no_structure(str(error)) from None
    return _decoded(document, has_classes)


def shown(spec: str) -> str:
    """The structure as users write it: ("float32[?, 3]", "int64[?]")."""
    nest = jax.tree.map(
        lambda leaf: (
            f"{leaf.dtype}[{', '.join(['?', *map(str, leaf.shape[1:])])}]"
        ),
        empty(spec),
    )
    return str(nest)


def is_like(spec: str, other: str) -> bool:
    """Whether structure, ranks and dtypes are the same on the devices."""
    return spec == other or kinds(empty(spec)) == kinds(empty(other))


def kinds(
    batch: Tree,
) -> tuple[jax.tree_util.PyTreeDef, list[tuple[int, np.dtype]]]:
    """The structure, and the ranks and dtypes of its arrays on the devices.

    Types that are one there (float64 is float32) are one here.
    """
    leaves, nest = jax.tree.flatten(batch)
    return nest, [
        (leaf.ndim, jax.dtypes.canonicalize_dtype(leaf.dtype))
        for leaf in leaves
    ]


def rows_kind(
    batch: Tree,
) -> tuple[jax.tree_util.PyTreeDef, list[tuple[Shape, np.dtype]]]:
    """The structure, and the shapes and dtypes of its arrays' rows."""
    leaves, nest = jax.tree.flatten(batch)
    return nest, [(leaf.shape[1:], leaf.dtype) for leaf in leaves]


def with_rows(batch: Tree, rows: int) -> Tree:
    """Returns a batch of `rows` rows to build a model on: only shapes count."""

    def with_them(leaf: Array) -> Array:
        if len(leaf) == rows:
            return leaf
        row = leaf[0] if len(leaf) else np.zeros(leaf.shape[1:], leaf.dtype)
        return np.broadcast_to(row, (rows, *leaf.shape[1:]))

    return jax.tree.map(with_them, batch)


def summary(batch: Tree) -> str:
    """The types and shapes of a batch, for messages."""
    return str(
        jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", batch)
    )


def _encoded(value: Tree) -> object:
    if value is None:
        return None
    if type(value) is dict:
        return {"dict": [[key, _encoded(value[key])] for key in sorted(value)]}
    if type(value) is collections.OrderedDict:
        # JAX keeps the order of its keys.
        return {"ordered": [[k, _encoded(item)] for k, item in value.items()]}
    if type(value) in (list, tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encoded(item) for item in value]}
    if hasattr(value, "_fields"):
        named = type(value)
        name = f"{named.__module__}:{named.__qualname__}"
        # Now, where all processes receive it: later, only one without rows
        # would look for the class, and the others wait for it.
        _named(name)
        return {"named": name, "items": [_encoded(item) for item in value]}
    if not hasattr(value, "dtype"):
        raise TypeError(
            "On several processes a batch is a nest of dicts, lists, tuples "
            f"and arrays. Received: a {type(value).__name__} in it. Make it "
            "one of those."
        )
    return {"dtype": str(value.dtype), "shape": list(np.shape(value)[1:])}


def _decoded(value: object, has_classes: bool) -> Tree:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _no_structure("a part of it is no object")
    decode = functools.partial(_decoded, has_classes=has_classes)
    match sorted(value):
        case ["dict"]:
            return {key: decode(item) for key, item in _pairs(value["dict"])}
        case ["ordered"]:
            pairs = _pairs(value["ordered"])
            return collections.OrderedDict((k, decode(v)) for k, v in pairs)
        case ["list"]:
            return list(map(decode, _items(value["list"])))
        case ["tuple"]:
            return tuple(map(decode, _items(value["tuple"])))
        case ["items", "named"] if has_classes:
            named = _named(value["named"])
            items = list(map(decode, _items(value["items"])))
            if len(items) != len(_fields(named) or ()):
                raise _no_structure("a named tuple has other fields")
            # Not by the class, which may have a `__new__` of its own.
            return tuple.__new__(named, items)
        case ["dtype", "shape"]:
            return _without_rows(value["dtype"], value["shape"])
    raise _no_structure("a part of it is no nest and no array")


def _items(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise _no_structure("the items of a nest are no array of JSON")
    return value


def _pairs(value: object) -> list[tuple[Any, Any]]:
    fault = fault_of(value, [_PAIR], "a dict")
    if fault is not None:
        raise _no_structure(fault)
    pairs = [(key, item) for key, item in _items(value)]
    if len({key for key, _ in pairs}) < len(pairs):
        raise _no_structure("it says a key of a dict twice")
    return pairs


def _without_rows(name: object, shape: object) -> np.ndarray:
    if not is_shape(shape):
        raise _no_structure("a shape is not one of an array")
    dtype = dtype_named(name)
    if dtype is None:
        raise _no_structure("a dtype is not one that `spec_of` writes")
    try:
        return np.zeros((0, *shape), dtype)
    except ValueError:
        raise _no_structure("an array is too large") from None


def _no_structure(fault: str) -> ValueError:
    return ValueError(
        "The structure of a batch is sent as `spec_of` writes it. Received: "
        f"a text of which {fault}. Look for another program on the job's "
        "port, or a file that was changed."
    )


def _fields(named: object) -> tuple[str, ...] | None:
    """The names of a named tuple's fields; None of another class."""
    if not isinstance(named, type) or not issubclass(named, tuple):
        return None
    fields = inspect.getattr_static(named, "_fields", None)
    is_named = isinstance(fields, tuple) and all(
        isinstance(field, str) for field in fields
    )
    return fields if is_named else None


def _named(name: object) -> type[tuple[Any, ...]]:
    """The class of a named tuple that another process has named.

    It is looked up where it was imported already, in what modules and classes
    hold: a module is not imported for it, and none is asked.
    """
    if not isinstance(name, str) or len(name) > _MAX_NAME:
        raise _no_structure("the class of a named tuple has no name")
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        held = vars(found) if isinstance(found, type | ModuleType) else {}
        found = held.get(part)
    is_it = (
        _fields(found) is not None
        and inspect.getattr_static(found, "__module__", None) == module
        and found.__qualname__ == path
    )
    if not is_it:
        raise TypeError(
            "A process without rows needs the class of the others' batches. "
            f"Received: a named tuple {ascii(path)}, which is not found in "
            f"{ascii(module)}. Define it at the top of a module that all "
            "processes import, or yield tuples."
        )
    return found
