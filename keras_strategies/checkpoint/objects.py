"""Checkpoints of objects that are saved together, as in `tf.train`."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from keras_strategies.checkpoint import contents, nests, weights
from keras_strategies.checkpoint.directory.names import find_steps
from keras_strategies.checkpoint.directory.retention import Keep
from keras_strategies.checkpoint.storage import Storage
from keras_strategies.checkpoint.weights import open_checkpoint
from keras_strategies.cluster.addresses import shorten
from keras_strategies.names import dry_run
from keras_strategies.strategy import current
from keras_strategies.variables.model_variables import (
    all_variables,
)


class Checkpoint:
    """Saves and restores objects together, like `tf.train.Checkpoint`.

    Args:
      **objects: The objects, by the names that they have in the checkpoint.
        They can be Keras models (saved with their optimizers and metrics),
        layers, optimizers, metrics, seed generators and variables; lists and
        dicts of these; and objects with `get_state()` and `set_state(state)`,
        such as an iterator over a distributed dataset or a callback.

    Raises:
      TypeError: if an object has another type.

    Example:
      ```python
      iterator = iter(strategy.experimental_distribute_dataset(dataset))
      checkpoint = ks.checkpoint.Checkpoint(
          model=model, optimizer=optimizer, data=iterator
      )
      checkpoint.save("run/ckpt")
      checkpoint.restore(ks.checkpoint.latest_checkpoint("run"))
      ```
      If a run saves several checkpoints and resumes from the newest one, use
      `CheckpointManager`.
    """

    def __init__(self, **objects: Any) -> None:
        for name, value in objects.items():
            if not _has_state(value):
                list(_iter_variables(value, name))
        self._objects = objects

    def groups(self) -> dict[str, list[keras.Variable]]:
        """Returns each object's variables, by the name of the object.

        A variable that several objects use is listed only once.
        """
        seen: set[int] = set()
        groups: dict[str, list[keras.Variable]] = {}
        for name, value in self._objects.items():
            if _has_state(value):
                continue
            found = {id(v): v for v in _iter_variables(value, name)}
            groups[name] = [v for i, v in found.items() if i not in seen]
            seen |= set(found)
        return groups

    @property
    def objects(self) -> Mapping[str, Any]:
        """The objects, by name."""
        return self._objects

    def states(self) -> dict[str, Any]:
        """Returns the results of the objects' `get_state`, by object name.

        Includes only objects that have this method.
        """
        return {
            name: value.get_state()
            for name, value in self._objects.items()
            if _has_state(value)
        }

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Restores the objects from the results of `states`."""
        for name, value in self._objects.items():
            if not _has_state(value):
                continue
            if name not in states:
                raise ValueError(
                    "A checkpoint must contain the states of all objects to "
                    "restore. Received: a checkpoint without a state of "
                    f"{name!r}. Remove this object from the `Checkpoint`, or "
                    "restore another checkpoint."
                )
            value.set_state(states[name])

    def save(self, file_prefix: str | os.PathLike[str]) -> str:
        """Saves a checkpoint with the next number. Collective.

        Like `tf.train.Checkpoint.save`, but the name of the checkpoint's
        directory is just the number: `save("run/ckpt")` writes `run/1`, then
        `run/2`.

        Args:
          file_prefix: The directory to save in, followed by a name, as in
            TensorFlow. The name is ignored.

        Returns:
          The path of the checkpoint, which is already on disk.

        Raises:
          OSError: if the checkpoint cannot be written.
          RuntimeError: if another job is writing to this directory.
        """
        directory, _ = os.path.split(os.fspath(file_prefix))
        return self._write(directory or os.curdir, Keep(last=None))

    def write(self, file_prefix: str | os.PathLike[str]) -> str:
        """Writes a checkpoint that replaces the previous one. Collective.

        Args:
          file_prefix: A directory that is used only for this checkpoint.

        Returns:
          The directory, which can be passed to `read` and `restore`.

        Raises:
          OSError: if the checkpoint cannot be written.
          RuntimeError: if another job is writing to this directory.
          ValueError: if the directory contains several checkpoints. `write`
            would delete them.
        """
        steps = find_steps(file_prefix)
        # There may be two checkpoints if an earlier `write` was killed before
        # it deleted the old one.
        if len(steps) > 2:
            raise ValueError(
                "`write` needs a directory for a single checkpoint, which the "
                "next `write` replaces. Received: "
                f"{shorten(str(file_prefix))}, which contains {len(steps)} "
                "checkpoints. Use `save`, or pass another directory."
            )
        self._write(file_prefix, Keep(last=1))
        return os.fspath(file_prefix)

    def restore(
        self, save_path: str | os.PathLike[str] | None
    ) -> "CheckpointStatus":
        """Restores the objects from a checkpoint. Collective.

        The saved checkpoint must contain all objects of this `Checkpoint`, with
        the same variables. It may also contain other objects. An optimizer
        that has no variables yet is built first: for the model that is compiled
        with it, or otherwise for the only model among the objects.

        A model that is not built yet is restored when it is, with the
        optimizers that are not: when it is called on a batch outside of steps.

        Differs from tf: a model that `fit` or a step would build must be built
        before, and so must one that has weights already, or no `call`.

        Args:
          save_path: A path that `save`, `write`, `latest_checkpoint` or a
            manager returned. It may be a checkpoint, or a directory of
            checkpoints of which the newest good one is restored. With None,
            nothing is restored, as in TensorFlow.

        Returns:
          The load status, as in TensorFlow.

        Raises:
          FileNotFoundError: if no good checkpoint exists.
          DamagedCheckpoint: if the checkpoint is damaged.
          ValueError: if the checkpoint does not match the objects; the message
            lists the differences.
        """
        if save_path is None:
            return CheckpointStatus(self, "", [])
        current.check_outside("Checkpoint.restore")
        if dry_run.get() is not None:
            return CheckpointStatus(self, os.fspath(save_path), [])
        processes = contents.find_processes(self.groups())
        with open_checkpoint(save_path, None, processes) as (storage, step):
            others = read_into(self, storage, step, is_part=True)
            return CheckpointStatus(self, str(storage.path(step)), others)

    read = restore

    def _write(self, directory: str | os.PathLike[str], keep: Keep) -> str:
        current.check_outside("Checkpoint.save")
        processes = contents.find_processes(self.groups())
        storage = Storage(directory, processes=processes, keep=keep)
        storage.open()
        with contextlib.closing(storage):
            # This call tells the storage which checkpoints exist, since it may
            # have to delete them.
            storage.find_newest()
            step = max(storage.find_highest(), 0) + 1
            write_from(self, storage, step, {})
            storage.wait()
            return str(storage.path(step))


