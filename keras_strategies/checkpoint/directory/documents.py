"""The JSON document of a checkpoint on disk, which is not trusted."""

import os
import pathlib
from typing import Any

from keras_strategies.checkpoint.directory.corruption import damaged
from keras_strategies.checkpoint.directory.files import load_object
from keras_strategies.checkpoint.directory.names import RUN
from keras_strategies.cluster.array_kinds import is_dtype_name, is_shape
from keras_strategies.cluster.exchange.message_forms import fault_of

VERSION = 1
"""The version of the documents that are read here."""

MAX_BYTES = 64 << 20
"""The longest document that is read."""


def read_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a checkpoint holds beside its arrays.

    Args:
      path: The checkpoint's folder.

    Returns:
      The document. Of `VERSION` it has "variables", the shape and dtype of
      each array by group and name, and "state"; of another version only
      "version" is known.

    Raises:
      DamagedCheckpoint: it is not there, or is no document.
    """
    path = pathlib.Path(path)
    document = load_object(path, RUN, MAX_BYTES, "document")
    if "version" not in document:
        raise damaged(path, RUN, "it has no version")
    if document["version"] == VERSION and not _is_complete(document):
        raise damaged(path, RUN, "it has other entries than a document")
    return document


def _is_complete(document: dict[str, Any]) -> bool:
    if fault_of(document, {"state": object, "variables": dict}) is not None:
        return False
    groups = document["variables"].values()
    return all(isinstance(group, dict) for group in groups) and all(
        fault_of(entry, (is_shape, is_dtype_name)) is None
        for group in groups
        for entry in group.values()
    )
