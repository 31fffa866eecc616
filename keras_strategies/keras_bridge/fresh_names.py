"""Automatic names that do not depend on objects created earlier.

Keras numbers unnamed layers ("dense", "dense_1", ...) per process. So a
function that creates a model would give its layers different names each time
it is called.
"""

import collections
import contextlib
from collections.abc import Iterator

from keras.src.backend.common import global_state

_COUNTS = "object_name_uids"


@contextlib.contextmanager
def fresh_names() -> Iterator[None]:
    """Restarts Keras's numbering of unnamed objects while the block runs."""
    with restore_names():
        global_state.set_global_attribute(_COUNTS, collections.defaultdict(int))
        yield


@contextlib.contextmanager
def restore_names() -> Iterator[None]:
    """Restores Keras's counts of automatic names when the block ends."""
    before = global_state.get_global_attribute(_COUNTS)
    if before is not None:
        before = before.copy()
    try:
        yield
    finally:
        global_state.set_global_attribute(_COUNTS, before)
