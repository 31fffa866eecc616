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
from keras_strategies.cluster.user_code import format_position, is_user_code

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


# For constants with more bytes, only the shapes and dtypes are compared.
_MAX_CONSTANT_BYTES = 1 << 26
_MAX_LINES = 20_000
_MAX_SHOWN = 160
_MAX_VALUES = 6
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_FIX = (
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
      closed: The function's jaxpr.
    """

    program: Any
    key: Any
    text: str
    closed: "ClosedJaxpr"


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
    return Traced(program=program, key=key, text=text, closed=closed)


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
    digests = agreement.exchange(compute_digest(traced.text))
    if len(set(digests)) > 1:
        raise RuntimeError(_describe_difference(agreement, processes, traced))
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
    lines += [_describe_constant(v) for v in _iter_constants(closed)]
    return "\n".join(lines)


def _iter_constants(closed: "ClosedJaxpr") -> Iterator[Any]:
    """Yields all constant arrays of a program, including nested programs."""
    for program in _iter_programs(closed):
        yield from getattr(program, "consts", ())
        for equation in program.eqns:
            literals = (getattr(x, "val", 0) for x in equation.invars)
            yield from filter(np.ndim, literals)


def _iter_programs(program: "ClosedJaxpr | Jaxpr") -> Iterator[Any]:
    """Yields a program and all programs in its equations."""
    yield program
    for equation in program.eqns:
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                if hasattr(inner, "eqns"):
                    yield from _iter_programs(inner)


def _describe_constant(value: Array) -> str:
    text = f"constant {getattr(value, 'dtype', '')}{list(np.shape(value))}"
    is_here = getattr(value, "is_fully_addressable", True)
    is_large = getattr(value, "nbytes", 0) > _MAX_CONSTANT_BYTES
    dtype = np.result_type(value)
    if not is_here or is_large or not jax.numpy.issubdtype(dtype, np.generic):
        return text
    return f"{text} {compute_digest(np.asarray(value))}"


def compute_digest(content: str | np.ndarray) -> str:
    """Returns the SHA-256 digest of a text or an array."""
    if isinstance(content, str):
        content = np.frombuffer(content.encode(), np.uint8)
    return hashlib.sha256(content.ravel().view(np.uint8).data).hexdigest()


def find_first_difference(agreement: Agreement, lines: list[str]) -> int:
    """Finds the first line that differs between processes. Collective.

    Args:
      agreement: An agreement of the processes.
      lines: This process's lines.

    Returns:
      The line's index. It is the number of lines of the process with the fewest
      lines if all of these are equal.
    """
    hashes = " ".join(compute_digest(line)[:8] for line in lines)
    columns = [words.split() for words in agreement.exchange(hashes)]
    for index, column in enumerate(zip(*columns, strict=False)):
        if len(set(column)) > 1:
            return index
    return min(map(len, columns))


def _describe_difference(
    agreement: Agreement, processes: tuple[int, ...], traced: Traced
) -> str:
    """Describes the first line in which programs differ. Collective."""
    lines = traced.text.splitlines()[:_MAX_LINES]
    first = find_first_difference(agreement, lines)
    shown = agreement.exchange(_show_line(traced, first))
    agreement.end()
    parts = group_processes(processes, shown, "{0}: {1}")
    return (
        "All processes must run the same program. Received: traced programs "
        f"whose first different line is {first + 1} ({parts}). {_FIX}"
    )


def group_processes(
    processes: tuple[int, ...], texts: list[str], form: str
) -> str:
    """Returns what processes have sent, with the processes that have sent it.

    Args:
      processes: The numbers of the processes.
      texts: Their texts, which are not trusted.
      form: The text of a group: {0} is its processes, {1} what they have sent.
    """
    groups: dict[str, list[int]] = {}
    for process, text in zip(processes, texts, strict=True):
        groups.setdefault(clean_text(text), []).append(process)
    return "; ".join(
        form.format(name_processes(group), text)
        for text, group in groups.items()
    )


def _show_line(traced: Traced, number: int) -> str:
    """Returns a line of a program, with the line of user code it comes from."""
    shown = traced.closed.jaxpr.pretty_print(source_info=True, use_color=False)
    lines = shown.splitlines()
    constants = [*_iter_constants(traced.closed)][number - len(lines) :][:1]
    if number < len(lines):
        line, _, place = lines[number].partition(" # ")
        shown = f"`{_ADDRESS.sub('', line).strip()[:_MAX_SHOWN]}`"
        position = _locate(traced.closed, place)
    elif constants:
        return _show_constant(constants[0])
    else:
        return "nothing more"
    return f"{shown}{position and f' at {position}'}"


def _show_constant(value: Array) -> str:
    text = _describe_constant(value)
    if len(text.split()) < 3:
        return text
    first = np.asarray(value).ravel()[:_MAX_VALUES].tolist()
    shown = ", ".join(map(str, first))
    return f"{text.rpartition(' ')[0]} of the first values {shown}"


def _locate(closed: "ClosedJaxpr", place: str) -> str:
    """Returns the line of user code that an equation comes from, or "".

    Args:
      closed: The program.
      place: The equation's place as JAX prints it: "FILE:LINE:COLUMN (NAME)".
        The file may be one of Keras.
    """

    def is_there(frame: Any) -> bool:
        return place.startswith(f"{frame.file_name}:{frame.line_num}:")

    for program in _iter_programs(closed):
        for equation in program.eqns:
            if any(map(is_there, _list_frames(equation))):
                return _locate_user(equation)
    return ""


def _locate_user(equation: "JaxprEqn") -> str:
    for frame in _list_frames(equation):
        if is_user_code(frame.file_name):
            name = frame.function_name.rpartition(".")[2]
            return format_position(frame.file_name, frame.line_num, name)
    return ""


def _list_frames(equation: "JaxprEqn") -> list[Any]:
    return list(getattr(equation.source_info.traceback, "frames", ()))
