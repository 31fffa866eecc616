"""Layouts, which define how a plan shards a model over devices.

On the command line their names are, for example, "replicated", "slots",
"slots:64", "sharded", "sharded:64", "model:4" or "sharded:16+model:4".
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

from keras_strategies.planning.seam import partitioners

_KINDS = {
    "slots": partitioners.SlotsOnly,
    "sharded": partitioners.FullySharded,
}
_NUMBER = r"[1-9]\d{0,5}"
_WORD = re.compile(
    rf"replicated|(?P<kind>slots|sharded)(:(?P<shards>{_NUMBER}))?"
    rf"|model:(?P<cores>{_NUMBER})",
    re.ASCII,
)
_EXAMPLES = (
    "'replicated', 'slots', 'sharded:64', 'model:4' or 'sharded+model:4'"
)
_MAX_DIVIDED = 256
"""Number of chips in the largest sharding group of the default layouts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of a model on the devices of a topology.

    Attributes:
      partitioner: The `variable_partitioner` of a strategy with this layout.
        None for replicated variables.
      cores: The number of devices of a replica. If there are several, a
        transformer's attention heads and dense layers are sharded over them.
    """

    partitioner: Any = None
    cores: int = 1

    def __str__(self) -> str:
        words = []
        if self.partitioner is not None:
            words.append(_name_partitioner(self.partitioner))
        if self.cores > 1:
            words.append(f"model:{self.cores}")
        return "+".join(words) or "replicated"


def _name_partitioner(partitioner: Any) -> str:
    """Returns a word of `_KINDS`, or a partitioner's name and its options."""
    for word, kind in _KINDS.items():
        if type(partitioner) is kind:
            options = partitioners.list_options(partitioner)
            if options.keys() <= {"shards"}:
                return ":".join([word, *map(str, options.values())])
    return partitioners.name_partitioner(partitioner)


def parse_layout(spec: Any) -> Layout:
    """Parses a layout's name, or creates a layout from a partitioner.

    Raises:
      ValueError: if `spec` is a string that does not name a layout.
      TypeError: if `spec` is neither a string nor a partitioner.
    """
    if isinstance(spec, Layout):
        return spec
    if callable(spec) or isinstance(spec, partitioners.FullySharded):
        return Layout(partitioner=spec)
    if not isinstance(spec, str):
        raise TypeError(
            "The strategies of a plan must be names or partitioners. Received: "
            f"{spec!r} of type {type(spec).__name__}. Pass, for example, "
            f"{_EXAMPLES}."
        )
    # At most one word is about cores, and at most one about replicas.
    given: dict[str, Any] = {}
    for word in spec.split("+"):
        match = _WORD.fullmatch(word.strip())
        name = "cores" if match and match["cores"] else "partitioner"
        if match is None or name in given:
            raise ValueError(
                "The name of a layout must be 'replicated'; 'slots' or "
                "'sharded', optionally with a number of replicas; 'model' with "
                "a number of cores; or a combination with '+'. Received: "
                f"{spec!r:.100}. Pass, for example, {_EXAMPLES}."
            )
        given[name] = None
        if match["cores"]:
            given[name] = int(match["cores"])
        elif match["kind"]:
            shards = match["shards"] and int(match["shards"])
            given[name] = _KINDS[match["kind"]](shards=shards)
    return Layout(**given)


def list_layouts(num_devices: int, default_shards: int) -> list[Layout]:
    """Returns the layouts that are planned by default.

    Args:
      num_devices: The number of devices of the topology.
      default_shards: The default number of replicas over which variables are
        sharded.
    """
    given: list[Any] = [None]
    if num_devices > 1:
        given += [kind() for kind in _KINDS.values()]
    number = min(num_devices, _MAX_DIVIDED)
    if number > default_shards:
        given.append(partitioners.FullySharded(shards=number))
    return [Layout(partitioner=partitioner) for partitioner in given]


def find_computation_shape(
    cores: int, mesh_shape: Sequence[int]
) -> tuple[int, ...] | None:
    """Finds the shape of the box of devices that forms a replica.

    Args:
      cores: The number of devices of a replica.
      mesh_shape: The shape of the slice in the dimensions x, y, z and core.

    Returns:
      The shape of the most compact box that tiles the slice, or None if no box
      with this number of devices tiles it.
    """
    sides = [[n for n in range(1, m + 1) if m % n == 0] for m in mesh_shape]
    boxes = [x for x in itertools.product(*sides) if math.prod(x) == cores]
    return min(boxes, key=lambda box: (sum(box), box[::-1]), default=None)


def check_topologies(spec: object) -> list[str]:
    """Returns the names of topologies as a list, without duplicates.

    Raises:
      TypeError: if `spec` is not a string or a sequence, or is empty.
    """
    names = [spec] if isinstance(spec, str) else spec
    if (
        not isinstance(names, Sequence)
        or not names
        or not all(isinstance(name, str) for name in names)
    ):
        raise TypeError(
            "The topologies of a plan must be names of TPUs or GPUs. Received: "
            f"{spec!r}. Pass, for example, ['v5e:4x4', 'h100:8'], or omit "
            "`topologies` to plan for the strategy's devices."
        )
    return list(dict.fromkeys(names))


def compute_rows(per_replica: float, replicas: int) -> int:
    """Returns the number of rows of a global batch for a number of replicas.

    The number of rows per replica is rounded up, and is at least 1.
    """
    return max(math.ceil(per_replica), 1) * replicas