class CheckpointStatus:
    """The result of a restore, like the load status of tf.train.Checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, path: str, others: list[str]
    ) -> None:
        self._checkpoint = checkpoint
        self._path = path
        self._others = others

    def assert_consumed(self) -> "CheckpointStatus":
        """Raises ValueError if parts of the checkpoint were not restored."""
        self.assert_existing_objects_matched()
        if self._others:
            raise ValueError(
                "All values of a checkpoint must be restored. Received: "
                f"{self._path}, which also contains "
                f"{', '.join(map(shorten, self._others))}. Pass the objects "
                "that are missing to `Checkpoint`, or call `expect_partial()` "
                "if these values are not needed."
            )
        return self

    def assert_existing_objects_matched(self) -> "CheckpointStatus":
        """Raises ValueError if nothing was restored.

        `restore` has already raised an error for all other mismatches.
        """
        if not self._path:
            raise ValueError(
                "A checkpoint must have been restored. Received: None as the "
                "path, so nothing was restored. Check the directory: "
                "`latest_checkpoint(directory)` returns None if it contains no "
                "checkpoint."
            )
        return self

    def assert_nontrivial_match(self) -> "CheckpointStatus":
        """Raises ValueError if nothing was restored."""
        return self.assert_existing_objects_matched()

    def expect_partial(self) -> "CheckpointStatus":
        """Does nothing: extra values in the checkpoint never raise errors."""
        return self


def write_from(
    checkpoint: Checkpoint,
    storage: Storage,
    step: int,
    metrics: Mapping[str, float],
) -> None:
    """Starts saving the objects of a `Checkpoint`. Collective."""
    if dry_run.get() is not None:
        return
    groups = checkpoint.groups()
    processes = contents.find_processes(groups)
    state = nests.gather_states(checkpoint.states(), processes)
    arrays, document = contents.pack_checkpoint(groups, state)
    facts = {"logs": dict(metrics), "num_processes": len(processes)}
    storage.save(step, arrays, document, facts)


def read_into(
    checkpoint: Checkpoint, storage: Storage, step: int, *, is_part: bool
) -> list[str]:
    """Restores the objects of a `Checkpoint` from a saved checkpoint.

    The saved checkpoint must already be verified.

    Args:
      checkpoint: The objects to restore.
      storage: The directory of the saved checkpoint.
      step: The step of the saved checkpoint.
      is_part: Whether the saved checkpoint may also contain other objects.

    Returns:
      The names of saved values that were not restored.

    Raises:
      ValueError: if the saved checkpoint does not match the objects; the
        message lists the differences.
    """
    document = storage.load_document(step)
    where = str(storage.path(step))
    saved = document["variables"]
    waiting = weights.defer(
        checkpoint.objects, lambda late: Checkpoint(**late).restore(where)
    )
    if waiting:
        rest = {n: v for n, v in checkpoint.objects.items() if n not in waiting}
        if not rest:
            return list(waiting)
        checkpoint, is_part = Checkpoint(**rest), True
    weights.build_optimizers(checkpoint.objects, saved)
    groups = checkpoint.groups()
    others = []
    if is_part:
        others = [g for g in saved if g not in groups and g != contents.STATE]
        wanted = {name: saved[name] for name in saved if name not in others}
        for name, entries in wanted.items():
            part = contents.select_arrays(entries, groups.get(name, ()))
            wanted[name] = part or entries
        document = document | {"variables": wanted}
    matches = contents.match_variables(groups, document, where)
    others += weights.list_unrestored(checkpoint.objects, saved, matches)
    targets = contents.make_targets(matches, document, None)
    arrays = storage.restore(step, targets, is_part=is_part)
    contents.assign(matches, arrays)
    state = nests.join(document["state"], arrays.get(contents.STATE, {}))
    processes = contents.find_processes(groups)
    checkpoint.set_states(nests.select_local_states(state, processes, where))
    return others


def _iter_variables(value: object, name: str) -> Iterator[keras.Variable]:
    """Yields the variables of one object in a checkpoint."""
    for part in weights.iter_leaves(value):
        if isinstance(part, keras.Model):
            yield from all_variables(part)
        elif isinstance(part, keras.Variable):
            yield part
        elif isinstance(part, keras.random.SeedGenerator):
            yield part.state
        elif isinstance(
            part,
            keras.Layer | keras.optimizers.Optimizer | keras.metrics.Metric,
        ):
            yield from part.variables
        else:
            raise TypeError(
                "The objects of a checkpoint must be Keras models, layers, "
                "optimizers, metrics, seed generators, variables, lists and "
                "dicts of these, or objects with `get_state` and `set_state`. "
                f"Received: {name}, with an object of type "
                f"{type(part).__name__}. Remove it, or add these methods to "
                "its class."
            )


def _has_state(value: object) -> bool:
    if isinstance(value, keras.Layer | keras.Variable):
        return False
    return callable(getattr(value, "get_state", None)) and callable(
        getattr(value, "set_state", None)
    )
