"""Candidates of a plan: a slice, and how a model is laid out on it.

In words, as on the command line: "replicated", "slots", "slots:64",
"sharded", "sharded:64", "model:4", "sharded:16+model:4".
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from keras_strategies.keras_bridge.variables.partitioners import (
    FullySharded,
    SlotsOnly,
)

_NAMES = ("replicated", "slots", "sharded", "model")
_WORD = re.compile(r"(?P<name>[a-z]+)(:(?P<number>[1-9]\d{0,5}))?")
_EXAMPLES = (
    "'replicated', 'slots', 'sharded:64', 'model:4' or 'sharded+model:4'"
)
_MOST_DIVIDED = 256
"""Chips of the largest group that is tried, if nothing else is said."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model lies on the devices of a slice.

    Attributes:
      divides: "nothing", "slots" or "all": what replicas divide among them.
      shards: How many replicas divide it; None: as the slice suggests.
      cores: How many devices a replica has, which divide a transformer's
        heads and dense layers.
      partitioner: A partitioner of the user's own instead.
    """

    divides: str = "nothing"
    shards: int | None = None
    cores: int = 1
    partitioner: Any = None

    @property
    def variable_partitioner(self) -> Any:
        """For a strategy's `variable_partitioner`.

        Returns:
          A partitioner, or None for variables that are replicated.
        """
        if self.partitioner is not None:
            return self.partitioner
        if self.divides == "slots":
            return SlotsOnly(shards=self.shards)
        if self.divides == "all":
            return FullySharded(shards=self.shards)
        return None

    def __str__(self) -> str:
        words = []
        if self.partitioner is not None:
            words.append(type(self.partitioner).__name__)
        elif self.divides != "nothing":
            word = "slots" if self.divides == "slots" else "sharded"
            words.append(word + (f":{self.shards}" if self.shards else ""))
        if self.cores > 1:
            words.append(f"model:{self.cores}")
        return "+".join(words) or "replicated"


def layout_of(given: object) -> Layout:
    """The layout that is given in words, or by a partitioner.

    Raises:
      ValueError: words that say none.
      TypeError: neither words nor a partitioner.
    """
    if isinstance(given, Layout):
        return given
    if isinstance(given, SlotsOnly) and given == SlotsOnly(given.shards):
        return Layout(divides="slots", shards=given.shards)
    if isinstance(given, FullySharded) and given == FullySharded(given.shards):
        return Layout(divides="all", shards=given.shards)
    if callable(given) or isinstance(given, FullySharded):
        return Layout(partitioner=given)
    if not isinstance(given, str):
        raise TypeError(
            "A plan's strategies are words or partitioners. Received: "
            f"{given!r} of type {type(given).__name__}. Pass {_EXAMPLES}."
        )
    found: dict[str, int | None] = {}
    for word in given.split("+"):
        match = _WORD.fullmatch(word.strip())
        name = None if match is None else match["name"]
        if match is None or name not in _NAMES or name in found:
            raise ValueError(_unknown(given))
        number = match["number"]
        found[name] = int(number) if number else None
    divided = [name for name in ("slots", "sharded") if name in found]
    is_alone = "replicated" in found and (divided or found["replicated"])
    cores = found.get("model", 1)
    if len(divided) > 1 or is_alone or cores is None:
        raise ValueError(_unknown(given))
    divides = {"slots": "slots", "sharded": "all"}
    return Layout(
        divides=divides[divided[0]] if divided else "nothing",
        shards=found[divided[0]] if divided else None,
        cores=cores,
    )


def _unknown(given: str) -> str:
    return (
        "A plan's strategies are 'replicated', or what replicas divide: "
        "'slots' or 'sharded', with the number of replicas that do, and "
        f"'model' with a number of cores. Received: {given!r:.100}. Pass for "
        f"example {_EXAMPLES}."
    )


def layouts_for(num_devices: int, default_shards: int | None) -> list[Layout]:
    """The layouts that are tried, if nothing else is said.

    Args:
      num_devices: Of the slice.
      default_shards: How many replicas divide variables, if nothing is said.
    """
    layouts = [Layout()]
    if num_devices == 1:
        return layouts
    layouts += [Layout(divides="slots"), Layout(divides="all")]
    if default_shards is not None and default_shards < num_devices:
        number = min(num_devices, _MOST_DIVIDED)
        if number > default_shards:
            layouts.append(Layout(divides="all", shards=number))
    return layouts


def computation_shape(
    cores: int, mesh_shape: Sequence[int]
) -> tuple[int, ...] | None:
    """The box of a slice's devices that a replica of so many fills.

    Args:
      cores: Devices of a replica.
      mesh_shape: Of the slice, in x, y, z and core.

    Returns:
      The most compact one that divides the slice; None: there is none.
    """
    boxes = [
        box
        for box in _boxes(cores, len(mesh_shape))
        if all(m % b == 0 for m, b in zip(mesh_shape, box, strict=True))
    ]
    return min(boxes, key=lambda box: (sum(box), box[::-1]), default=None)


def _boxes(size: int, rank: int) -> Iterable[tuple[int, ...]]:
    if rank == 1:
        return [(size,)]
    return [
        (first, *rest)
        for first in range(1, size + 1)
        if size % first == 0
        for rest in _boxes(size // first, rank - 1)
    ]


def check_topologies(given: object) -> list[str]:
    """The names of slices, as a list.

    Raises:
      TypeError: no names.
      ValueError: none at all.
    """
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not all(
        isinstance(name, str) for name in names
    ):
        raise TypeError(
            "A plan's topologies are names of slices. Received: "
            f"{given!r}. Pass for example ['v5e:4x4', 'v5p:2x2x2']."
        )
    if not names:
        raise ValueError(
            "A plan is for at least one slice. Received: topologies=[]. "
            "Leave it out for the strategy's own devices."
        )
    return list(dict.fromkeys(names))


def rows_of(per_replica: float, replicas: int) -> int:
    """Rows of a global batch, at least one on each replica."""
    return max(math.ceil(per_replica), 1) * replicas
