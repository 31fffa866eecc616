"""Small checkpoints, written by Orbax as the project's are."""

import json
import pathlib

import jax
import numpy as np

from keras_strategies.checkpoint.directory.manifest import write_manifest
from keras_strategies.checkpoint.directory.names import make_directory

VARIABLES = {
    "model": {
        "dense/kernel": [[8, 8], "float32"],
        "dense/bias": [[8], "float32"],
    },
    "optimizer": {"iteration": [[], "int32"]},
}


def write_checkpoints(directory: pathlib.Path, steps=(3, 12)) -> None:
    """Writes checkpoints of these steps, complete with their manifests."""
    for step in steps:
        write_files(directory, step)
        write_manifest(
            directory / str(step),
            step,
            {"logs": {"loss": 1 / (1 + step)}, "epoch": step // 4},
            created=1.7e9 + step,
        )


def write_small(directory, step, facts, variables, *, created):
    """Writes a checkpoint without arrays, which needs no Orbax.

    Args:
      directory: Where checkpoints are.
      step: Its step.
      facts: The facts in its manifest.
      variables: What it says that it holds, or all bytes of its document.
      created: When, in seconds since 1970.

    Returns:
      Its directory.
    """
    path = directory / str(step)
    (path / "run").mkdir(parents=True)
    text = variables
    if not isinstance(variables, bytes):
        document = {"version": 1, "variables": variables, "state": {}}
        text = json.dumps(document).encode()
    (path / "run" / "metadata").write_bytes(text)
    (path / "_CHECKPOINT_METADATA").write_bytes(b"{}" * 500)
    write_manifest(path, step, facts, created=created)
    return path


def write_files(directory: pathlib.Path, step: int) -> None:
    """Writes what Orbax writes of a checkpoint."""
    import orbax.checkpoint as ocp

    make_directory(directory)
    with ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler()) as saver:
        saver.save(
            directory / str(step),
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(_arrays(step)),
                run=ocp.args.JsonSave(
                    {"version": 1, "variables": VARIABLES, "state": step}
                ),
            ),
        )


def _arrays(step):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("replica",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    split = jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec("replica")
    )
    rng = np.random.default_rng(step)
    return {
        "model": {
            "dense/kernel": jax.device_put(
                rng.random((8, 8), np.float32), split
            ),
            "dense/bias": jax.device_put(rng.random(8, np.float32), whole),
        },
        "optimizer": {"iteration": jax.device_put(np.int32(step), whole)},
    }
