"""The JSON document of a checkpoint on disk, which is not trusted."""

import os
import pathlib
from typing import Any

from keras_strategies.checkpoint.directory.files import (
    load_object,
    make_damage_error,
)
from keras_strategies.checkpoint.directory.names import RUN
from keras_strategies.cluster.array_kinds import is_dtype_name, is_shape
from keras_strategies.cluster.exchange.message_forms import has_form

VERSION = 1
"""The version of documents that this code reads and writes."""

MAX_BYTES = 64 << 20
"""The maximum length of a document, in bytes."""


def read_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a checkpoint's document: everything except its arrays.

    Args:
      path: The checkpoint's directory.

    Returns:
      The document. It always has the key "version". If this is `VERSION`, the
      document also has the keys "variables", with the shape and dtype of each
      array by group and name, and "state". A document of another version may
      have any other keys.

    Raises:
      DamagedCheckpoint: if the document is missing or not valid.
    """
    path = pathlib.Path(path)
    document = load_object(path, RUN, MAX_BYTES, "document")
    if "version" not in document:
        raise make_damage_error(path, RUN, "it has no version")
    if document["version"] == VERSION and not _is_complete(document):
        raise make_damage_error(
            path, RUN, "its entries are not those of a checkpoint's document"
        )
    return document


def _is_complete(document: dict[str, Any]) -> bool:
    if not has_form(document, {"state": object, "variables": dict}):
        return False
    return all(
        isinstance(group, dict)
        and has_form([*group.values()], [(is_shape, is_dtype_name)])
        for group in document["variables"].values()
    )
