"""The structure, row shapes and dtypes of a batch, as text to compare."""

import collections
import json

import jax
import numpy as np

from keras_strategies._types import Array, Shape, Tree
from keras_strategies.cluster.array_kinds import is_shape, parse_dtype
from keras_strategies.cluster.exchange.message_forms import Form, has_form
from keras_strategies.cluster.untrusted import load_json

_MAX_CHARACTERS = 1 << 20
# The types of an encoded dict entry: its key and its value.
_PAIR = (str | int | float | bool, object)
# The forms of parts of a description, by their keys.
_FORMS: dict[tuple[str, ...], Form] = {
    ("dict",): {"dict": [_PAIR]},
    ("ordered",): {"ordered": [_PAIR]},
    ("list",): {"list": list},
    ("tuple",): {"tuple": list},
    ("dtype", "shape"): {"dtype": parse_dtype, "shape": is_shape},
}


def make_spec(batch: Tree) -> str:
    """Returns the structure, dtypes and row shapes of a batch as text."""
    return json.dumps(_encode(batch))


def make_empty(spec: str) -> Tree:
    """Returns a batch that has the structure in `spec`, but no rows.

    Args:
      spec: The text that `make_spec` returned. It may come from another process
        or a file, and is not trusted: reading it imports and calls nothing.

    Raises:
      ValueError: if `spec` is malformed.
    """
    try:
        document = load_json(spec, max_characters=_MAX_CHARACTERS)
    except ValueError as error:
        raise _make_error(str(error)) from None
    return _decode(document)


def format_spec(spec: str) -> str:
    """Formats a spec for messages, such as "float32[?, 3]"."""
    nest = jax.tree.map(
        lambda leaf: (
            f"{leaf.dtype}[{', '.join(['?', *map(str, leaf.shape[1:])])}]"
        ),
        make_empty(spec),
    )
    return str(nest)


def find_row_kind(
    batch: Tree,
) -> tuple[jax.tree_util.PyTreeDef, list[tuple[Shape, np.dtype]]]:
    """Returns a batch's structure, and the shape and dtype of one row."""
    leaves, nest = jax.tree.flatten(batch)
    return nest, [(leaf.shape[1:], leaf.dtype) for leaf in leaves]


def resize_batch(batch: Tree, rows: int) -> Tree:
    """Returns a batch with `rows` rows, to build a model with.

    Only the shapes matter for building, so rows may be copies of one row.
    """

    def resize(leaf: Array) -> Array:
        if len(leaf) == rows:
            return leaf
        row = leaf[0] if len(leaf) else np.zeros(leaf.shape[1:], leaf.dtype)
        return np.broadcast_to(row, (rows, *leaf.shape[1:]))

    return jax.tree.map(resize, batch)


def _encode(value: Tree) -> object:
    if value is None:
        return None
    if type(value) is dict:
        return {"dict": [[key, _encode(value[key])] for key in sorted(value)]}
    if type(value) is collections.OrderedDict:
        # JAX flattens an OrderedDict in the order of its keys.
        return {"ordered": [[k, _encode(item)] for k, item in value.items()]}
    if type(value) in (list, tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(item) for item in value]}
    if not hasattr(value, "dtype"):
        raise TypeError(
            "With several processes, a batch must consist of nested dicts, "
            "lists, tuples and arrays. Received: a batch with an object of "
            f"type {type(value).__name__}. Convert this object."
        )
    return {"dtype": str(value.dtype), "shape": list(np.shape(value)[1:])}


def _decode(value: object) -> Tree:
    if value is None:
        return None
    kind: tuple[str, ...] = ()
    if isinstance(value, dict):
        kind = tuple(sorted(value))
    if not isinstance(value, dict) or not has_form(value, _FORMS.get(kind)):
        raise _make_error("a part of it describes neither a nest nor an array")
    if "dtype" in value:
        try:
            return np.zeros((0, *value["shape"]), parse_dtype(value["dtype"]))
        except ValueError:
            raise _make_error("an array is too large") from None
    (items,) = value.values()
    if kind == ("list",):
        return list(map(_decode, items))
    if kind == ("tuple",):
        return tuple(map(_decode, items))
    nest = collections.OrderedDict((k, _decode(v)) for k, v in items)
    if len(nest) < len(items):
        raise _make_error("a key of a dict is repeated")
    return nest if kind == ("ordered",) else dict(nest)


def _make_error(problem: str) -> ValueError:
    return ValueError(
        "The description of a batch's structure, from another process or a "
        f"file, must be valid. This one is not: {problem}. Check that no other "
        "program uses the job's port, and that no file was changed."
    )
