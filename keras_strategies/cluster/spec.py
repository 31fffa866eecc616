"""ClusterSpec and TaskInfo: a cluster's tasks, and the task of this process."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from keras_strategies.cluster.addresses import parse_index, shorten
from keras_strategies.cluster.checks import check_type

_FIX = 'Pass, for example, {"worker": ["host0:2222", "host1:2222"]}.'


class ClusterSpec:
    """The addresses of a cluster's tasks by job, like `tf.train.ClusterSpec`.

        ClusterSpec({"chief": ["host0:2222"], "worker": ["host1:2222"]})
        ClusterSpec({"worker": {0: "host0:2222"}})  # Others are unknown.

    A `ClusterSpec` is immutable. It is false in a boolean context if it has no
    jobs. It equals another `ClusterSpec` with the same tasks. It also equals a
    dict that maps each job's name to a dict from task indices to addresses, if
    the dict contains the same tasks.

    Args:
      cluster: A mapping from each job's name either to a list of addresses or
        to a dict from task indices to addresses; or a `ClusterSpec`.

    Raises:
      TypeError: if `cluster` is neither a mapping nor a `ClusterSpec`, a job
        name or an address is not a str, or an index is not an integer.
      ValueError: if an index is negative, or a million or more.

    References:
      https://www.tensorflow.org/api_docs/python/tf/train/ClusterSpec
    """

    def __init__(self, cluster: "Mapping[str, Any] | ClusterSpec", /) -> None:
        if isinstance(cluster, ClusterSpec):
            self._tasks = cluster._tasks
            return
        if not isinstance(cluster, Mapping):
            raise TypeError(
                "`cluster` must map job names to addresses. Received: an "
                f"object of type {type(cluster).__name__}. {_FIX}"
            )
        for job in cluster:
            check_type("The name of a job", job, str, "a str", _FIX)
        self._tasks: dict[str, dict[int, str]] = {
            job: _read_tasks(job, tasks) for job, tasks in cluster.items()
        }

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            return self._tasks == other._tasks
        return self._tasks == other

    # As in TensorFlow, a ClusterSpec is not hashable, because it can equal a
    # dict, and dicts are not hashable.
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        jobs = self.as_dict()
        items = ", ".join(f"{job!r}: {jobs[job]!r}" for job in sorted(jobs))
        return f"ClusterSpec({{{items}}})"

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Returns the addresses of each job.

        Returns:
          A dict from job names to lists of addresses. A job without tasks, or
          with gaps between its indices, has a dict from indices to addresses.
        """
        return {job: _list_tasks(tasks) for job, tasks in self._tasks.items()}

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._tasks)

    def num_tasks(self, job_name: str) -> int:
        """Returns the number of tasks in a job.

        Raises:
          ValueError: if no such job exists.
        """
        return len(self._find_job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the indices of a job's tasks, in ascending order.

        Raises:
          ValueError: if no such job exists.
        """
        return sorted(self._find_job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns the address of a task.

        Raises:
          ValueError: if the job does not exist, or has no such task.
        """
        tasks = self._find_job(job_name)
        if isinstance(task_index, bool) or task_index not in tasks:
            raise ValueError(
                f"No task with index {shorten(task_index)} in job "
                f"{shorten(job_name)}, which has {len(tasks)} tasks. Pass the "
                "index of one of these tasks."
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Returns a job's addresses as a list, with None for missing tasks.

        Raises:
          ValueError: if no such job exists.
        """
        tasks = self._find_job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _find_job(self, name: object) -> dict[int, str]:
        if not isinstance(name, str) or name not in self._tasks:
            raise ValueError(
                f"No such job in cluster: {shorten(name)}. The cluster has the "
                f"jobs {shorten(self.jobs)}. Pass one of them. If the job is "
                "None because this process's task is unknown, set `task_type` "
                "and `task_id`."
            )
        return self._tasks[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """The role of one process in a distributed program.

    Attributes:
      type: The job of this process's task: "chief", "worker" or "evaluator".
      index: The index of the task in that job.
      is_chief: Whether this process writes the files that only one process
        should write. As in tf, an evaluator counts as a chief.
      process_id: The number of this process among all training processes; 0
        for the chief, and None for an evaluator, which does not train.
      num_processes: The number of training processes.
      addresses: The address (`host:port`) of every training process, in the
        order of the processes' numbers; None for an unknown address.

    Example:
      >>> hosts = {"worker": ["host0:2222", "host1:2222"]}
      >>> resolver = ks.cluster_resolver.SimpleClusterResolver(
      ...     ks.cluster_resolver.ClusterSpec(hosts),
      ...     task_type="worker", task_id=0,
      ... )
      >>> info = ks.cluster_resolver.task_info(resolver)
      >>> info.is_chief, info.num_processes
      (True, 2)
    """

    type: str
    index: int
    is_chief: bool
    process_id: int | None
    num_processes: int
    addresses: tuple[str | None, ...]

    @property
    def coordinator_address(self) -> str | None:
        """The chief's address, to which processes connect; None if unknown."""
        return self.addresses[0]


def _read_tasks(job: str, tasks: object) -> dict[int, str]:
    if isinstance(tasks, list | tuple):
        pairs = list(enumerate(tasks))
    elif isinstance(tasks, Mapping):
        pairs = [
            (parse_index(index, f"A task index of job {shorten(job)}"), address)
            for index, address in tasks.items()
        ]
    else:
        raise TypeError(
            f"The tasks of job {shorten(job)} must be a list of addresses or a "
            "dict from indices to addresses. Received: an object of type "
            f"{type(tasks).__name__}. {_FIX}"
        )
    for index, address in pairs:
        name = f"The address of task {index} of job {shorten(job)}"
        check_type(name, address, str, "a str", _FIX)
    return dict(pairs)


def _list_tasks(tasks: dict[int, str]) -> list[str] | dict[int, str]:
    # As in TensorFlow, a job without tasks becomes an empty dict, not a list.
    if tasks and max(tasks) + 1 == len(tasks):
        return [tasks[index] for index in range(len(tasks))]
    return {index: tasks[index] for index in sorted(tasks)}
