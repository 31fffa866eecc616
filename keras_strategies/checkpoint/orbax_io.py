"""Options for reading and writing checkpoints with Orbax."""

import functools
import importlib
import logging
import os
import pathlib
import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from keras_strategies._types import Array
from keras_strategies.checkpoint.contents import Arrays
from keras_strategies.checkpoint.directory.verify import guard_restore

_logger = logging.getLogger(__name__)


def wait_at_exit(storage: Any) -> None:
    """Makes exit wait for a pending save, and log an error if it fails."""
    _register()
    _open.add(storage)


_open: weakref.WeakSet[Any] = weakref.WeakSet()


@functools.cache
def _register() -> None:
    """Registers a function to run before Python shuts down its thread pools.

    `atexit` handlers run too late: `concurrent.futures` shuts down its pools
    in a function that it registers with `threading._register_atexit` on
    import. These functions run in reverse order of registration, so
    `concurrent.futures` must be imported first.
    """
    importlib.import_module("concurrent.futures.thread")
    threading._register_atexit(_wait_for_all)  # pyright: ignore
    # A forked child does not have its parent's threads: it would wait forever
    # for a save that they were running.
    os.register_at_fork(after_in_child=_open.clear)


def _wait_for_all() -> None:
    for storage in list(_open):
        try:
            storage.wait()
        except Exception:
            _logger.exception("A checkpoint could not be saved.")


if TYPE_CHECKING:
    import orbax.checkpoint as ocp


def make_checkpointer(processes: tuple[int, ...]) -> "ocp.AsyncCheckpointer":
    """Makes the Orbax checkpointer that writes and reads one checkpoint.

    Each checkpoint contains arrays and a JSON document. Compression is off,
    because trained weights are nearly random: compression would make them only
    a tenth smaller, but double the work of a save and triple that of a restore.

    Args:
      processes: JAX's ids of the processes; the first is the chief.
    """
    import orbax.checkpoint as ocp

    options = ocp.options
    among = (
        options.MultiprocessingOptions()
        if jax.process_count() == 1
        # If `active_processes` is set, Orbax synchronizes the processes on the
        # host and not with a program on the devices.
        else options.MultiprocessingOptions(
            primary_host=processes[0],
            active_processes=set(processes),
            # Processes that read alone do not wait for each other.
            barrier_sync_key_prefix=f"keras_strategies_{processes[0]}"
            if len(processes) == 1
            else None,
        )
    )
    types = ocp.type_handlers
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=among),
        state=ocp.PyTreeCheckpointHandler(
            use_compression=False,
            multiprocessing_options=among,
            type_handler_registry=types.create_type_handler_registry(
                # No copies are needed: `copy_to_host` has already copied the
                # arrays that may change.
                (np.ndarray, types.NumpyHandler(deepcopy_host_arrays=False)),
                (jax.Array, types.get_type_handler(jax.Array)),
            ),
        ),
        run=ocp.JsonCheckpointHandler(multiprocessing_options=among),
    )
    return ocp.AsyncCheckpointer(
        handler,
        multiprocessing_options=among,
        file_options=options.FileOptions(path_permission_mode=0o700),
    )


def copy_to_host(arrays: Arrays, *, is_alone: bool) -> Arrays:
    """Converts JAX arrays to numpy if this process has all of their values.

    Orbax writes numpy arrays in half the time. On CPU devices, the numpy arrays
    share the memory of the JAX arrays. This is safe: as long as the numpy
    arrays exist, a train step copies these buffers instead of donating them.

    Args:
      arrays: JAX and numpy arrays. The caller may change the numpy arrays
        afterwards, so they are copied.
      is_alone: Whether this is the only process that has variables.
    """

    def is_converted(leaf: jax.Array) -> bool:
        # The chief saves process-local arrays, such as a variable that was
        # created outside of the strategy's scope.
        is_local = is_alone or leaf.is_fully_addressable
        return is_local and leaf.sharding.is_fully_replicated

    def convert(leaf: Array) -> Array:
        if not isinstance(leaf, jax.Array):
            return np.array(leaf)
        return np.asarray(leaf) if is_converted(leaf) else leaf

    # All transfers are started before waiting for the first one.
    for leaf in jax.tree.leaves(arrays):
        if isinstance(leaf, jax.Array) and is_converted(leaf):
            leaf.copy_to_host_async()
    return jax.tree.map(convert, arrays)


def restore_arrays(
    checkpointer: Any,
    path: pathlib.Path,
    targets: Mapping[str, Mapping[str, Any]],
    *,
    is_part: bool,
) -> Arrays:
    """Restores the arrays of a checkpoint.

    Args:
      checkpointer: A result of `make_checkpointer`.
      path: The checkpoint's directory.
      targets: A NumPy array or a `jax.ShapeDtypeStruct` for each array.
      is_part: Whether the checkpoint may contain further arrays.

    Raises:
      DamagedCheckpoint: if the checkpoint is damaged or was deleted.
    """
    import orbax.checkpoint as ocp

    def make_args(leaf: np.ndarray | jax.ShapeDtypeStruct) -> "ocp.RestoreArgs":
        if isinstance(leaf, np.ndarray):
            return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
        return ocp.ArrayRestoreArgs(
            sharding=leaf.sharding,
            global_shape=leaf.shape,
            dtype=leaf.dtype,
        )

    args = ocp.args.PyTreeRestore(
        item=targets,
        restore_args=jax.tree.map(make_args, targets),
        partial_restore=is_part,
    )
    with guard_restore(path, targets):
        composite = ocp.args.Composite(state=args)
        return checkpointer.restore(path, args=composite).state
