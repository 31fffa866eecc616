"""ClusterSpec and TaskInfo: the tasks of a cluster, and this process's."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from keras_strategies.cluster.addresses import parse_index, shown
from keras_strategies.cluster.checks import check_type

_CURE = 'Give, for example, {"worker": ["host0:2222", "host1:2222"]}.'


class ClusterSpec:
    """The addresses of a cluster's tasks by job; as `tf.train.ClusterSpec`.

        ClusterSpec({"chief": ["host0:2222"], "worker": ["host1:2222"]})
        ClusterSpec({"worker": {0: "host0:2222"}})  # Others are not known.

    Never changes. It is false when it has no job, and equals another one, or
    a dict of dicts, with the same tasks.

    Args:
      cluster: Maps names of jobs to a list of addresses, or to a dict from
        indices of tasks to addresses; or a `ClusterSpec`.

    Raises:
      TypeError: `cluster` is something else, a job's name or an address is no
        str, an index no integer.
      ValueError: an index is negative, above a million or given twice.

    References:
      https://www.tensorflow.org/api_docs/python/tf/train/ClusterSpec
    """

    def __init__(self, cluster: "Mapping[str, Any] | ClusterSpec", /) -> None:
        if isinstance(cluster, ClusterSpec):
            self._tasks = cluster._tasks
            return
        if not isinstance(cluster, Mapping):
            raise TypeError(
                "`cluster` maps names of jobs to addresses. Received: an "
                f"object of type {type(cluster).__name__}. {_CURE}"
            )
        for job in cluster:
            check_type("The name of a job", job, str, "a str", _CURE)
        self._tasks: dict[str, dict[int, str]] = {
            job: _tasks_of(job, tasks) for job, tasks in cluster.items()
        }

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            return self._tasks == other._tasks
        return self._tasks == other

    # As tf's: it equals dicts, which have none.
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        jobs = self.as_dict()
        items = ", ".join(f"{job!r}: {jobs[job]!r}" for job in sorted(jobs))
        return f"ClusterSpec({{{items}}})"

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """The jobs; a list of addresses each, a dict where some are missing."""
        return {job: _as_list(tasks) for job, tasks in self._tasks.items()}

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._tasks)

    def num_tasks(self, job_name: str) -> int:
        """How many tasks a job has.

        Raises:
          ValueError: there is no such job.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """The indices of a job's tasks, in order.

        Raises:
          ValueError: there is no such job.
        """
        return sorted(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """The address of a task.

        Raises:
          ValueError: there is no such job, or no such task in it.
        """
        tasks = self._job(job_name)
        if isinstance(task_index, bool) or task_index not in tasks:
            raise ValueError(
                f"No task with index {shown(task_index)} in job "
                f"{shown(job_name)}, which has {len(tasks)}. Give the index "
                "of one of its tasks."
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """The addresses of a job by index, None where a task is missing.

        Raises:
          ValueError: there is no such job.
        """
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _job(self, name: object) -> dict[int, str]:
        if not isinstance(name, str) or name not in self._tasks:
            raise ValueError(
                f"No such job in cluster: {shown(name)}. The cluster has the "
                f"jobs {shown(self.jobs)}. Give one of them; where it is this "
                "process's own, its type and index are not known yet: set "
                "`task_type` and `task_id`."
            )
        return self._tasks[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """What one process needs to know to take part in a job.

    Attributes:
      type: The job of this task: "chief", "worker" or "evaluator".
      index: Its index in that job.
      is_chief: Whether it writes what is written once. As in tf, an evaluator
        is the chief of itself.
      process_id: Its number among all training processes, the chief's being
        0; None for an evaluator, which is none of them.
      num_processes: The number of training processes.
      addresses: `host:port` of every training process in the order of their
        numbers; None where it is not known.

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

    def __post_init__(self) -> None:
        if len(self.addresses) != self.num_processes or not self.addresses:
            raise ValueError(
                "A job has one or more processes, with an address or None "
                f"each. Received: num_processes={self.num_processes} and "
                f"{len(self.addresses)} addresses. Give one for each."
            )
        process = self.process_id
        if process is not None and not 0 <= process < self.num_processes:
            raise ValueError(
                "`process_id` is the number of one of the processes. "
                f"Received: process_id={process}, "
                f"num_processes={self.num_processes}. Count from 0."
            )

    @property
    def coordinator_address(self) -> str | None:
        """The chief's address, where all meet; None if there is no cluster."""
        return self.addresses[0]


def _tasks_of(job: str, tasks: object) -> dict[int, str]:
    if isinstance(tasks, list | tuple):
        pairs = list(enumerate(tasks))
    elif isinstance(tasks, Mapping):
        pairs = [
            (parse_index(index, f"An index of job {shown(job)}"), address)
            for index, address in tasks.items()
        ]
    else:
        raise TypeError(
            f"The tasks of job {shown(job)} are a list of addresses or a dict "
            "from indices to addresses. Received: an object of type "
            f"{type(tasks).__name__}. {_CURE}"
        )
    for index, address in pairs:
        name = f"The address of task {index} of job {shown(job)}"
        check_type(name, address, str, "a str", _CURE)
    if len(dict(pairs)) != len(pairs):
        raise ValueError(
            f"A task of job {shown(job)} has one address. Received: an index "
            f"twice, as a number and as text. {_CURE}"
        )
    return dict(pairs)


def _as_list(tasks: dict[int, str]) -> list[str] | dict[int, str]:
    # As tf: a job without tasks is an empty dict.
    if tasks and max(tasks) + 1 == len(tasks):
        return [tasks[index] for index in range(len(tasks))]
    return {index: tasks[index] for index in sorted(tasks)}
