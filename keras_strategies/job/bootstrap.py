"""Startup of a distributed JAX job, given this process's role in a cluster."""

import ipaddress
import multiprocessing
import os
import platform
import warnings
from typing import Any, NoReturn

import jax

from keras_strategies.cluster.addresses import check_address
from keras_strategies.cluster.exchange.job_secret import read_secret
from keras_strategies.cluster.exchange.rendezvous import (
    meet,
    split_address,
)
from keras_strategies.cluster.spec import TaskInfo
from keras_strategies.job import local_gpus, mutual_tls
from keras_strategies.names import versions
from keras_strategies.watchdog import watchdog

BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
"""JAX's environment variable for the address at which process 0 listens."""

# The timeout for the startup of JAX itself, which follows the rendezvous.
_JAX_TIMEOUT_S = 60
_VISIBLE_OPTION = "jax_cuda_visible_devices"
_PACKAGES = ("keras_strategies", "keras", "jax", "jaxlib")


def join(
    task: TaskInfo, *, strategy: str, timeout_s: float, resolver: object = None
) -> None:
    """Connects this process to the other processes of its job. Collective.

    Before JAX starts, all processes check each other's settings (see
    `rendezvous.meet`). A mistake therefore raises an error in every process,
    whereas JAX itself would abort the processes without naming the one at
    problem. Processes on one host take different GPUs (see `local_gpus`).

    Args:
      task: This process's role. If it is an evaluator or the only process, the
        function connects to none.
      strategy: The name of the strategy; it must be the same in all processes.
      timeout_s: How long to wait for all processes to arrive, in seconds.
      resolver: The cluster's resolver, if there is one.

    Raises:
      RuntimeError: if not all processes arrived in time, their settings
        differ, a process already uses JAX's devices, or this process is a
        spawned child that is importing its script.
      ValueError: if this process is already part of another job, the timeout
        is not positive, the job's secret has a wrong length, or the address of
        process 0 is unknown.
    """
    if not timeout_s > 0:
        raise ValueError(
            "The timeout for all processes must be a positive number of "
            f"seconds. Received: {timeout_s!r}. Omit it for the default."
        )
    if task.process_id is None or task.num_processes == 1:
        _take_gpus(task, resolver)
        return
    if jax.distributed.is_initialized():
        _check_joined(task)
        return
    check_main_guard()
    secret = read_secret(os.environ)
    address = task.coordinator_address or _fail_without_address(task)
    bind_address = _find_bind_address(address)
    problem, arguments, has_tls = _prepare(task, resolver)
    if task.process_id == 0 and not has_tls:
        _warn_of_strangers(bind_address)
    facts = {"mutual TLS": "on" if has_tls else "off", "strategy": strategy}
    meet(
        address,
        process_id=task.process_id,
        num_processes=task.num_processes,
        facts=_read_versions() | facts,
        problem=problem,
        timeout_s=timeout_s,
        bind_address=bind_address,
        names=_name_tasks(task),
        secret=secret,
    )
    jax.distributed.initialize(
        address,
        task.num_processes,
        task.process_id,
        coordinator_bind_address=bind_address,
        initialization_timeout=_JAX_TIMEOUT_S,
        **arguments,
        **watchdog.INITIALIZE_ARGUMENTS,
    )


def _prepare(
    task: TaskInfo, resolver: object
) -> tuple[str, dict[str, Any], bool]:
    """Prepares the start of JAX in this process.

    Returns:
      A tuple of the text of an error, or "", further arguments of
      `jax.distributed.initialize`, and whether the job has mutual TLS.
    """
    arguments: dict[str, Any] = {}
    problem, tls, options = _find_problem(), {}, jax.config.values
    try:
        gpus = _choose_gpus(task, resolver)
        if gpus is not None:
            # Without `local_device_ids`, JAX itself takes one GPU under SLURM
            # and Open MPI, unless its detection of clusters is switched off.
            arguments["local_device_ids"] = list(gpus) or None
            arguments["cluster_detection_method"] = "deactivate"
        tls = mutual_tls.read_mutual_tls(
            os.environ,
            options,
            is_supported=mutual_tls.CERT.lower() in options,
        )
    except (RuntimeError, TypeError, ValueError) as error:
        problem = problem or str(error)
    return problem, arguments | tls, bool(tls)


