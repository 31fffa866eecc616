"""The role of this process in a cluster, computed from a cluster resolver."""

from typing import Any, Protocol

from keras_strategies.cluster.addresses import (
    check_address,
    is_local,
    parse_index,
    shorten,
)
from keras_strategies.cluster.checks import check_number
from keras_strategies.cluster.spec import ClusterSpec, TaskInfo

ROLES = ("chief", "worker", "evaluator", "ps")
"""The names that jobs can have in `tf.distribute`."""

_ROLE_FIX = (
    "Use 'worker' for processes that train; 'chief' replaces the 'master' of "
    "tf 1."
)
_SERVERS = (
    "Parameter servers are not supported, because every process trains and "
    "stores variables itself, but the cluster has a job 'ps'. Use "
    "`MultiWorkerMirroredStrategy` with a cluster of 'chief' and 'worker' "
    "tasks only (docs/migration.md)."
)


class AnyResolver(Protocol):
    """The interface that this package requires of a cluster resolver.

    The resolvers of this package and those of TensorFlow implement it.
    """

    @property
    def task_type(self) -> str | None:
        """The job of this process's task, such as "worker"."""
        ...

    @property
    def task_id(self) -> int | None:
        """The index of this process's task in its job."""
        ...

    def cluster_spec(self) -> Any:
        """Returns the addresses of all tasks by job.

        Returns:
          A `ClusterSpec` of this package or of TensorFlow.
        """
        ...


def task_info(resolver: AnyResolver) -> TaskInfo:
    """Returns the role of this process in the cluster of a resolver.

    The training processes are numbered from 0: first the chief, then the
    workers in the order of their indices. If the cluster has no chief, worker
    0 is the chief. An evaluator does not count as a training process. If there
    is no cluster, this process is the only one.

    Args:
      resolver: A `ClusterResolver` of this package or of TensorFlow.

    Returns:
      This process's task, the number of processes, and their addresses.

    Raises:
      ValueError: if the cluster has a job 'ps', an unknown job, no training
        task, several chiefs, an address that is not `host:port`, a duplicate
        address, or a gap between a job's indices, or if process 0 has an
        address such as localhost and others do not. Also if this process's
        task is unknown, or is not in the cluster.
      TypeError: if the task's index is not an integer.

    Example:
      >>> spec = ClusterSpec({"chief": ["a:2222"], "worker": ["b:2222"]})
      >>> resolver = SimpleClusterResolver(spec, task_type="worker", task_id=0)
      >>> info = task_info(resolver)
      >>> info.process_id, info.num_processes, info.coordinator_address
      (1, 2, 'a:2222')
    """
    spec = ClusterSpec(resolver.cluster_spec().as_dict())
    task_type, task_id = resolver.task_type, resolver.task_id
    if not spec:
        return _make_lone_task(task_type, task_id)
    check_roles(spec)
    if "ps" in spec.jobs and spec.num_tasks("ps"):
        raise ValueError(_SERVERS)
    check_addresses(spec)
    task_type, index = _check_task(task_type, task_id)
    addresses = _list_training_addresses(
        spec, getattr(resolver, "num_processes", None)
    )
    num_chiefs = count_tasks(spec, "chief")
    limits = {
        "chief": num_chiefs,
        "worker": len(addresses) - num_chiefs,
        "evaluator": max(count_tasks(spec, "evaluator"), 1),
    }
    if index >= limits[task_type]:
        raise ValueError(
            "This process's task must be in the cluster. Received: task "
            f"{index} of job {task_type!r}, which has {limits[task_type]} "
            "tasks. Correct the task's index or the cluster. Indices start at "
            "0."
        )
    process_id = None
    if task_type != "evaluator":
        process_id = index + (num_chiefs if task_type == "worker" else 0)
    return TaskInfo(
        type=task_type,
        index=index,
        is_chief=not process_id,
        process_id=process_id,
        num_processes=len(addresses),
        addresses=addresses,
    )


def make_task_info(
    coordinator_address: str, num_processes: int, process_id: int
) -> TaskInfo:
    """Makes a `TaskInfo` from arguments of `jax.distributed.initialize`.

    Args:
      coordinator_address: `host:port` of process 0.
      num_processes: The number of processes.
      process_id: This process's number.

    Raises:
      TypeError: if a number is not an integer.
      ValueError: if a number is negative or too large, or the address is not
        `host:port`.
    """
    check_address(coordinator_address, "process 0")
    count = parse_index(num_processes, "`num_processes`")
    process = parse_index(process_id, "`process_id`")
    fix = "Number the processes from 0."
    check_number("`num_processes`", count, fix, minimum=1)
    check_number("`process_id`", process, fix, maximum=count - 1)
    return TaskInfo(
        type="worker",
        index=process,
        is_chief=not process,
        process_id=process,
        num_processes=count,
        addresses=(coordinator_address, *[None] * (count - 1)),
    )


