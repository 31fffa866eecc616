"""This process's place in a job, from a resolver's answers."""

from typing import Any, Protocol

from keras_strategies.cluster.addresses import (
    check_address,
    parse_index,
    shown,
)
from keras_strategies.cluster.spec import ClusterSpec, TaskInfo

ROLES = ("chief", "worker", "evaluator", "ps")
"""The jobs that `tf.distribute` knows."""

_SERVERS = (
    "Parameter servers are not supported: every process trains, and keeps all "
    "variables. Received: a cluster with the job 'ps'. Use "
    "`MultiWorkerMirroredStrategy` with a cluster of 'chief' and 'worker' "
    "tasks only (docs/migration.md)."
)


class AnyResolver(Protocol):
    """What is asked of a resolver, ours or tf's."""

    @property
    def task_type(self) -> str | None:
        """The job of this process."""
        ...

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job."""
        ...

    def cluster_spec(self) -> Any:
        """All jobs.

        Returns:
          A `ClusterSpec`, ours or tf's.
        """
        ...


def task_info(resolver: AnyResolver) -> TaskInfo:
    """What a process needs to know to start, from its resolver.

    Training processes are numbered: the chief first, then the workers by
    index. Without a chief, worker 0 is it. An evaluator is no training
    process. Without a cluster, this process is alone.

    Args:
      resolver: A `ClusterResolver`, or one of tf's.

    Returns:
      This process's task, the number of processes, and the chief's address.

    Raises:
      ValueError: the cluster has a job 'ps', an unknown job, no training
        task, several chiefs, an address that is no `host:port` or that is
        given twice, or a gap; or this process's task is not in it or not
        known.
      TypeError: the task's index is no integer.

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
        return _alone(task_type, task_id)
    check_roles(spec)
    if "ps" in spec.jobs and spec.num_tasks("ps"):
        raise ValueError(_SERVERS)
    check_addresses(spec)
    task_type, index = _checked_task(task_type, task_id)
    addresses = _training_addresses(
        spec, getattr(resolver, "num_processes", None)
    )
    num_chiefs = num_tasks(spec, "chief")
    limits = {
        "chief": num_chiefs,
        "worker": len(addresses) - num_chiefs,
        "evaluator": max(num_tasks(spec, "evaluator"), 1),
    }
    if index >= limits[task_type]:
        raise ValueError(
            "This process's task is one of the cluster's. Received: task "
            f"{index} of job {task_type!r}, which has {limits[task_type]} "
            "tasks. Correct the index, or the cluster; both count from 0."
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


def task_of_process(
    coordinator_address: str, num_processes: int, process_id: int
) -> TaskInfo:
    """The place of a process that was given JAX's three numbers.

    Args:
      coordinator_address: `host:port` of process 0.
      num_processes: How many processes there are.
      process_id: Which of them this one is.

    Raises:
      TypeError: a number that is no integer.
      ValueError: one that is negative or too large, or an address that is no
        `host:port`.
    """
    check_address(coordinator_address, "process 0")
    count = parse_index(num_processes, "The number of processes")
    process = parse_index(process_id, "The number of a process")
    return TaskInfo(
        type="worker",
        index=process,
        is_chief=not process,
        process_id=process,
        num_processes=count,
        addresses=(coordinator_address, *[None] * (count - 1)),
    )


def check_roles(spec: ClusterSpec) -> None:
    """Raises for a job that `tf.distribute` does not know.

    Raises:
      ValueError: there is one; or several chiefs or evaluators.
    """
    for job in spec.jobs:
        if job not in ROLES:
            raise ValueError(
                f"A cluster has the jobs {', '.join(map(repr, ROLES))}. "
                f"Received: a job {shown(job)}. {_cure_of_role(job)}"
            )
    for job in ("chief", "evaluator"):
        if num_tasks(spec, job) > 1:
            raise ValueError(
                f"There is at most one {job!r} task. Received: "
                f"{spec.num_tasks(job)}. Make the others workers."
            )


def check_addresses(spec: ClusterSpec) -> None:
    """Raises for an address that is no `host:port`, and for one given twice.

    Raises:
      ValueError: there is one.
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
                    "Each task has an address of its own. Received: "
                    f"{shown(address)} for {first} and for {owner}. Give "
                    "tasks of one host different ports."
                )


def num_tasks(spec: ClusterSpec, job: str) -> int:
    """Returns how many tasks a job has; 0 if there is no such job."""
    return spec.num_tasks(job) if job in spec.jobs else 0


def _alone(task_type: str | None, task_id: int | None) -> TaskInfo:
    """The task of a process without a cluster."""
    if task_id not in (None, 0):
        raise ValueError(
            "A process without a cluster is task 0. Received: task "
            f"{shown(task_id)} and no cluster: several processes would train "
            "apart, and write to the same files. Give the cluster (in "
            'TF_CONFIG: its "cluster"), or leave the task out.'
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


def _checked_task(
    task_type: str | None, task_id: int | None
) -> tuple[str, int]:
    if task_type is None or task_id is None:
        missing = "type" if task_type is None else "index"
        raise ValueError(
            "A process in a cluster must know its task, type and index. "
            f"Received: a cluster, and no {missing}. Set the resolver's "
            "`task_type` and `task_id` (in TF_CONFIG: "
            '"task": {"type": "worker", "index": 0}).'
        )
    index = parse_index(task_id, "The index of this process's task")
    if task_type == "ps":
        raise ValueError(_SERVERS)
    if task_type not in ROLES:
        raise ValueError(
            f"The type of a task is one of {', '.join(map(repr, ROLES))}. "
            f"Received: {shown(task_type)}. {_cure_of_role(task_type)}"
        )
    return task_type, index


def _training_addresses(
    spec: ClusterSpec, num_processes: int | None
) -> tuple[str | None, ...]:
    """The addresses by process number, None for those that are not known."""
    if num_processes is not None:
        known = spec.job_tasks("worker")
        return tuple(known + [None] * (num_processes - len(known)))
    addresses = [
        address
        for job in ("chief", "worker")
        if job in spec.jobs
        for address in spec.job_tasks(job)
    ]
    if not addresses:
        raise ValueError(
            "A cluster has a 'chief' or a 'worker' task. Received: the jobs "
            f"{shown(spec.jobs)}. Add the processes that train."
        )
    if None in addresses:
        raise ValueError(
            "The tasks of a job are 0, 1, 2, ... without a gap. Received: "
            f"{addresses.index(None)} tasks, then none of the next index. "
            "Give the addresses of all tasks."
        )
    return tuple(addresses)


def _cure_of_role(name: str) -> str:
    if name == "master":
        return "Rename it to 'chief', as tf 1's 'master' is called since."
    return "Rename it: processes that train are 'worker'."
