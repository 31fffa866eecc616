"""How Orbax is told to write and to read."""

from typing import Any

import jax
import numpy as np

from keras_strategies.checkpoint.contents import Arrays


def make_checkpointer(processes: tuple[int, ...]) -> Any:
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
        if len(processes) == 1
        # Naming them has Orbax wait on the host, not on the devices.
        else options.MultiprocessingOptions(
            primary_host=processes[0], active_processes=set(processes)
        )
    )
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=among),
        state=ocp.PyTreeCheckpointHandler(
            use_compression=False, multiprocessing_options=among
        ),
        run=ocp.JsonCheckpointHandler(multiprocessing_options=among),
    )
    return ocp.AsyncCheckpointer(
        handler,
        multiprocessing_options=among,
        file_options=options.FileOptions(path_permission_mode=0o700),
    )


def restore_args(wanted: Arrays) -> Any:
    """Where the arrays are to lie that Orbax restores.

    Args:
      wanted: Shapes, dtypes and shardings, or arrays of numpy, by group and
        name.
    """
    import orbax.checkpoint as ocp

    def args(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
        return ocp.ArrayRestoreArgs(
            sharding=leaf.sharding,
            global_shape=leaf.shape,
            dtype=leaf.dtype,
        )

    return jax.tree.map(args, wanted)