def check_roles(spec: ClusterSpec) -> None:
    """Raises an error unless `tf.distribute` allows all jobs of a cluster.

    Raises:
      ValueError: if the cluster has an unknown job, or several chiefs or
        evaluators.
    """
    for job in spec.jobs:
        if job not in ROLES:
            raise ValueError(
                "The jobs of a cluster must be among "
                f"{', '.join(map(repr, ROLES))}. "
                f"Received: a job {shorten(job)}. {_ROLE_FIX}"
            )
    for job in ("chief", "evaluator"):
        if count_tasks(spec, job) > 1:
            raise ValueError(
                f"There must be at most one {job!r} task. Received: "
                f"{spec.num_tasks(job)} tasks. Move the other tasks to the "
                "job 'worker'."
            )


def check_addresses(spec: ClusterSpec) -> None:
    """Raises an error unless all addresses are `host:port` and unique.

    Raises:
      ValueError: if an address is not `host:port`, or two tasks have the same
        address.
    """
    owners: dict[str, str] = {}
    for job in spec.jobs:
        for index in spec.task_indices(job):
            owner = f"task {index} of job {job!r}"
            address = spec.task_address(job, index)
            check_address(address, owner)
            first = owners.setdefault(address.lower(), owner)
            if first != owner:
                raise ValueError(
                    "Tasks must have different addresses. Received: "
                    f"{shorten(address)} for {first} and for {owner}. Use "
                    "different ports for tasks on the same host."
                )


def count_tasks(spec: ClusterSpec, job: str) -> int:
    """Returns the number of tasks in a job; 0 if the job does not exist."""
    return spec.num_tasks(job) if job in spec.jobs else 0


def _make_lone_task(task_type: str | None, task_id: int | None) -> TaskInfo:
    """Returns the role of a process that is not part of a cluster."""
    if task_id not in (None, 0):
        raise ValueError(
            "A process without a cluster must be task 0. Received: task "
            f"{shorten(task_id)} and no cluster. Without a cluster, each "
            "process would train separately and write to the same files. Pass "
            'the cluster (in TF_CONFIG, set "cluster"), or omit the task.'
        )
    is_evaluator = task_type == "evaluator"
    return TaskInfo(
        type="evaluator" if is_evaluator else "worker",
        index=0,
        is_chief=True,
        process_id=None if is_evaluator else 0,
        num_processes=1,
        addresses=(None,),
    )


def _check_task(task_type: str | None, task_id: int | None) -> tuple[str, int]:
    if task_type is None or task_id is None:
        missing = "type" if task_type is None else "index"
        raise ValueError(
            "A process in a cluster needs the type and index of its task. "
            f"Missing: {missing}. Set the resolver's "
            "`task_type` and `task_id` (in TF_CONFIG: "
            '"task": {"type": "worker", "index": 0}).'
        )
    index = parse_index(task_id, "The index of this process's task")
    if task_type == "ps":
        raise ValueError(_SERVERS)
    check_roles(ClusterSpec({task_type: []}))
    return task_type, index


def _list_training_addresses(
    spec: ClusterSpec, num_processes: int | None
) -> tuple[str | None, ...]:
    """Returns the addresses of all training processes, in process order.

    Args:
      spec: The cluster.
      num_processes: The number of processes, if the cluster may contain only
        some of their addresses; the others are None in the result. If
        `num_processes` is None, the cluster must contain all addresses.
    """
    if num_processes is not None:
        known = spec.job_tasks("worker")
        return tuple(known + [None] * (num_processes - len(known)))
    jobs = [job for job in ("chief", "worker") if job in spec.jobs]
    addresses = [address for job in jobs for address in spec.job_tasks(job)]
    if not addresses:
        raise ValueError(
            "A cluster must have a 'chief' or a 'worker' task. Received: the "
            f"jobs {shorten(spec.jobs)}. Add a task for each process that "
            "trains."
        )
    known = [address for address in addresses if address is not None]
    if len(known) < len(addresses):
        raise ValueError(
            "The tasks of a job must be numbered 0, 1, 2, ... without a gap. "
            f"Received: a gap after {addresses.index(None)} tasks. Pass the "
            "addresses of all tasks."
        )
    _check_coordinator(known)
    return tuple(known)


def _check_coordinator(addresses: list[str]) -> None:
    """Raises an error if other machines cannot reach process 0."""
    others = [i for i, address in enumerate(addresses) if not is_local(address)]
    if others and is_local(addresses[0]):
        raise ValueError(
            "All processes must be able to reach process 0. Received: "
            f"{shorten(addresses[0])} for process 0, which on each machine is "
            f"that machine itself, and another machine for process {others[0]}."
            " Set the address of process 0 to its machine's name or IP address."
        )
