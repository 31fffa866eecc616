"""Checks of the devices of meshes."""


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
    is_bool = isinstance(context_parallel, bool)
    if not is_bool or (context_parallel and cores == 1):
        raise ValueError(
            "`context_parallel` must be a bool, and False unless replicas have "
            f"several cores. Received: context_parallel={context_parallel!r} "
            f"and cores_per_replica={cores}. Pass True, and choose the number "
            "of cores by the `computation_shape` of a device assignment, or by "
            "`cores_per_replica` of a mesh."
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
    share = len(replica_groups) // len(groups)
    in_order = [group for group in groups for _ in range(share)]
    is_shared_twice = sum(map(len, groups)) > len(set(owners))
    if is_shared_twice or replica_groups != in_order:
        shown = [sorted(group) for group in replica_groups[:16]]
        shown = [g[0] if len(g) == 1 else g for g in shown]
        more = "..." if len(replica_groups) > 16 else ""
        raise ValueError(
            "All processes must have the same number of replicas, and the "
            "replicas of a process must be consecutive. Processes that share a "
            "replica must share all of their replicas, because they read the "
            "same rows. Received: replicas whose cores belong to the processes "
            f"{shown}{more}, in the order of replica ids. Pass the same number "
            "of devices from each process, ordered by process. Choose a "
            "`computation_shape` within the chips of one host, such as "
            "[2, 2, 1, 1], or one that covers all chips of its hosts."
        )
