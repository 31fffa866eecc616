"""Names that do not depend on what was made before in a process.

Keras numbers the layers without a name ("dense", "dense_1", ...) by process:
the same function would make a model of other names each time it is called.
"""

import collections
import contextlib
from collections.abc import Iterator

from keras.src.backend.common import global_state

_COUNTS = "object_name_uids"


@contextlib.contextmanager
def fresh_names() -> Iterator[None]:
    """Lets Keras count names from their beginning for a block."""
    with names_kept():
        global_state.set_global_attribute(_COUNTS, collections.defaultdict(int))
        yield


@contextlib.contextmanager
def names_kept() -> Iterator[None]:
    """Lets Keras give the names after a block that it would have before."""
    before = global_state.get_global_attribute(_COUNTS)
    if before is not None:
        before = before.copy()
    try:
        yield
    finally:
        global_state.set_global_attribute(_COUNTS, before)