def check_main_guard() -> None:
    """Raises an error in a child that `multiprocessing` has just spawned.

    Such a child imports its parent's script before it runs its target function.
    If the script has no `if __name__ == "__main__":` guard, the import runs the
    entire script again, and the child would join the job under its parent's
    number.

    Raises:
      RuntimeError: if this process is a child that is importing the script.
    """
    # `multiprocessing` itself uses this attribute to detect a missing guard.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "A child process must not join the job that its parent belongs to. "
            "This strategy was created when a child, spawned by "
            "`multiprocessing`, imported the script. Put the script's code "
            "under `if __name__ == '__main__':`."
        )


def _choose_gpus(task: TaskInfo, resolver: object) -> tuple[int, ...] | None:
    """Returns the result of `local_gpus.choose_gpus`.

    If the user has set JAX's option for visible GPUs, the result is `()`, which
    does not change the option.
    """
    platforms = jax.config.values["jax_platforms"]
    if jax.config.values[_VISIBLE_OPTION] != "all":
        uses_gpus = local_gpus.uses_gpus(os.environ, platforms)
        return () if uses_gpus else None
    return local_gpus.choose_gpus(
        task, os.environ, platforms=platforms, resolver=resolver
    )


def _take_gpus(task: TaskInfo, resolver: object) -> None:
    """Limits JAX to the GPUs of a process that joins no other process.

    Its launcher may have started other processes on the host.
    """
    gpus = _choose_gpus(task, resolver)
    if gpus and not _find_problem():
        visible = ",".join(map(str, gpus))
        jax.config.update(_VISIBLE_OPTION, visible)


def _fail_without_address(task: TaskInfo) -> NoReturn:
    raise ValueError(
        "Every process of a job needs the address of process 0. It is unknown "
        f"in process {task.process_id} of {task.num_processes}. With "
        "several TPU slices, set MEGASCALE_COORDINATOR_ADDRESS to this "
        "address, or call `TPUClusterResolver.connect()` first, so that JAX "
        "finds the address."
    )


def _find_bind_address(address: str) -> str:
    """Returns the address at which process 0 listens."""
    bind_address = os.environ.get(BIND_ADDRESS) or address
    check_address(bind_address, f"process 0 (or {BIND_ADDRESS})")
    return bind_address


def _check_joined(task: TaskInfo) -> None:
    joined = (jax.process_count(), jax.process_index())
    if joined != (task.num_processes, task.process_id):
        raise ValueError(
            "This process has already joined a different job. Received: a "
            f"cluster with this process as process {task.process_id} of "
            f"{task.num_processes}, after it joined a job as process "
            f"{joined[1]} of {joined[0]}. Create the strategy without a "
            "cluster, or do not call `jax.distributed.initialize` before it."
        )


def _read_versions() -> dict[str, str]:
    """Returns the versions that must be the same in all processes.

    With different versions, processes could compile different programs.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    found = {"Python": python}
    found |= {p: versions.installed_version(p) or "unknown" for p in _PACKAGES}
    return {f"version of {name}": text for name, text in found.items()}


def _find_problem() -> str:
    """Returns the text of an error if this process cannot join a job, or ""."""
    # JAX has no public name for this (tests/contract/test_jax_contract.py).
    from jax._src import xla_bridge

    if not xla_bridge.backends_are_initialized():
        return ""
    return (
        "JAX's devices were already used in this process, so it cannot join "
        "its job. Create the strategy first, before "
        "you create models or JAX arrays or call `jax.devices()`."
    )


def _name_tasks(task: TaskInfo) -> tuple[str, ...]:
    """Returns each process's task and address as text, for error messages."""
    num_chiefs = int(task.type == "chief" or task.index != task.process_id)
    tasks = ["chief"] * num_chiefs
    tasks += [f"worker {i}" for i in range(task.num_processes - num_chiefs)]
    return tuple(
        name if address is None else f"{name}, {address}"
        for name, address in zip(tasks, task.addresses, strict=True)
    )


def _warn_of_strangers(address: str) -> None:
    """Warns if process 0 can be reached from outside the cluster's network."""
    host, _ = split_address(address)
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        # It is a host name, which may resolve to an address of any network.
        return
    if ip.is_unspecified:
        reason = "all networks of this machine"
    elif ip.is_global:
        reason = "the internet"
    else:
        return
    warnings.warn(
        f"JAX's coordination service listens at {address}, which can be "
        f"reached from {reason}. The service has no authentication, so anyone "
        "who can reach it can stop the job. Use an address of the cluster's "
        "internal network for process 0, block other hosts with a firewall, or "
        "use mutual TLS (docs/clusters.md).",
        stacklevel=2,
    )
