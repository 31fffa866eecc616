"""A resolver for the tasks of a SLURM job step."""

from collections.abc import Mapping

from keras_strategies.cluster.addresses import (
    join_address,
    read_number,
    read_text,
    shorten,
)
from keras_strategies.cluster.checks import check_number, check_port
from keras_strategies.cluster.resolvers.resolver import (
    ClusterResolver,
    choose_environ,
)
from keras_strategies.cluster.resolvers.slurm_step import (
    SETTER,
    expand_hostlist,
    expand_tasks_per_node,
    place_tasks,
)
from keras_strategies.cluster.spec import ClusterSpec

_PROCESS_ID = "SLURM_PROCID"
_NUM_TASKS = "SLURM_STEP_NUM_TASKS"
_HOSTS = "SLURM_STEP_NODELIST"
_TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_NUM_GPUS = "SLURM_GPUS_ON_NODE"


class SlurmClusterResolver(ClusterResolver):
    """A resolver for the tasks of a SLURM job step, as in TensorFlow.

    It reads the environment variables of the step once, when it is created.

    ```sh
    srun --nodes 2 --ntasks-per-node 4 python train.py
    ```

    The resolver assigns tasks to hosts in the same way as SLURM, according to
    SLURM_DISTRIBUTION (srun's option -m). By default, the hosts are filled one
    after the other ("block"). "cyclic" and "plane" are also supported.

    Differs from tf: `task_type` and `task_id` are set from the start. Hosts
    keep SLURM's order, and distributions other than block are supported.
    CUDA_VISIBLE_DEVICES is not written (use `gpu_ids`), nvidia-smi is not run,
    and a step without GPUs works.

    Args:
      jobs: The number of tasks of each job, such as
        `{"chief": 1, "worker": 7}`. SLURM's ranks are assigned to the jobs in
        the alphabetical order of the jobs' names. None: all tasks are workers.
      port_base: The port of the first task on each host. The host's other
        tasks use the following ports.
      gpus_per_node: The number of GPUs on each host. None: the number of
        entries in CUDA_VISIBLE_DEVICES; if it is not set, the number in
        SLURM_GPUS_ON_NODE; otherwise 0.
      gpus_per_task: The number of GPUs of each task. None: `gpus_per_node`
        divided by the largest number of tasks on any host; or, if SLURM has
        bound GPUs to tasks (`--gpus-per-task`, `--gpu-bind`), the number of
        entries in CUDA_VISIBLE_DEVICES.
      tasks_per_node: The number of tasks on each host: one number for all
        hosts, or a dict from host names to numbers. None: the numbers in
        SLURM_STEP_TASKS_PER_NODE.
      auto_set_gpu: Not used; accepted for compatibility with TensorFlow.
      rpc_layer: The protocol that `master()` prepends to addresses.
      environ: The environment variables; None for those of this process.

    Raises:
      RuntimeError: if a variable is not set, the numbers in `jobs` do not add
        up to the number of tasks that SLURM runs, the tasks on a host request
        more GPUs than the host has, or this task does not run on the host that
        its rank implies (as with SLURM's distribution "arbitrary").
      ValueError: if a variable or a number is invalid.
      TypeError: if a number is not an integer.

    References:
      https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/SlurmClusterResolver

    Example:
      >>> resolver = ks.cluster_resolver.SlurmClusterResolver(environ={
      ...     "SLURM_PROCID": "1",
      ...     "SLURM_STEP_NUM_TASKS": "2",
      ...     "SLURM_STEP_NODELIST": "host[0-1]",
      ...     "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
      ... })
      >>> resolver.task_id, resolver.cluster_spec().job_tasks("worker")
      (1, ['host0:8888', 'host1:8888'])
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        del auto_set_gpu
        environ = choose_environ(environ)
        rank = read_number(environ, _PROCESS_ID, SETTER)
        if jobs is None:
            num_tasks = read_number(environ, _NUM_TASKS, SETTER, minimum=1)
            jobs = {"worker": num_tasks}
        hosts = _read_hosts(environ, tasks_per_node)
        _check_counts(jobs, hosts, rank)
        max_on_host = max(count for _, count in hosts)
        bound = _count_bound_gpus(environ) if gpus_per_node is None else 0
        gpus = _compute_gpus_per_task(
            environ, gpus_per_node, gpus_per_task, max_on_host, bound
        )
        check_port(port_base, "`port_base`")
        check_port(port_base + max_on_host - 1, "The last task's port")
        places = place_tasks(environ, hosts, rank)
        local = places[rank][1]
        self._num_accelerators = {"GPU": gpus}
        first = 0 if bound else local * gpus
        self._gpu_ids = tuple(range(first, first + gpus))
        self._spec, self._task_type, self._task_id = _allocate(
            jobs, [join_address(h, port_base + i) for h, i in places], rank
        )
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses of all tasks of the step."""
        return self._spec

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Returns this process's job, and its index in that job."""
        return self.task_type, self.task_id

    def gpu_ids(self) -> tuple[int, ...]:
        """Returns this task's GPUs, as indices into its visible GPUs.

        TensorFlow writes these indices to CUDA_VISIBLE_DEVICES. Here, a
        strategy that joins the job passes them to
        `jax.distributed.initialize` as `local_device_ids`. If SLURM itself
        shows each task only a part of the GPUs (as with `--gpus-per-task`),
        these are all that the task sees.
        """
        return self._gpu_ids


