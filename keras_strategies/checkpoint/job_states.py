"""The states of a checkpoint's objects in all processes of a job."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax

from keras_strategies._types import Tree
from keras_strategies.checkpoint import nests
from keras_strategies.cluster.exchange.host_exchange import Agreement
from keras_strategies.cluster.exchange.message_forms import Either, fault_of

_STATES = Either(({"all": dict}, {"each": [dict]}))


def shared(
    states: Mapping[str, Any], processes: tuple[int, ...]
) -> Mapping[str, Any]:
    """The states of all processes; one, if they are alike. Collective.

    Args:
      states: Those of this process.
      processes: JAX's ids of all.
    """
    text = nests.packed(states)
    if len(processes) == 1:
        return {"all": states}
    agreement = Agreement(processes, "keeping states")
    marks = agreement.exchange(hashlib.sha256(text.encode()).hexdigest())
    is_alike = len(set(marks)) == 1
    received = [] if is_alike else agreement.exchange(text)
    agreement.end()
    if is_alike:
        return {"all": states}
    return {"each": [nests.unpacked(one) for one in received]}


def own(
    state: Tree, processes: tuple[int, ...], where: str
) -> Mapping[str, Any]:
    """The states of this process, of what `shared` gave.

    Args:
      state: What a checkpoint says.
      processes: JAX's ids of all that there are now.
      where: The checkpoint, for messages.

    Raises:
      ValueError: it says something else, or has those of another number of
        processes.
    """
    fault = fault_of(state, _STATES)
    if fault is not None:
        raise ValueError(
            "Objects resume with the states that a checkpoint of objects has. "
            f"Received: {where}, of whose state {fault}. Give a checkpoint "
            "that a manager, or `Checkpoint.save`, has written."
        )
    if "all" in state:
        return state["all"]
    if len(state["each"]) != len(processes):
        raise ValueError(
            "Where every process has a state of its own, a run resumes with "
            "as many processes as it had. Received: states of "
            f"{len(state['each'])} processes, now {len(processes)}. Start as "
            "many, or give all processes the same data."
        )
    return state["each"][processes.index(jax.process_index())]
