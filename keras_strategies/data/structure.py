"""What a batch is made of, as a text that processes can tell each other."""

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
    if isinstance(value, dict):
        return {"dict": [[key, _encoded(value[key])] for key in sorted(value)]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encoded(item) for item in value]}
    return {"dtype": str(value.dtype), "shape": list(np.shape(value)[1:])}


def _decoded(value: Any) -> Any:
    if value is None:
        return None
    if "dict" in value:
        return {key: _decoded(item) for key, item in value["dict"]}
    if "list" in value:
        return [_decoded(item) for item in value["list"]]
    if "tuple" in value:
        return tuple(_decoded(item) for item in value["tuple"])
    dtype = jax.numpy.dtype(value["dtype"])
    return np.zeros((0, *value["shape"]), dtype)
