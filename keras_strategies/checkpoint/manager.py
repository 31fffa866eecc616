"""Checkpoints of loops of one's own, in the manner of tf.train's."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies.checkpoint import contents
from keras_strategies.checkpoint.format import find_steps
from keras_strategies.checkpoint.keeping import Keep, as_keep
from keras_strategies.checkpoint.storage import Storage
from keras_strategies.cluster.agreement import Agreement
from keras_strategies.keras_bridge.binding import all_variables


class Checkpoint:
    """Objects whose values are kept together, as `tf.train.Checkpoint`.

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
      ```
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


class CheckpointManager:
    """Keeps checkpoints in a directory, as `tf.train.CheckpointManager`.

    Saving copies the arrays to the host, and writes them while the loop goes
    on. On several processes every call is collective, in a directory that all
    of them share.

    Differs from tf: `save` is given the step, which is the checkpoint's name;
    `restore_or_initialize` returns a step.

    Args:
      checkpoint: What to keep.
      directory: Where; made if it is not there. One directory for each run.
      keep: How many checkpoints are kept, or a `ks.checkpoint.Keep`.

    Raises:
      OSError: the directory cannot be written to.
      RuntimeError: another job writes to it.

    Example:
      ```python
      manager = ks.checkpoint.CheckpointManager(checkpoint, "run", keep=3)
      step = manager.restore_or_initialize() or 0
      for batch in iterator:
          strategy.run(train_step, args=batch)
          step += 1
          if step % 100 == 0:
              manager.save(step)
      manager.close()
      ```
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        keep: int | Keep = 5,
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(
                "`checkpoint` is a `ks.checkpoint.Checkpoint`. Received: an "
                f"object of type {type(checkpoint).__name__}. Write "
                "`Checkpoint(model=model)`."
            )
        self._checkpoint = checkpoint
        self._processes = contents.processes_of(checkpoint.groups())
        self._storage = Storage(
            directory,
            processes=self._processes,
            keep=as_keep(keep),
        )
        self._storage.open()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    @property
    def directory(self) -> str:
        """Where the checkpoints are."""
        return str(self._storage.directory)

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint that was not found damaged."""
        steps = find_steps(self.directory)
        return str(self._storage.path(steps[-1])) if steps else None

    @property
    def checkpoints(self) -> list[str]:
        """The paths of all checkpoints, the oldest first."""
        return [
            str(self._storage.path(step)) for step in find_steps(self.directory)
        ]

    def save(
        self, step: int, metrics: Mapping[str, float] | None = None
    ) -> str:
        """Saves a checkpoint. Collective.

        Args:
          step: The number of train steps done, from 0.
          metrics: Values that `Keep(best=...)` chooses by, and that people see.

        Returns:
          Its path; it is there when `wait` returns.

        Raises:
          ValueError: there is a checkpoint of that step, or of a later one.
          OSError: it does not fit on the disk, or the last one could not be
            written.
        """
        path = self._storage.path(step)
        step = int(path.name)
        self._check_is_next(step)
        shared, extra = contents.split(self._shared_states())
        arrays = contents.arrays_of(self._checkpoint.groups())
        if extra or not arrays:
            # Orbax keeps no tree without any array.
            arrays[contents.STATE] = extra or {"none": np.zeros(1)}
        self._storage.save(
            step,
            arrays,
            contents.document_of(arrays, shared),
            {"logs": dict(metrics or {}), "num_processes": self._count},
        )
        return str(path)

    def restore_or_initialize(self) -> int | None:
        """Restores the newest good checkpoint, if there is one. Collective.

        Damaged ones that are newer are named in a warning, and put aside.

        Returns:
          Its step; None if there is none, and nothing was changed.

        Raises:
          ValueError: it is of other objects; they are listed.
        """
        step = self._storage.newest()
        if step is not None:
            self._restore(step)
        return step

    def restore(self, step: int) -> None:
        """Restores one checkpoint. Collective.

        Args:
          step: Which one.

        Raises:
          DamagedCheckpoint: it is damaged, or not there.
          ValueError: it is of other objects.
        """
        self._storage.check(step)
        self._restore(step)

    def wait(self) -> None:
        """Until what was saved is on the disk.

        Raises:
          OSError: it could not be written.
        """
        self._storage.wait()

    def close(self) -> None:
        """Waits for the last save, and lets others write to the directory."""
        self._storage.close()

    def _check_is_next(self, step: int) -> None:
        newest = self._storage.highest()
        if step == newest:
            raise ValueError(
                "A step is saved once. Received: "
                f"step={step}, which is in {self.directory!r}. Give the next "
                "step, or another directory."
            )
        if step < newest:
            raise ValueError(
                "Steps are saved in their order: the highest is what a restart "
                f"goes on with. Received: step={step}, and step {newest} is in "
                f"{self.directory!r}. Restore it first, or give another "
                "directory."
            )

    @property
    def _count(self) -> int:
        return len(self._processes)

    def _restore(self, step: int) -> None:
        document = self._storage.document(step)
        where = str(self._storage.path(step))
        contents.check_version(document, where)
        groups = self._checkpoint.groups()
        found = contents.matched(groups, document, where)
        wanted = contents.targets(found, document, None)
        arrays = self._storage.restore(step, wanted)
        contents.assign(found, arrays)
        state = contents.joined(
            document["state"], arrays.get(contents.STATE, {})
        )
        self._checkpoint.set_states(self._own_states(state))

    def _shared_states(self) -> Any:
        """The states of all processes; one, if they are alike."""
        states = self._checkpoint.states()
        text = contents.packed(states)
        if self._count == 1:
            return {"all": states}
        agreement = Agreement(self._processes, "keeping states")
        marks = agreement.exchange(hashlib.sha256(text.encode()).hexdigest())
        is_alike = len(set(marks)) == 1
        heard = [] if is_alike else agreement.exchange(text)
        agreement.end()
        if is_alike:
            return {"all": states}
        return {"each": [contents.unpacked(said) for said in heard]}

    def _own_states(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        if "all" in state:
            return state["all"]
        if len(state["each"]) != self._count:
            raise ValueError(
                "Where every process has a state of its own, a run goes on "
                "with as many processes as it had. Received: states of "
                f"{len(state['each'])} processes, now {self._count}. Start as "
                "many, or give all processes the same data."
            )
        return state["each"][self._processes.index(jax.process_index())]


def _variables(value: Any, name: str) -> Iterator[keras.Variable]:
    """The variables of an object of a checkpoint."""
    if isinstance(value, keras.Model):
        yield from all_variables(value)
    elif isinstance(value, keras.Variable):
        yield value
    elif isinstance(value, keras.random.SeedGenerator):
        yield value.state
    elif isinstance(
        value, keras.Layer | keras.optimizers.Optimizer | keras.metrics.Metric
    ):
        yield from value.variables
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _variables(part, name)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _variables(part, name)
    else:
        raise TypeError(
            "A checkpoint keeps Keras models, layers, optimizers, metrics, "
            "seed generators, variables, lists and dicts of them, and objects "
            "with `get_state` and `set_state`. Received: "
            f"{name} of type {type(value).__name__}. Leave it out, or give it "
            "these methods."
        )


def _has_state(value: Any) -> bool:
    if isinstance(value, keras.Layer | keras.Variable):
        return False
    return callable(getattr(value, "get_state", None)) and callable(
        getattr(value, "set_state", None)
    )
