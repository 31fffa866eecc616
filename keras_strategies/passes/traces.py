"""Detects traces, and tells what they compute and which code it comes from."""

import contextlib
import dis
import functools
import gc
import importlib.util
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from keras_strategies._types import Equation
from keras_strategies.passes import stages


def is_tracing() -> bool:
    """Returns whether JAX is tracing the current function to compile it.

    During a trace, values from Python are read once, not again in each later
    call. Computing a gradient eagerly does not count as tracing.
    """
    from jax._src import core

    # The second test computes an operation, so it comes last.
    return not core.trace_state_clean() and find_current_trace() is not None


def check_untransformed(name: str) -> None:
    """Raises RuntimeError if the caller is traced, by JAX or by `tf.function`.

    Args:
      name: The method that was called.
    """
    from jax._src import core

    is_inside = getattr(sys.modules.get("tensorflow"), "inside_function", None)
    if not core.trace_state_clean():
        tracer = "JAX transforms (jax.jit, jax.grad, jax.lax.scan, ...)"
    elif is_inside is not None and is_inside():
        tracer = "`tf.function` traces"
    else:
        return
    raise RuntimeError(
        f"`{name}` must not be called in a function that {tracer}, because it "
        "compiles what it needs by itself. Call it outside of such functions; "
        "in place of `jax.jit` or "
        "`tf.function` around a loop, use `ks.function` or nothing "
        "(docs/migration.md)."
    )


def find_current_trace() -> Any:
    """Returns the JAX trace that records an operation on constants.

    It is a trace of a program, a branch or the body of a loop. Transformations
    such as `jax.grad` have no such trace. None outside of all traces.
    """
    return getattr(jnp.add(jnp.int32(0), 0), "_trace", None)


def read_settings() -> Hashable:
    """Returns the settings with which JAX traces, a part of its own keys."""
    from jax._src import config

    return config.trace_context()


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Turns off Python's garbage collector while the block runs, which traces.

    The collector searches a trace's many objects again and again, which takes a
    tenth of a trace's time, and almost none of them is garbage. With
    `jax.disable_jit`, the block computes instead, and the collector stays on.
    """
    config: Any = jax.config
    is_on = gc.isenabled() and not config.jax_disable_jit
    if is_on:
        gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


def find_place(equation: object) -> str:
    """Returns the file and line of user code that an equation comes from.

    Returns an empty string if the origin is unknown, or if no stack frame is in
    user code.
    """
    info = getattr(equation, "source_info", None)
    traceback = getattr(info, "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        if not frame.file_name.startswith(("<", *_library_directories())):
            name = os.path.basename(frame.file_name)
            return f"{name}:{frame.line_num}"
    return ""


def has_user_calls(jaxpr: ClosedJaxpr) -> bool:
    """Returns whether user code is called in a traced step.

    Even if it computes nothing by itself, it may decide what Keras computes.
    """
    for equation in jaxpr.jaxpr.eqns:
        names = (code.co_filename for code in _list_frames(equation))
        called = itertools.takewhile(lambda n: not _calls_steps(n), names)
        if is_user_code(equation) or any(map(_find_maker, called)):
            return True
    return False


def is_user_code(equation: JaxprEqn) -> bool:
    """Returns whether an equation comes from user code.

    This is unknown, and counts as False, for the equations inside of a function
    that JAX has jitted.
    """
    if equation.primitive.name == "name":
        return False
    codes = _list_frames(equation)
    for k, code in enumerate(codes):
        maker = _find_maker(code.co_filename)
        if maker is False and code.co_filename.endswith("functional.py"):
            # An operation in the graph of a functional model, which the model's
            # author wrote; or this package's loop over parts of the graph.
            name = equation.params.get("name", equation.primitive.name)
            if name in _OF_LOOPS:
                return not any(
                    is_package_file(c.co_filename) for c in codes[:k]
                )
            return name not in _OF_ENTRIES
        if maker is not None:
            return maker
    return False


def is_user_function(fn: Callable[..., Any]) -> bool:
    """Returns whether a function, or a method, is user code."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return code is None or bool(_find_maker(code.co_filename))


def is_package_file(file_name: str) -> bool:
    """Returns whether a file of source code belongs to this package."""
    return file_name.startswith(_directories("keras_strategies"))


