"""Orbax's options for reading and writing."""

from typing import TYPE_CHECKING

import jax
import numpy as np

from keras_strategies._types import Array, Tree
from keras_strategies.checkpoint.contents import Arrays

if TYPE_CHECKING:
    import orbax.checkpoint as ocp


def make_checkpointer(processes: tuple[int, ...]) -> "ocp.AsyncCheckpointer":
    """What writes and reads a step's folder: arrays and a document.

    Weights that were trained are nearly random: compression makes them a tenth
    smaller, for twice the work of a save and three times that of a restore.

    Args:
      processes: JAX's ids of the processes; the first is the chief.
    """
    import orbax.checkpoint as ocp

    options = ocp.options
    among = (
        options.MultiprocessingOptions()
        if jax.process_count() == 1
        # Naming them has Orbax wait on the host, not on the devices.
        else options.MultiprocessingOptions(
            primary_host=processes[0], active_processes=set(processes)
        )
    )
    types = ocp.type_handlers
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=among),
        state=ocp.PyTreeCheckpointHandler(
            use_compression=False,
            multiprocessing_options=among,
            type_handler_registry=types.create_type_handler_registry(
                # `on_host` has copied what may change.
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


def on_host(arrays: Arrays, *, is_alone: bool) -> Arrays:
    """The arrays as Orbax writes them soonest, for as long as it takes.

    Those that one process holds whole are numpy's: Orbax takes half the time
    for them. On CPU devices they share the devices' memory, which a step does
    not write to while they live: it copies what it would have taken.

    Args:
      arrays: Arrays of JAX and of numpy; the latter may change afterwards.
      is_alone: Whether no other process has variables.
    """

    def is_taken(leaf: jax.Array) -> bool:
        # One that only this process has, as a variable that was made outside
        # of the scope, is the chief's.
        is_here = is_alone or leaf.is_fully_addressable
        return is_here and leaf.sharding.is_fully_replicated

    def host(leaf: Array) -> Array:
        if not isinstance(leaf, jax.Array):
            return np.array(leaf)
        return np.asarray(leaf) if is_taken(leaf) else leaf

    for leaf in jax.tree.leaves(arrays):
        if isinstance(leaf, jax.Array) and is_taken(leaf):
            leaf.copy_to_host_async()
    return jax.tree.map(host, arrays)


def restore_args(wanted: Arrays) -> Tree:
    """Where the arrays are to lie that Orbax restores.

    Args:
      wanted: Shapes, dtypes and shardings, or arrays of numpy, by group and
        name.

    Returns:
      An `ocp.RestoreArgs` for each, by group and name.
    """
    import orbax.checkpoint as ocp

    def args(leaf: np.ndarray | jax.ShapeDtypeStruct) -> "ocp.RestoreArgs":
        if isinstance(leaf, np.ndarray):
            return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
        return ocp.ArrayRestoreArgs(
            sharding=leaf.sharding,
            global_shape=leaf.shape,
            dtype=leaf.dtype,
        )

    return jax.tree.map(args, wanted)
