"""Weight files of pretrained models, which are neither downloaded nor read."""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import keras
from keras.src.utils import file_utils

Note = Callable[[str], None]
"""A function that receives the name of a file that was not read."""

_APPLICATIONS = "/keras-applications/"
_WEIGHTS = ".weights.h5"


def skip_weights(note: Note) -> list[tuple[Any, str, Any]]:
    """Returns replacements of Keras's functions that load weights.

    With them, `load_weights` does nothing, and `get_file` returns the path of a
    weight file, such as those of `keras.applications`, without downloading the
    file. Models are created as usual.

    Args:
      note: Called with the name of each file.

    Returns:
      Triples of a class or module, the name of its attribute, and the value.
    """
    get_file = _wrap_get_file(keras.utils.get_file, note)

    def load_weights(
        model: keras.Model, filepath: Any, *args: object, **kwargs: object
    ) -> None:
        note(os.path.basename(str(filepath)))

    return [
        (keras.utils, "get_file", get_file),
        (file_utils, "get_file", get_file),
        (keras.Model, "load_weights", load_weights),
        (keras.saving, "load_weights", load_weights),
    ]


def _wrap_get_file(original: Callable[..., str], note: Note) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_file(*args: Any, **kwargs: Any) -> str:
        given = signature.bind(*args, **kwargs).arguments
        origin = str(given.get("origin"))
        name = os.path.basename(str(given.get("fname") or origin))
        is_application = _APPLICATIONS in origin and name.endswith(".h5")
        if is_application or name.endswith(_WEIGHTS):
            note(name)
            return name
        return original(*args, **kwargs)

    return get_file
