"""The check that all processes are about to run the same program.

Processes that run different programs do not fail: the collectives of one take
what the other sends for something else, and a step's numbers are wrong before
anything ends. So each compares what it has traced before it runs it first.
"""

import dataclasses
import hashlib
import math
import re
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from keras_strategies._types import Array
from keras_strategies.cluster.addresses import name_processes
from keras_strategies.cluster.exchange.greetings import readable
from keras_strategies.cluster.exchange.host_exchange import Agreement

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr


# Constants above this are compared by their shape and type alone.
_MAX_CONSTANT_BYTES = 1 << 26
_MAX_LINES = 20_000
_MAX_SHOWN = 160
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_CURE = (
    "Look for what differs between the processes: the script, an environment "
    "variable, the order of a set, a file that a layer was made from."
)
# By program: the arguments (shapes and types) that it was compared for.
_compared: weakref.WeakKeyDictionary[Any, set[Any]] = (
    weakref.WeakKeyDictionary()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
    """A program that is to be compared.

    Attributes:
      program: The function.
      key: The structure, shapes and types of its arguments.
      text: What it computes.
    """

    program: Any
    key: Any
    text: str


def traced(program: Any, args: tuple[Any, ...]) -> Traced | None:
    """A program to `compare`; None if that was done before.

    It is compared once for the shapes of its arguments. Nothing is compiled,
    and the program need not be traced again.

    Args:
      program: A function made by `jax.jit`; another one is not compared.
      args: Its arguments.

    Raises:
      ValueError: it has captured an array that no process holds whole, which
        JAX could not make a constant.
    """
    if not hasattr(program, "trace"):
        return None
    leaves, structure = jax.tree.flatten(args)
    key = (structure, *map(_signature, leaves))
    if key in _compared.setdefault(program, set()):
        return None
    closed = program.trace(*args).jaxpr
    for value in _constants(closed):
        _check_captured(value)
    text = _text(closed)
    return Traced(program=program, key=key, text=text)


def compare(processes: tuple[int, ...], traced: Traced) -> None:
    """Raises unless all processes run one program. Collective on the host.

    Waits for as long as the others trace theirs; the guard of the job sees
    whether one is stuck.

    Args:
      processes: JAX's ids of the processes that run it.
      traced: What `traced` returned.

    Raises:
      RuntimeError: processes have different programs; all raise.
    """
    agreement = Agreement(
        processes, "the comparison of programs", timeout_s=math.inf
    )
    text = traced.text
    digests = agreement.exchange(_digest(text))
    if len(set(digests)) > 1:
        raise RuntimeError(_difference(agreement, processes, digests, text))
    agreement.end()
    _compared[traced.program].add(traced.key)


def _check_captured(value: Array) -> None:
    is_whole = getattr(value, "is_fully_replicated", True)
    if is_whole or value.is_fully_addressable:
        return
    raise ValueError(
        "A function that is compiled for several processes takes arrays that "
        "are divided over them as arguments. Received: one that has captured "
        f"{value.dtype}{list(value.shape)}, such as a `variable.value`. Pass "
        "it to `run` in `args`, read the variable inside of the function, or "
        "keep a copy in a `keras.Variable`."
    )


def _signature(leaf: Array) -> object:
    return (leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf


def _text(closed: "ClosedJaxpr") -> str:
    """A traced program with its constants, the same in every process."""
    lines = [_ADDRESS.sub("", str(closed.jaxpr))]
    lines += [_constant(value) for value in _constants(closed)]
    return "\n".join(lines)


def _constants(closed: "ClosedJaxpr | Jaxpr") -> Iterator[Any]:
    """The arrays that a program holds, those of inner ones too."""
    yield from getattr(closed, "consts", ())
    for equation in getattr(closed, "jaxpr", closed).eqns:
        for operand in equation.invars:
            literal = getattr(operand, "val", 0)
            if np.ndim(literal):
                yield literal
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from _constants(inner)


def _constant(value: Array) -> str:
    text = f"constant {getattr(value, 'dtype', '')}{list(np.shape(value))}"
    is_here = getattr(value, "is_fully_addressable", True)
    if not is_here or getattr(value, "nbytes", 0) > _MAX_CONSTANT_BYTES:
        return text
    is_numeric = jax.numpy.issubdtype(np.result_type(value), np.generic)
    return f"{text} {_digest(np.asarray(value))}" if is_numeric else text


def _digest(content: str | np.ndarray) -> str:
    data = content.encode() if isinstance(content, str) else content.tobytes()
    return hashlib.sha256(data).hexdigest()


def _difference(
    agreement: Agreement,
    processes: tuple[int, ...],
    digests: list[str],
    text: str,
) -> str:
    """What differs, found by all: the first line that is not the same."""
    lines = text.splitlines()[:_MAX_LINES]
    received = agreement.exchange(" ".join(_digest(line)[:8] for line in lines))
    columns = [words.split() for words in received]
    length = min(map(len, columns))
    first = next(
        (k for k in range(length) if len({c[k] for c in columns}) > 1), length
    )
    mine = lines[first].strip() if first < len(lines) else "nothing more"
    shown = agreement.exchange(mine[:_MAX_SHOWN])
    agreement.end()
    groups: dict[str, list[int]] = {}
    for process, digest in zip(processes, digests, strict=True):
        groups.setdefault(digest, []).append(process)
    there = dict(zip(processes, map(readable, shown), strict=True))
    parts = [
        f"{name_processes(group)} at `{there[group[0]]}`"
        for group in groups.values()
    ]
    return (
        "All processes must run the same program. Received: programs that "
        f"differ from line {first + 1} on; {'; '.join(parts)}. {_CURE}"
    )
