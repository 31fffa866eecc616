"""The states of a checkpoint's objects, from all processes of a job."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax

from keras_strategies._types import Tree
from keras_strategies.checkpoint import nests
from keras_strategies.cluster.exchange.host_exchange import Agreement
from keras_strategies.cluster.exchange.message_forms import Either, fault_of

_STATES = Either(({"all": dict}, {"each": [dict]}))


def gather_states(
    states: Mapping[str, Any], processes: tuple[int, ...]
) -> Mapping[str, Any]:
    """Gathers the states of a checkpoint's objects. Collective.

    Args:
      states: The states of the objects in this process, by object name.
      processes: JAX's ids of all processes.

    Returns:
      {"all": states} if the states are equal in all processes, else
      {"each": [states, ...]} with the states of each process, in the order of
      `processes`.
    """
    text = nests.pack(states)
    if len(processes) == 1:
        return {"all": states}
    agreement = Agreement(processes, "gathering the states of objects to save")
    # States may be long. So hashes are exchanged first, and the states only if
    # the hashes differ.
    hashes = agreement.exchange(hashlib.sha256(text.encode()).hexdigest())
    are_equal = len(set(hashes)) == 1
    received = [] if are_equal else agreement.exchange(text)
    agreement.end()
    if are_equal:
        return {"all": states}
    return {"each": [nests.unpack(one) for one in received]}


def select_local_states(
    state: Tree, processes: tuple[int, ...], where: str
) -> Mapping[str, Any]:
    """Selects this process's states of objects from a checkpoint.

    Args:
      state: The result of `gather_states`, as read from a checkpoint. It is not
        trusted.
      processes: JAX's ids of all processes of this job.
      where: The path of the checkpoint, for messages.

    Raises:
      ValueError: if `state` is not a result of `gather_states`, or contains the
        states of a different number of processes.
    """
    fault = fault_of(state, _STATES)
    if fault is not None:
        raise ValueError(
            "Objects must be restored from a checkpoint that contains their "
            f"states. Received: {where}, whose state is malformed: {fault}. "
            "Pass a checkpoint that a `CheckpointManager` or `Checkpoint.save` "
            "has written."
        )
    if "all" in state:
        return state["all"]
    if len(state["each"]) != len(processes):
        raise ValueError(
            "A run whose processes saved different states must resume with the "
            "same number of processes. Received: the states of "
            f"{len(state['each'])} processes in a job with {len(processes)}. "
            "Start the same number of processes. A run can resume with any "
            "number if the states of all its processes are equal, for example "
            "because all of them read the same data."
        )
    return state["each"][processes.index(jax.process_index())]
