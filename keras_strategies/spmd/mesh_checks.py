"""Checks of the devices of meshes."""

import itertools
from typing import Any


def check_cores(num_devices: int, cores: int, context_parallel: object) -> None:
    """Raises an error unless replicas have their cores, and may share.

    Args:
      num_devices: The number of devices of all replicas.
      cores: The number of devices of each replica.
      context_parallel: See `ReplicaMesh`.
    """
    if cores < 1 or num_devices % cores:
        raise ValueError(
            "All replicas must have the same number of devices. Received: "
            f"{num_devices} devices, cores_per_replica={cores}. "
            "Pass a number of devices that is a multiple of "
            "`cores_per_replica`."
        )
    if not isinstance(context_parallel, bool):
        raise TypeError(
            "`context_parallel` must be a bool. Received: "
            f"context_parallel={context_parallel!r}. Pass True, and choose the "
            "number of cores of a replica with a device assignment, or with "
            "`cores_per_replica` of a mesh."
        )
    if context_parallel and cores == 1:
        raise ValueError(
            "`context_parallel` must be used with replicas of several cores. "
            "Received: context_parallel=True and replicas of one core. Pass a "
            "device assignment with a `computation_shape`, or a mesh with "
            "`cores_per_replica`."
        )


def check_owners(owners: list[int], cores: int) -> None:
    """Raises ValueError unless each process's replicas are contiguous.

    Args:
      owners: The id of the process that each device belongs to.
      cores: Number of devices of each replica.
    """
    replica_groups = [
        frozenset(owners[k : k + cores]) for k in range(0, len(owners), cores)
    ]
    groups = dict.fromkeys(replica_groups)
    shown = [sorted(group) for group in groups]
    if sum(map(len, groups)) > len(set(owners)):
        raise ValueError(
            "Processes that share a replica must share all of their replicas, "
            "because they read the same rows. Received: replicas whose cores "
            f"belong to the processes {_shorten(shown)}. Choose a "
            "`computation_shape` within the chips of one host, such as "
            "[2, 2, 1, 1], or one that covers all chips of its hosts."
        )
    runs = [(k, len(list(run))) for k, run in itertools.groupby(replica_groups)]
    if len(runs) != len(groups) or len({count for _, count in runs}) > 1:
        sorted_groups = [sorted(group) for group in replica_groups]
        processes = [g[0] if len(g) == 1 else g for g in sorted_groups]
        raise ValueError(
            "All processes must have the same number of replicas, and the "
            "replicas of a process must be consecutive. Received: replicas "
            f"that belong to the processes {_shorten(processes)}, in the order "
            "of replica ids. Pass the same number of devices from each "
            "process, ordered by process."
        )


def _shorten(items: list[Any]) -> str:
    return f"{items[:16]}{'...' if len(items) > 16 else ''}"
