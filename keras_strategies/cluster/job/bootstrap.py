"""The start of JAX's job, from a process's place in a cluster."""

import contextlib
import importlib.metadata
import ipaddress
import multiprocessing
import os
import platform
import warnings
from collections.abc import Iterator
from typing import NoReturn

import jax

from keras_strategies.cluster.addresses import check_address, shown
from keras_strategies.cluster.exchange.job_secret import read_secret
from keras_strategies.cluster.exchange.rendezvous import (
    RendezvousError,
    meet,
    split,
)
from keras_strategies.cluster.spec import TaskInfo
from keras_strategies.cluster.watchdog import watchdog

BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
"""The environment variable, one of JAX, that says where process 0 listens."""

# So much longer than the meeting may JAX take for what it does itself.
_JAX_TIMEOUT_S = 60
_NUM_SLICES = "MEGASCALE_NUM_SLICES"
_PACKAGES = ("keras_strategies", "keras", "jax", "jaxlib")


def join(task: TaskInfo, *, strategy: str, timeout_s: float) -> None:
    """Makes this process part of the job. Collective.

    All processes meet first and say who they are, so that what is wrong is
    an error in each of them: JAX would end them without a name.

    Args:
      task: This process's place. A process that is alone, or an evaluator,
        joins nothing.
      strategy: The name of the strategy, which is the same in all.
      timeout_s: How long to wait for all processes, in seconds.

    Raises:
      RuntimeError: the processes did not meet in time or differ; or one uses
        JAX's devices already; or a child that was spawned imports its script.
      ValueError: this process is part of another job; the time is no
        positive number; the job's secret is too short; the address of
        process 0 is not known.
    """
    if not timeout_s > 0:
        raise ValueError(
            "The time to wait for all processes is a positive number of "
            f"seconds. Received: {timeout_s!r}. Leave it out for the default."
        )
    if task.process_id is None or task.num_processes == 1:
        return
    if jax.distributed.is_initialized():
        _check_joined(task)
        return
    check_main_guard()
    secret = read_secret(os.environ)
    address = task.coordinator_address or _fail_without_address(task)
    bind_address = _bind_address(task, address)
    with _named_slices():
        meet(
            address,
            process_id=task.process_id,
            num_processes=task.num_processes,
            facts={**_versions(), "strategy": strategy},
            problem=_problem(),
            timeout_s=timeout_s,
            bind_address=bind_address,
            names=_names(task),
            secret=secret,
        )
    jax.distributed.initialize(
        address,
        task.num_processes,
        task.process_id,
        coordinator_bind_address=bind_address,
        initialization_timeout=_JAX_TIMEOUT_S,
        **watchdog.INITIALIZE_ARGUMENTS,
    )


def check_main_guard() -> None:
    """Raises where a spawned child of `multiprocessing` imports its script.

    It would join the job in its parent's place.

    Raises:
      RuntimeError: it does.
    """
    # As `multiprocessing` itself finds that a script has no guard.
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    raise RuntimeError(
        "A process of a job must not join it again in its children. Received: "
        "a strategy made while a child that `multiprocessing` has spawned "
        "imports the script. Put the script's code under "
        "`if __name__ == '__main__':`."
    )


def _fail_without_address(task: TaskInfo) -> NoReturn:
    raise ValueError(
        "Processes of a job must know the address of process 0. Received: "
        f"none, in process {task.process_id} of {task.num_processes}. Of "
        "several TPU slices MEGASCALE_COORDINATOR_ADDRESS gives it: set that, "
        "or call `TPUClusterResolver.connect()` first, by which JAX finds it."
    )


def _bind_address(task: TaskInfo, address: str) -> str:
    """Returns where process 0 listens; it warns of strangers there."""
    found = os.environ.get(BIND_ADDRESS) or address
    check_address(found, f"process 0, which {BIND_ADDRESS} may give,")
    if task.process_id == 0:
        _warn_of_strangers(found)
    return found


@contextlib.contextmanager
def _named_slices() -> Iterator[None]:
    """Adds the number of TPU slices, if given, to what is wrong in a job."""
    try:
        yield
    except RendezvousError as error:
        text = os.environ.get(_NUM_SLICES)
        if not text:
            raise
        raise RendezvousError(
            f"{error} {_NUM_SLICES} is {shown(text)} here: it must be the "
            "number of slices that were started."
        ) from error


def _check_joined(task: TaskInfo) -> None:
    known = (jax.process_count(), jax.process_index())
    if known != (task.num_processes, task.process_id):
        raise ValueError(
            "This process is part of a job already. Received: process "
            f"{task.process_id} of {task.num_processes}, in a job of "
            f"{known[0]} as process {known[1]}. Make the strategy without "
            "a cluster, or do not call `jax.distributed.initialize` before."
        )


def _versions() -> dict[str, str]:
    """What must be the same in all: programs differ otherwise."""
    python = ".".join(platform.python_version_tuple()[:2])
    versions = {"version of Python": python}
    for package in _PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "unknown"
        versions[f"version of {package}"] = version
    return versions


def _problem() -> str:
    """Why this process cannot be part of a job; empty if it can."""
    # JAX has no public name for it (tests/contract/test_jax_contract.py).
    from jax._src import xla_bridge

    if not xla_bridge.backends_are_initialized():
        return ""
    return (
        "A job of several processes starts before any of them uses JAX's "
        "devices. Received: devices in use already. Make the strategy first, "
        "before models, arrays of JAX and `jax.devices()`."
    )


def _names(task: TaskInfo) -> tuple[str, ...]:
    """The processes for messages: their tasks, with their addresses."""
    num_chiefs = int(task.type == "chief" or task.index != task.process_id)
    tasks = ["chief"] * num_chiefs
    tasks += [f"worker {i}" for i in range(task.num_processes - num_chiefs)]
    return tuple(
        name if address is None else f"{name}, {address}"
        for name, address in zip(tasks, task.addresses, strict=True)
    )


def _warn_of_strangers(address: str) -> None:
    """Warns where process 0 listens to more than the cluster's network."""
    host, _ = split(address)
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:  # A name: who can reach it is not known here.
        return
    if ip.is_unspecified:
        reason = "all networks of this machine"
    elif ip.is_global:
        reason = "the internet"
    else:
        return
    warnings.warn(
        f"JAX's coordination service listens at {address}, for {reason}. "
        "It asks for no password: whoever reaches it can stop the job. Give "
        "process 0 an address of the cluster's own network, or keep others "
        "out by a firewall.",
        stacklevel=2,
    )