def _read_hosts(
    environ: Mapping[str, str], tasks_per_node: int | Mapping[str, int] | None
) -> list[tuple[str, int]]:
    """Returns each host's name and number of tasks, in SLURM's order."""
    if isinstance(tasks_per_node, Mapping):
        hosts = list(tasks_per_node.items())
        if environ.get(_HOSTS):
            order = expand_hostlist(environ[_HOSTS])
            places = {host: place for place, host in enumerate(order)}
            hosts.sort(key=lambda item: places.get(item[0], len(places)))
    else:
        names = expand_hostlist(read_text(environ, _HOSTS, SETTER))
        if tasks_per_node is None:
            text = read_text(environ, _TASKS_PER_NODE, SETTER)
            counts = expand_tasks_per_node(text)
        else:
            counts = [tasks_per_node] * len(names)
        if len(counts) != len(names):
            raise ValueError(
                f"{_HOSTS} and {_TASKS_PER_NODE} must have one entry for each "
                f"host. Received: {len(names)} hosts and {len(counts)} "
                "numbers of tasks. Both variables are normally set by srun. "
                "Check whether something else also sets them, or pass "
                "`tasks_per_node`."
            )
        hosts = list(zip(names, counts, strict=True))
    for _, count in hosts:
        _check_count(count, "The number of tasks on a host")
    return hosts


def _check_counts(
    jobs: Mapping[str, int], hosts: list[tuple[str, int]], rank: int
) -> None:
    for job, count in jobs.items():
        _check_count(count, f"The number of tasks of job {shorten(job)}")
    requested = sum(jobs.values())
    assigned = sum(count for _, count in hosts)
    if requested != assigned or not assigned:
        raise RuntimeError(
            "`jobs` must add up to the number of tasks that SLURM runs. "
            f"Requested {requested} tasks but {assigned} were assigned. "
            f"Received: the jobs {shorten(dict(jobs))}. Correct `jobs`, or "
            "srun's --ntasks."
        )
    if rank >= assigned:
        raise RuntimeError(
            f"{_PROCESS_ID} must be less than the number of tasks. Received: "
            f"{rank}, with {assigned} tasks. Start the program with srun, and "
            "correct `tasks_per_node` if you pass it."
        )


def _check_count(count: object, what: str) -> None:
    check_number(what, count, "Pass a number such as 4.", minimum=0)


def _compute_gpus_per_task(
    environ: Mapping[str, str],
    gpus_per_node: int | None,
    gpus_per_task: int | None,
    max_on_host: int,
    bound: int,
) -> int:
    """Returns the number of GPUs of each task; `bound` if SLURM bound them."""
    _check_count(gpus_per_node, "`gpus_per_node`")
    _check_count(gpus_per_task, "`gpus_per_task`")
    if bound and gpus_per_task is None:
        return bound
    if gpus_per_node is None:
        gpus_per_node = max_on_host * bound or _count_visible_gpus(environ)
    if gpus_per_task is None:
        return gpus_per_node // max_on_host
    if max_on_host * gpus_per_task > gpus_per_node:
        raise RuntimeError(
            "Requested more GPUs per node than available. The tasks on a host "
            f"do not share GPUs. Received: {max_on_host} tasks with "
            f"{gpus_per_task} GPUs each on a host with {gpus_per_node} GPUs. "
            "Lower `gpus_per_task`, or correct `gpus_per_node`."
        )
    return gpus_per_task


def _count_bound_gpus(environ: Mapping[str, str]) -> int:
    """Returns the number of GPUs that SLURM bound to this task.

    The result is 0 if each task sees all GPUs of the step on its host.
    """
    visible = _count_visible_gpus(environ)
    return visible if visible < _count_step_gpus(environ) else 0


def _count_visible_gpus(environ: Mapping[str, str]) -> int:
    if _VISIBLE_GPUS in environ:
        return len([gpu for gpu in environ[_VISIBLE_GPUS].split(",") if gpu])
    return _count_step_gpus(environ)


def _count_step_gpus(environ: Mapping[str, str]) -> int:
    """Returns the number of GPUs of the step on this host; 0 if unknown."""
    is_set = bool(environ.get(_NUM_GPUS))
    return read_number(environ, _NUM_GPUS, SETTER) if is_set else 0


def _allocate(
    jobs: Mapping[str, int], addresses: list[str], rank: int
) -> tuple[ClusterSpec, str | None, int | None]:
    """Assigns the addresses, in the order of ranks, to the jobs.

    Returns:
      The cluster, the job of the task whose rank is `rank`, and the index of
      this task in the job.
    """
    cluster: dict[str, list[str]] = {}
    task_type, task_id, start = None, None, 0
    for job, count in sorted(jobs.items()):
        cluster[job] = addresses[start : start + count]
        if start <= rank < start + count:
            task_type, task_id = job, rank - start
        start += count
    return ClusterSpec(cluster), task_type, task_id
