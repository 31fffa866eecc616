"""Callbacks and saved models in several processes: the chief writes files.

Keras's callbacks that write files (checkpoints, logs) run only on the chief.
Otherwise all processes would write the same files. Callbacks that control
training (early stopping, learning rates) run in all processes, which all have
the same logs. User-defined callbacks, including subclasses of Keras's, also
run in all processes, because they may call `predict`.
"""

import copy
import functools
import os
import pathlib
import shutil
import tempfile
import uuid
from collections.abc import Callable
from typing import Any

import keras
from keras.callbacks import (
    BackupAndRestore,
    CSVLogger,
    EarlyStopping,
    History,
    LearningRateScheduler,
    ModelCheckpoint,
    ProgbarLogger,
    ReduceLROnPlateau,
    RemoteMonitor,
    TensorBoard,
    TerminateOnNaN,
)
from keras.src.utils import file_utils

from keras_strategies._types import Callbacks, Logs
from keras_strategies.cluster.exchange.host_exchange import Agreement
from keras_strategies.cluster.exchange.rounds import Rounds
from keras_strategies.fit.callbacks.callback_list import implements
from keras_strategies.hooks.summands import unwrap
from keras_strategies.kernels.scanned_blocks import find_columns
from keras_strategies.spmd.mesh import ReplicaMesh

_LOGGERS = (CSVLogger, ProgbarLogger, RemoteMonitor, TensorBoard)
_WRITERS = (ModelCheckpoint, *_LOGGERS)
_CHECKPOINTERS = (ModelCheckpoint, BackupAndRestore)
_READERS_OF_LOGS = (*_LOGGERS, History, TerminateOnNaN)
CONTROLLERS = (EarlyStopping, LearningRateScheduler, ReduceLROnPlateau)
"""Callbacks that set the learning rate, or end the training."""
_BATCH_HOOKS = (
    *("on_batch_begin", "on_batch_end"),
    *("on_train_batch_begin", "on_train_batch_end"),
)

READS_LOGS = "_ks_reads_logs"
"""The attribute of classes of callbacks whose hooks for batches do not read
variables."""


def select_callbacks(callbacks: Callbacks, mesh: ReplicaMesh) -> Callbacks:
    """Returns the callbacks that this process calls.

    Args:
      callbacks: The callbacks that were passed to Keras: a list, a single one,
        None, or a `CallbackList`, which is returned unchanged.
      mesh: The mesh of the replicas.

    Returns:
      The callbacks as given, or a list without those that run only on the
      chief, and with collective copies of `BackupAndRestore` callbacks.
    """
    is_list = isinstance(callbacks, keras.callbacks.CallbackList)
    if mesh.num_processes == 1 or not callbacks or is_list:
        return callbacks
    chosen = []
    for callback in keras.tree.flatten(callbacks):
        if isinstance(callback, BackupAndRestore):
            chosen.append(_make_collective(callback, mesh))
        elif mesh.is_chief or not _is_chief_only(callback, mesh):
            chosen.append(callback)
    return chosen


def read_variables_together(
    model: keras.Model, callbacks: Callbacks, mesh: ReplicaMesh
) -> bool:
    """Returns whether all processes read a model's variables at the same time.

    Collective, if the model's optimizer accumulates gradients or the model's
    blocks are computed in a loop. Otherwise it makes no difference, and the
    result is False.

    Between the steps of an epoch, a callback may read the variables in one
    process only, for example to save the model on the chief. It does not if it
    has no hooks for batches, or is one of Keras's that do not read variables
    there.

    Args:
      model: The model.
      callbacks: The callbacks of `fit` in this process.
      mesh: The mesh of the replicas.
    """
    optimizer = unwrap(model.optimizer)
    accumulates = getattr(optimizer, "gradient_accumulation_steps", None)
    if not accumulates and not find_columns(model, mesh):
        return False
    if mesh.num_processes == 1:
        return True
    flat = keras.tree.flatten(callbacks) if callbacks else []
    mine = all(map(_reads_after_epochs, flat))
    with Rounds(mesh.processes, "the callbacks of an epoch's steps") as rounds:
        return all(rounds.exchange(mine, bool))


def _reads_after_epochs(callback: Any) -> bool:
    """Returns whether a callback reads no variables between an epoch's steps.

    A `CheckpointCallback` reads them in all processes.
    """
    kind = type(callback)
    if kind in _CHECKPOINTERS:
        return callback.save_freq == "epoch"
    is_known = kind in _READERS_OF_LOGS or READS_LOGS in vars(kind)
    return is_known or not implements(callback, _BATCH_HOOKS)


