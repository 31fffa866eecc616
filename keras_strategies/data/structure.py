"""What a batch is made of, as a text that processes can tell each other."""

import collections
import importlib
import json
from typing import Any

import jax
import numpy as np

Tree = Any


def spec_of(batch: Tree) -> str:
    """The structure of a nest, and its arrays' dtypes and shapes but rows."""
    return json.dumps(_encoded(batch))


def empty(spec: str) -> Tree:
    """A nest of that structure, of arrays without rows."""
    return _decoded(json.loads(spec))


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

    def kinds(text: str) -> Any:
        leaves, nest = jax.tree.flatten(empty(text))
        return nest, [
            (leaf.ndim, jax.dtypes.canonicalize_dtype(leaf.dtype))
            for leaf in leaves
        ]

    return spec == other or kinds(spec) == kinds(other)


def _encoded(value: Any) -> Any:
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
        # Now, where all processes hear of it: later, only one without rows
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


def _decoded(value: Any) -> Any:
    if value is None:
        return None
    if "dict" in value:
        return {key: _decoded(item) for key, item in value["dict"]}
    if "ordered" in value:
        items = [(key, _decoded(item)) for key, item in value["ordered"]]
        return collections.OrderedDict(items)
    if "named" in value:
        return _named(value["named"])(*map(_decoded, value["items"]))
    if "list" in value:
        return [_decoded(item) for item in value["list"]]
    if "tuple" in value:
        return tuple(_decoded(item) for item in value["tuple"])
    dtype = jax.numpy.dtype(value["dtype"])
    return np.zeros((0, *value["shape"]), dtype)


def _named(name: str) -> Any:
    """The class of a named tuple, which another process told of."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        raise TypeError(
            "A process without rows needs the class of the others' batches. "
            f"Received: a named tuple {path}, which is not found in {module}. "
            "Define it at the top of a module, or yield tuples."
        ) from None
    return found
