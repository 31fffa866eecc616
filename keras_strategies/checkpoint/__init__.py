"""Checkpoints with checksums, from which a run resumes bit for bit.

    checkpoint = ks.checkpoint.Checkpoint(model=model, data=iterator)
    manager = ks.checkpoint.CheckpointManager(checkpoint, "run", keep=3)
    step = manager.restore_or_initialize() or 0

For `fit`, use the callback `ks.callbacks.Checkpoint`. The modules that define
these names are imported when a name is first used.
"""

from keras_strategies.names.lazy_names import lazy_names as _lazy_names

_MODULES = {
    "Checkpoint": "objects",
    "CheckpointManager": "manager",
    "DamagedCheckpoint": "directory.files",
    "Keep": "directory.retention",
    "latest_checkpoint": "weights",
    "load_weights": "weights",
}

__getattr__, __dir__ = _lazy_names(__name__, __name__, _MODULES)