def _is_chief_only(
    callback: keras.callbacks.Callback, mesh: ReplicaMesh
) -> bool:
    """Returns whether a callback runs only on the chief.

    A `ModelCheckpoint` runs in all processes if variables are divided into
    shards over the processes, because reading a variable is then a collective
    operation.
    """
    reads = isinstance(callback, ModelCheckpoint)
    return type(callback) in _WRITERS and not (reads and mesh.spreads_shards)


def _make_collective(callback: Any, mesh: ReplicaMesh) -> Any:
    """Makes a copy of a `BackupAndRestore` for several processes.

    The copy restores in all processes, but only the chief's copy saves.
    """
    collective = copy.copy(callback)
    kind = type(callback)
    collective.__class__ = type(kind.__name__, (_CollectiveBackup, kind), {})
    collective._ks_mesh = mesh
    return collective


class _CollectiveBackup(BackupAndRestore):
    _ks_mesh: ReplicaMesh

    def on_train_begin(self, logs: Logs | None = None) -> None:
        mesh = self._ks_mesh
        agreement = Agreement(mesh.processes, "`BackupAndRestore`")
        exists = [
            str(file_utils.exists(path))
            for path in (self._weights_path, self._training_metadata_path)
        ]
        received = agreement.exchange(" ".join(exists))
        if len(set(received)) > 1:
            places = dict(zip(mesh.processes, received, strict=True))
            raise ValueError(
                "All processes must find the same backup. Received: "
                f"backup_dir={self.backup_dir!r}; whether it contains weights "
                f"and a position, by process: {places}. Put `backup_dir` on a "
                "disk that all processes share, or delete it in all processes "
                "to start again."
            )
        super().on_train_begin(logs)
        # The chief must not write before the other processes have read.
        agreement.exchange("restored")

    def _save_model(self) -> None:
        if self._ks_mesh.is_chief:
            super()._save_model()
        elif self._ks_mesh.spreads_shards:
            model: Any = self.model
            model.save_weights(self._weights_path, overwrite=True)

    def on_train_end(self, logs: Logs | None = None) -> None:
        if self._ks_mesh.is_chief:
            super().on_train_end(logs)


SAVERS = ("save", "save_weights")
_Save = Callable[..., None]


def make_saves_safe(
    model: keras.Model, mesh: ReplicaMesh, adopt: Callable[[], None]
) -> None:
    """Makes `save` and `save_weights` safe in jobs of several processes.

    They are collective if the variables are sharded over processes. Otherwise,
    several processes may save to the same file at the same time. Nothing
    changes in a single process, and for methods that a subclass overrides if
    they need not be collective.

    Args:
      model: The model; the attributes `save` and `save_weights` are set on it.
      mesh: The mesh of its strategy's replicas.
      adopt: A function that moves variables that were created outside of the
        strategy's scope to its devices.
    """
    if mesh.num_processes == 1:
        return
    for name in SAVERS:
        method = getattr(type(model), name)
        save = functools.partial(method, model)
        if mesh.spreads_shards:
            safe = _save_together(save, mesh, adopt)
        elif method is getattr(keras.Model, name):
            safe = _save_whole(save, name)
        else:
            continue
        object.__setattr__(model, name, functools.update_wrapper(safe, method))


def _save_together(
    save: _Save, mesh: ReplicaMesh, adopt: Callable[[], None]
) -> _Save:
    """Makes a method that saves a model collective."""

    def save_together(filepath: Any, *args: Any, **kwargs: Any) -> None:
        adopt()
        if mesh.is_chief:
            save(filepath, *args, **kwargs)
            return
        # By saving to a temporary file, this process takes part in the same
        # collective reads as the chief, in the same order. The file is
        # discarded.
        with tempfile.TemporaryDirectory() as directory:
            scratch = pathlib.Path(directory) / pathlib.Path(filepath).name
            save(scratch, *args, **kwargs)

    return save_together


def _save_whole(save: _Save, name: str) -> _Save:
    """Makes a method save to a scratch file, which then replaces the user's.

    So a file that several processes save at the same time is complete.
    """

    def save_whole(
        filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        path = pathlib.Path(os.path.realpath(filepath))
        endings = (".keras", ".h5") if name == "save" else (".weights.h5",)
        ending = next((x for x in endings if path.name.endswith(x)), None)
        is_writable = os.access(path.parent, os.W_OK | os.X_OK) and (
            not path.exists() or (overwrite and os.access(path, os.W_OK))
        )
        if ending is None or args or kwargs or not is_writable:
            save(filepath, overwrite, *args, **kwargs)
            return
        scratch = path.with_name(f".{uuid.uuid4().hex}{ending}")
        try:
            save(scratch)
            if path.exists():
                shutil.copymode(path, scratch)
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)

    return save_whole
