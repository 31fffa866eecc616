"""The check that all processes are about to run the same JAX program.

If processes run different programs, they do not fail. Instead, a collective in
one process may receive values that another process sent in a different
collective, and silently compute wrong numbers. So the processes compare each
traced program before they run it for the first time.
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
from keras_strategies.cluster.exchange.greetings import clean_text
from keras_strategies.cluster.exchange.host_exchange import Agreement

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr


# For constants with more bytes, only the shapes and dtypes are compared.
_MAX_CONSTANT_BYTES = 1 << 26
_MAX_LINES = 20_000
_MAX_SHOWN = 160
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_CURE = (
    "Find what differs between the processes, such as the script, an "
    "environment variable, the order of a set, or a file that a layer reads."
)
# For each program: the signatures (structure, shapes and dtypes of the
# arguments) for which the processes have already compared it.
_compared: weakref.WeakKeyDictionary[Any, set[Any]] = (
    weakref.WeakKeyDictionary()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
    """A traced program, to be compared between processes.

    Attributes:
      program: The function that was traced.
      key: The structure, shapes and dtypes of the function's arguments.
      text: The function's jaxpr and constants, as text.
    """

    program: Any
    key: Any
    text: str


def trace_program(program: Any, args: tuple[Any, ...]) -> Traced | None:
    """Traces a program, unless the processes have already compared it.

    A program is compared once for each signature of its arguments. Nothing is
    compiled here, and JAX reuses the trace when the program runs.

    Args:
      program: A function that `jax.jit` returned; other functions are not
        compared.
      args: The arguments of the program.

    Returns:
      The traced program, or None if the program was already compared for this
      signature or cannot be traced.

    Raises:
      ValueError: if the function uses an array from outside (a closure) that
        is sharded over several processes. JAX cannot turn such an array into
        a constant.
    """
    if not hasattr(program, "trace"):
        return None
    leaves, structure = jax.tree.flatten(args)
    key = (structure, *map(_make_signature, leaves))
    if key in _compared.setdefault(program, set()):
        return None
    closed = program.trace(*args).jaxpr
    for value in _iter_constants(closed):
        _check_captured(value)
    text = _describe_program(closed)
    return Traced(program=program, key=key, text=text)


def compare(processes: tuple[int, ...], traced: Traced) -> None:
    """Raises an error unless all processes traced the same program. Collective.

    The comparison uses no devices. This process waits without a timeout while
    the others trace their programs; the watchdog detects a process that is
    stuck.

    Args:
      processes: JAX's ids of the processes that run the program.
      traced: The value that `trace_program` returned.

    Raises:
      RuntimeError: if processes have different programs. All processes raise
        it.
    """
    agreement = Agreement(
        processes, "the comparison of programs", timeout_s=math.inf
    )
    text = traced.text
    digests = agreement.exchange(_compute_digest(text))
    if len(set(digests)) > 1:
        raise RuntimeError(
            _describe_difference(agreement, processes, digests, text)
        )
    agreement.end()
    _compared[traced.program].add(traced.key)


def _check_captured(value: Array) -> None:
    is_replicated = getattr(value, "is_fully_replicated", True)
    if is_replicated or value.is_fully_addressable:
        return
    raise ValueError(
        "An array that is sharded over several processes must be passed to a "
        "compiled function as an argument. Received: a function that uses an "
        f"array {value.dtype}{list(value.shape)} from outside, such as a "
        "`variable.value`. Pass it to `run` in `args`, read the variable "
        "inside the function, or store a copy in a `keras.Variable`."
    )


def _make_signature(leaf: Array) -> object:
    return (leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf


def _describe_program(closed: "ClosedJaxpr") -> str:
    """Returns a program as text that is the same in all processes."""
    # Addresses of Python objects differ between processes, so they are
    # removed.
    lines = [_ADDRESS.sub("", str(closed.jaxpr))]
    lines += [_describe_constant(value) for value in _iter_constants(closed)]
    return "\n".join(lines)


def _iter_constants(closed: "ClosedJaxpr | Jaxpr") -> Iterator[Any]:
    """Yields all constant arrays of a program, including nested programs."""
    yield from getattr(closed, "consts", ())
    for equation in getattr(closed, "jaxpr", closed).eqns:
        for operand in equation.invars:
            literal = getattr(operand, "val", 0)
            if np.ndim(literal):
                yield literal
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from _iter_constants(inner)


def _describe_constant(value: Array) -> str:
    text = f"constant {getattr(value, 'dtype', '')}{list(np.shape(value))}"
    is_here = getattr(value, "is_fully_addressable", True)
    if not is_here or getattr(value, "nbytes", 0) > _MAX_CONSTANT_BYTES:
        return text
    is_numeric = jax.numpy.issubdtype(np.result_type(value), np.generic)
    if not is_numeric:
        return text
    return f"{text} {_compute_digest(np.asarray(value))}"


def _compute_digest(content: str | np.ndarray) -> str:
    data = content.encode() if isinstance(content, str) else content.tobytes()
    return hashlib.sha256(data).hexdigest()


def _describe_difference(
    agreement: Agreement,
    processes: tuple[int, ...],
    digests: list[str],
    text: str,
) -> str:
    """Describes the first line in which programs differ. Collective."""
    lines = text.splitlines()[:_MAX_LINES]
    hashes = " ".join(_compute_digest(line)[:8] for line in lines)
    received = agreement.exchange(hashes)
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
    there = dict(zip(processes, map(clean_text, shown), strict=True))
    parts = [
        f"{name_processes(group)}: `{there[group[0]]}`"
        for group in groups.values()
    ]
    return (
        "All processes must run the same program. Received: traced programs "
        f"whose first different line is {first + 1} ({'; '.join(parts)}). "
        f"{_CURE}"
    )