def is_problem_of_package(error: Exception) -> bool:
    """Returns whether an error in a trace is a problem of this package.

    Such an error comes from an operation, or from a built-in function, in a
    line of this package that is not a `raise` statement.
    """
    if not isinstance(error, _PROBLEMS):
        return False
    entry: Any = error.__traceback__
    # Keras's handler of errors removes the frames of Keras below its own.
    is_filtered = False
    while entry.tb_next is not None:
        entry = entry.tb_next
        is_filtered |= entry.tb_frame.f_code.co_name == "error_handler"
    code = entry.tb_frame.f_code
    operation = dis.opname[code.co_code[entry.tb_lasti]]
    is_explicit = "RAISE" in operation or ("CALL" in operation and is_filtered)
    return is_package_file(code.co_filename) and not is_explicit


_PROBLEMS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    TypeError,
    ValueError,
)


def is_update(equation: JaxprEqn) -> bool:
    """Returns whether an equation is a part of an optimizer's update."""
    codes = _list_frames(equation)
    directory = os.path.join(*_directories("keras"), "src", "optimizers", "")
    is_optimizer = any(c.co_filename.startswith(directory) for c in codes)
    # `apply_gradients` is Keras's, and calls the hook that reduces gradients.
    return is_optimizer and all(c.co_name != "_reduce_gradients" for c in codes)


def _list_frames(equation: JaxprEqn) -> Sequence[Any]:
    traceback = getattr(equation.source_info, "traceback", None)
    return () if traceback is None else traceback.raw_frames()[0]


_OF_ENTRIES = stages.names_in(
    "add broadcast_in_dim concatenate convert_element_type div dot_general",
    "einsum expand_dims gelu logistic matmul max min mul neg relu reshape",
    "silu slice softmax squeeze sub tanh transpose",
)
"""Operations that contain no constants except those that the caller passed."""
_OF_LOOPS = ("ks.stack_values", "scan")
"""Operations by which this package computes equal blocks in a loop."""


@functools.lru_cache(maxsize=1024)
def _calls_steps(file_name: str) -> bool:
    """Returns whether a file belongs to the room that calls users' steps."""
    directory = os.path.join(*_directories("keras_strategies"), "step", "")
    return file_name.startswith(directory)


@functools.lru_cache(maxsize=1024)
def _find_maker(file_name: str) -> bool | None:
    """Returns whether a file is user code; None if its caller decides that."""
    if not file_name.startswith(_library_directories()):
        return True
    for directory in _directories("keras", "keras_hub"):
        if file_name.startswith(directory):
            *parts, name = file_name.removeprefix(directory).split(os.sep)
            is_for_callers = not _FOR_CALLERS.isdisjoint(parts)
            return None if is_for_callers and name != "trainer.py" else False
    return None


_FOR_CALLERS = frozenset(("ops", "backend", "random", "utils", "tree"))
"""Keras directories whose functions compute on behalf of their callers."""


@functools.cache
def _library_directories() -> tuple[str, ...]:
    # Keras casts with optree.
    names = "jax", "keras", "keras_hub", "keras_strategies", "numpy", "optree"
    # These two modules are listed as files, because other packages may be
    # installed in subdirectories of theirs.
    files = (functools.__file__, contextlib.__file__)
    return ("<frozen ", *files, *_directories(*names))


@functools.cache
def _directories(*names: str) -> tuple[str, ...]:
    specs = map(importlib.util.find_spec, names)
    origins = [spec.origin for spec in specs if spec and spec.origin]
    directories = map(os.path.dirname, origins)
    return tuple(
        dict.fromkeys(f"{directory}{os.sep}" for directory in directories)
    )


def has_convolutions(jaxpr: ClosedJaxpr) -> bool:
    """Returns whether a traced program computes convolutions."""
    return stages.has_primitives(jaxpr, "conv_general_dilated")


def has_unsafe_scatters(jaxpr: ClosedJaxpr) -> bool:
    """Returns whether a program has scatters that XLA shards incorrectly.

    If rows are sharded unevenly, XLA's partitioner (jaxlib 0.10.2) pads them,
    and wrongly includes the padding in the gradients of scatters that set or
    multiply rows. It aborts the process if the indices within rows are
    unsigned, as in gradients of sorts, medians and quantiles. Scatters that
    add, such as those in gradients of embeddings, are correct.
    """

    def is_one(equation: Equation) -> bool:
        name = equation.primitive.name
        if not name.startswith("scatter"):
            return False
        numbers = equation.params["dimension_numbers"]
        indices = equation.invars[1].aval.dtype
        is_unsigned = jnp.issubdtype(indices, jnp.unsignedinteger)
        is_within_rows = bool(numbers.operand_batching_dims)
        return name != "scatter-add" or (is_unsigned and is_within_rows)

    return any(map(is_one, stages.all_equations(jaxpr)))
