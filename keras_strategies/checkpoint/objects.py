"""Objects that are saved together, in the manner of tf.train's."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from keras_strategies.checkpoint import contents, job_states, nests, unbuilt
from keras_strategies.checkpoint.directory.names import find_steps
from keras_strategies.checkpoint.directory.retention import Keep
from keras_strategies.checkpoint.storage import Storage
from keras_strategies.checkpoint.weights import opened
from keras_strategies.cluster.addresses import shown
from keras_strategies.keras_bridge.variables.model_variables import (
    all_variables,
)
from keras_strategies.strategy import current


class Checkpoint:
    """Objects whose values are saved together, as `tf.train.Checkpoint`.

    Args:
      **objects: By the names that they have in the checkpoint: Keras models
        (with their optimizers and metrics), layers, optimizers, metrics, seed
        generators and variables; lists and dicts of these; and whatever has
        `get_state()` and `set_state(state)`: an iterator over a distributed
        dataset, a callback.

    Raises:
      TypeError: an object is none of them.
      ValueError: there is none.

    Example:
      ```python
      iterator = iter(strategy.experimental_distribute_dataset(dataset))
      checkpoint = ks.checkpoint.Checkpoint(
          model=model, optimizer=optimizer, data=iterator
      )
      checkpoint.save("run/ckpt")
      checkpoint.restore(ks.checkpoint.latest_checkpoint("run"))
      ```
      A run that saves some, and resumes where it was, has a
      `CheckpointManager`.
    """

    def __init__(self, **objects: Any) -> None:
        if not objects:
            raise ValueError(
                "A checkpoint keeps objects by name. Received: none. Write "
                "`Checkpoint(model=model, optimizer=optimizer)`."
            )
        for name, value in objects.items():
            if not _has_state(value):
                list(_variables(value, name))
        self._objects = objects

    def groups(self) -> dict[str, list[keras.Variable]]:
        """The variables, by the name of their object; each once."""
        seen: set[int] = set()
        groups: dict[str, list[keras.Variable]] = {}
        for name, value in self._objects.items():
            if _has_state(value):
                continue
            new = {
                id(v): v for v in _variables(value, name) if id(v) not in seen
            }
            seen |= set(new)
            groups[name] = list(new.values())
        return groups

    @property
    def objects(self) -> Mapping[str, Any]:
        """The objects, by name."""
        return self._objects

    def states(self) -> dict[str, Any]:
        """What the others' `get_state` returns, by name."""
        return {
            name: value.get_state()
            for name, value in self._objects.items()
            if _has_state(value)
        }

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Gives them what `states` returned."""
        for name, value in self._objects.items():
            if not _has_state(value):
                continue
            if name not in states:
                raise ValueError(
                    "A checkpoint has what its objects had. Received: no "
                    f"state of {name!r} in it. Leave it out, or give another "
                    "directory."
                )
            value.set_state(states[name])

    def save(self, file_prefix: str | os.PathLike[str]) -> str:
        """Saves a checkpoint with the next number. Collective.

        As `tf.train.Checkpoint.save`; but it is a folder, named by the number
        alone: `save("run/ckpt")` writes `run/1`, then `run/2`.

        Args:
          file_prefix: The folder that it is put into, and a name, which has
            no effect.

        Returns:
          Its path, when it is on the disk.

        Raises:
          OSError: it cannot be written.
          RuntimeError: another job writes there.
        """
        directory, _ = os.path.split(os.fspath(file_prefix))
        return self._written(directory or os.curdir, Keep(last=None))

    def write(self, file_prefix: str | os.PathLike[str]) -> str:
        """Writes one checkpoint, over one of that name. Collective.

        Args:
          file_prefix: The folder that is to hold it, alone.

        Returns:
          The folder, for `read` and `restore`.

        Raises:
          OSError: it cannot be written.
          RuntimeError: another job writes there.
          ValueError: several checkpoints are there, which it would delete.
        """
        steps = find_steps(file_prefix)
        # Two, where a `write` was ended before it deleted the old one.
        if len(steps) > 2:
            raise ValueError(
                "`write` has a folder of its own, where it writes over what "
                f"was written before. Received: {shown(str(file_prefix))}, "
                f"which has {len(steps)} checkpoints. Use `save`, or give "
                "another folder."
            )
        self._written(file_prefix, Keep(last=1))
        return os.fspath(file_prefix)

    def restore(
        self, save_path: str | os.PathLike[str] | None
    ) -> "CheckpointStatus":
        """Gives the objects the values of a checkpoint. Collective.

        It may have more objects than these; all of these must be in it, with
        the same variables. An optimizer that has no variables yet gets them
        from the model that is compiled with it, or the only one beside it.

        Differs from tf: models must be built, since nothing is kept back for
        variables that come later.

        Args:
          save_path: What `save`, `write`, `latest_checkpoint` or a manager
            returned: a checkpoint, or a folder of them, of which the newest
            good one is taken. None: nothing is done, as in tf.

        Returns:
          What tf calls a load status.

        Raises:
          FileNotFoundError: there is none.
          DamagedCheckpoint: it is damaged.
          ValueError: it is of other objects; they are listed.
        """
        if save_path is None:
            return CheckpointStatus(self, "", [])
        current.check_outside("Checkpoint.restore")
        unbuilt.check_models(self._objects)
        processes = contents.processes_of(self.groups())
        with opened(save_path, None, processes) as (storage, step):
            others = read_into(self, storage, step, is_part=True)
            return CheckpointStatus(self, str(storage.path(step)), others)

    read = restore

    def _written(self, directory: str | os.PathLike[str], keep: Keep) -> str:
        current.check_outside("Checkpoint.save")
        processes = contents.processes_of(self.groups())
        storage = Storage(directory, processes=processes, keep=keep)
        storage.open()
        with contextlib.closing(storage):
            # It also learns which ones `keep` is to delete.
            storage.newest()
            step = max(storage.highest(), 0) + 1
            write_from(self, storage, step, {})
            storage.wait()
            return str(storage.path(step))


class CheckpointStatus:
    """What was restored; as the load status of tf.train.Checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, path: str, others: list[str]
    ) -> None:
        self._checkpoint = checkpoint
        self._path = path
        self._others = others

    def assert_consumed(self) -> "CheckpointStatus":
        """Raises ValueError if the checkpoint has more than was restored."""
        self.assert_existing_objects_matched()
        if self._others:
            raise ValueError(
                "All that a checkpoint has was to be restored. Received: "
                f"{self._path}, which also has "
                f"{', '.join(map(shown, self._others))}. Give them to "
                "`Checkpoint`, or call `expect_partial()`."
            )
        return self

    def assert_existing_objects_matched(self) -> "CheckpointStatus":
        """Raises ValueError if nothing was restored: all else has raised."""
        if not self._path:
            raise ValueError(
                "A checkpoint was to be restored. Received: None as its path, "
                "which restores nothing. Look whether there is one: "
                "`latest_checkpoint(directory)`."
            )
        return self

    def assert_nontrivial_match(self) -> "CheckpointStatus":
        """Raises ValueError if nothing was restored."""
        return self.assert_existing_objects_matched()

    def expect_partial(self) -> "CheckpointStatus":
        """Does nothing: what a checkpoint has beside is left out silently."""
        return self


def write_from(
    checkpoint: Checkpoint,
    storage: Storage,
    step: int,
    metrics: Mapping[str, float],
) -> None:
    """Begins to write what the objects of a checkpoint hold. Collective."""
    groups = checkpoint.groups()
    processes = contents.processes_of(groups)
    state = job_states.shared(checkpoint.states(), processes)
    arrays, document = contents.packed(groups, state)
    facts = {"logs": dict(metrics), "num_processes": len(processes)}
    storage.save(step, arrays, document, facts)


def read_into(
    checkpoint: Checkpoint, storage: Storage, step: int, *, is_part: bool
) -> list[str]:
    """Gives the objects of a checkpoint what a verified one holds.

    Args:
      checkpoint: The objects.
      storage: Where it is.
      step: Which one.
      is_part: Whether it may have more objects.

    Returns:
      The names of what it has beside.

    Raises:
      ValueError: it is of other objects; they are listed.
    """
    document = storage.document(step)
    where = str(storage.path(step))
    saved = document["variables"]
    unbuilt.check_models(checkpoint.objects)
    unbuilt.build_optimizers(checkpoint.objects, saved)
    groups = checkpoint.groups()
    others: list[str] = []
    if is_part:
        others = [g for g in saved if g not in groups and g != contents.STATE]
        document = document | {
            "variables": {
                group: contents.subset(entries, groups.get(group, ()))
                or entries
                for group, entries in saved.items()
                if group not in others
            }
        }
    found = contents.matched(groups, document, where)
    others += unbuilt.left_out(checkpoint.objects, saved, found)
    wanted = contents.targets(found, document, None)
    arrays = storage.restore(step, wanted, is_part=is_part)
    contents.assign(found, arrays)
    state = nests.joined(document["state"], arrays.get(contents.STATE, {}))
    processes = contents.processes_of(groups)
    checkpoint.set_states(job_states.own(state, processes, where))
    return others


def _variables(value: object, name: str) -> Iterator[keras.Variable]:
    """The variables of an object of a checkpoint."""
    for part in unbuilt.leaves_of(value):
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
                "A checkpoint keeps Keras models, layers, optimizers, metrics, "
                "seed generators, variables, lists and dicts of them, and "
                "objects with `get_state` and `set_state`. Received: "
                f"{name} of type {type(part).__name__}. Leave it out, or give "
                "it these methods."
            )


def _has_state(value: object) -> bool:
    if isinstance(value, keras.Layer | keras.Variable):
        return False
    return callable(getattr(value, "get_state", None)) and callable(
        getattr(value, "set_state", None)
    )
