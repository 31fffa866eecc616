"""The runner of `Strategy.run`: it finds or makes a call's program."""

import collections
import contextlib
import inspect
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from keras_strategies._core import values
from keras_strategies._core.attributes import temporary_attribute
from keras_strategies._core.host_arrays import from_tensor
from keras_strategies._core.mesh import ReplicaMesh, has_sharding
from keras_strategies._types import Array, Leaf, Tree
from keras_strategies.keras_bridge.run.argument_shapes import (
    REPLICATED,
    STATIC,
    describe_argument,
)
from keras_strategies.keras_bridge.run.debug_run import debug_run
from keras_strategies.keras_bridge.run.function_keys import (
    make_function_key,
    make_value_key,
)
from keras_strategies.keras_bridge.run.mappings import is_closed, open_nest
from keras_strategies.keras_bridge.run.run_program import RunProgram
from keras_strategies.keras_bridge.step_context import ReplicaScope
from keras_strategies.keras_bridge.steps.variants import Variant
from keras_strategies.keras_bridge.variables import deferred_creation
from keras_strategies.strategy import current
from keras_strategies.strategy.replica_context import replica_scope

_Argument = tuple[tuple[Any, ...], Any]
"""How an argument enters a program, and its array; None of what is none."""

_MAX_PROGRAMS = 128
_MAX_FLAGS = 8
_WARN_AFTER = 5
_NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class _Thread(threading.local):
    is_debugging = False


class Runner:
    """The programs of one strategy's `run`.

    Args:
      strategy: The strategy.
      mesh: Its replicas.
    """

    def __init__(
        self, strategy: current.AnyStrategy, mesh: ReplicaMesh
    ) -> None:
        self._strategy = strategy
        self._mesh = mesh
        self._programs: collections.OrderedDict[Any, list[RunProgram]]
        self._programs = collections.OrderedDict()
        self._last: dict[int, Any] = {}
        self._num_made: collections.Counter[Any] = collections.Counter()
        self._thread = _Thread()
        self._lock = threading.RLock()

    def __call__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        is_update: bool = False,
    ) -> Tree:
        """Runs `fn` once on every replica; see `Strategy.run`.

        Args:
          fn: The function.
          args: Its positional arguments.
          kwargs: Its keyword arguments.
          is_update: Whether it runs in the cross-replica context and writes
            the same to every copy; see `StrategyExtended.update`.
        """
        current.check_not_mixing(self._strategy)
        self._mesh.check_can_run()
        call, leaves = _flattened(fn, args, kwargs, is_update=is_update)
        leaves = list(map(from_tensor, leaves))
        if self._thread.is_debugging:
            return self._debug(call, leaves)
        given = list(map(self._argument, leaves))
        try:
            # State is taken, changed and put back: one thread at a time.
            with self._lock:
                return self._compiled(call, given)
        except _NEEDS_VALUE as error:
            raise TypeError(
                "A function given to `run` is traced, so its arrays have no "
                "values that Python could use. Received: a function that "
                "makes a number, a condition or a numpy array of one "
                f"({type(error).__name__}). Use `keras.ops` (`where`, `cond`, "
                "`cast`) instead, or look at values in `with "
                "strategy.debug():`."
            ) from error

    def _compiled(self, call: "_Call", given: list[_Argument]) -> Tree:
        kept = tuple(kind[:4] for kind, _ in given)
        key = (make_function_key(call.fn), call.structure, kept, call.is_update)
        # One for each set of flags: a loop may freeze layers in turn.
        made = self._programs.get(key, [])
        program = next((p for p in made if p.is_current), None)
        if program is None:
            program = self._make(call, given)
            self._programs[key] = [program, *made[: _MAX_FLAGS - 1]]
            self._count(call.fn)
            while len(self._programs) > _MAX_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        deferred_creation.sync_fits(program.lifted)
        return program(_arrays(given), self._last)

    def lowered(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> tuple[Any, list[Any]]:
        """Lowers the program of a call; returns also what it writes."""
        current.check_not_mixing(self._strategy)
        call, leaves = _flattened(fn, args, kwargs)
        given = [describe_argument(leaf, self._mesh) for leaf in leaves]
        with self._lock:
            program = self._make(call, given)
            return program.lower(_arrays(given)), program.written

    def debugging(self) -> contextlib.AbstractContextManager[None]:
        """Runs functions eagerly in this thread while the block runs."""
        return temporary_attribute(self._thread, "is_debugging", True)

    def _debug(self, call: "_Call", leaves: list[Any]) -> Tree:
        mesh = self._mesh
        if mesh.num_processes > 1:
            raise RuntimeError(
                "`debug` runs all replicas in one process. Received: `run` on "
                f"a strategy of {mesh.num_processes} processes. Debug with a "
                "`MirroredStrategy` on one of them, with the same data."
            )
        deferred_creation.sync_all_fits()
        split = [leaf for leaf in leaves if isinstance(leaf, values.PerReplica)]
        rows = [self._one_array(value)[2] for value in split]
        return debug_run(
            lambda replica: call([_own(v, replica, mesh) for v in leaves]),
            mesh=mesh,
            scope=self._strategy.scope,
            replica_scope=self._scope_of(call),
            rows=list(zip(*(r for r in rows if r is not None), strict=True)),
            is_update=call.is_update,
        )

    @property
    def num_programs(self) -> int:
        """How many programs are kept."""
        return sum(map(len, self._programs.values()))

    def _argument(self, leaf: Leaf) -> _Argument:
        """How an argument enters the program: (kind, shape, dtype, key)."""
        if isinstance(leaf, values.PerReplica):
            layout, array, rows = self._one_array(leaf)
            return (layout, array.shape, array.dtype, rows), array
        if isinstance(leaf, values.Mirrored):
            leaf = leaf.array
        if isinstance(leaf, jax.Array | np.ndarray | np.generic):
            whole = self._mesh.whole
            is_placed = isinstance(leaf, jax.Array) and has_sharding(
                leaf, whole
            )
            array = leaf if is_placed else jax.device_put(leaf, whole)
            return (REPLICATED, array.shape, array.dtype, None), array
        return (STATIC, None, None, make_value_key(leaf), leaf), None

    def _one_array(
        self, value: values.PerReplica
    ) -> tuple[str, Any, Variant | None]:
        """The layout, the array, and how each replica's differs."""
        values.check_home(value, self._mesh)
        if value.layout == values.PADDED:
            return values.STACKED, value.arrays[0], _sizes(value.shapes or ())
        if value.layout != values.PARTS:
            return value.layout, value.arrays[0], None
        parts = value.arrays
        shapes = [np.shape(part) for part in parts]
        dtypes = [str(jax.numpy.result_type(part)) for part in parts]
        sizes = _sizes(shapes, dtypes)
        if len(set(shapes)) == 1:
            return (
                values.STACKED,
                values.stack_replicas(parts, self._mesh),
                None,
            )
        most = tuple(map(max, zip(*shapes, strict=True)))
        equal = [values.pad_to(jax.numpy.asarray(part), most) for part in parts]
        return values.STACKED, values.stack_replicas(equal, self._mesh), sizes

    def _make(self, call: "_Call", given: list[_Argument]) -> RunProgram:
        kinds = [kind for kind, _ in given]
        of_arrays = [kind for kind in kinds if kind[0] != STATIC]

        def of_components(components: list[Any]) -> Tree:
            rest = iter(components)
            return call(
                kind[4] if kind[0] == STATIC else _component(kind, next(rest))
                for kind in kinds
            )

        program = RunProgram(
            of_components,
            [kind[0] in (values.STACKED, values.ROWS) for kind in of_arrays],
            [kind[3] for kind in of_arrays],
            mesh=self._mesh,
            replica_scope=self._scope_of(call),
            is_update=call.is_update,
        )
        runtime = self._strategy._runtime
        with self._strategy.scope():
            try:
                program.prepare(_arrays(given), runtime.registry)
            except ValueError as error:
                _note_captured(error, call.fn)
                raise
        if any(v.trainable for v in program.lifted):
            runtime.distribution.placements.check_keys(
                [*program.lifted, *runtime.registry]
            )
        return program

    def _scope_of(self, call: "_Call") -> ReplicaScope:
        """What makes the context that a call has current, for a block."""
        if not call.is_update:
            return replica_scope(self._strategy)
        return lambda step: current.replica_context(self._strategy, None)

    def _count(self, fn: Any) -> None:
        code = getattr(fn, "__code__", None)
        if code is None:
            return
        self._num_made[code] += 1
        if self._num_made[code] == _WARN_AFTER:
            warnings.warn(
                f"`run` has compiled {fn.__name__!r} {_WARN_AFTER} times. "
                "It compiles anew for other shapes and dtypes, for other "
                "Python numbers and objects among its arguments, and for "
                "other objects in its closure. Pass what changes as arrays.",
                UserWarning,
                stacklevel=4,
            )


class _Call(NamedTuple):
    """A function that is run, and the structure of its arguments."""

    fn: Callable[..., Any]
    structure: Any
    is_update: bool

    def __call__(self, leaves: Iterable[Any]) -> Tree:
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        return self.fn(*args, **kwargs)


def _note_captured(error: ValueError, fn: Callable[..., Any]) -> None:
    """Adds to an error what the function has captured of the devices' arrays.

    JAX does not index those in a function that is mapped: their mesh is not
    that of the trace.
    """
    names = [f"`{name}`" for name, value in _captured(fn) if _is_spread(value)]
    if names:
        error.add_note(
            "The function has captured arrays that lie on several devices: "
            f"{', '.join(names)}. JAX does not index such arrays (`array[0]`) "
            "in a replica's function. Pass them to `run` in `args`, or keep "
            "them in a `keras.Variable`."
        )


def _captured(fn: Callable[..., Any]) -> list[tuple[str, Any]]:
    """What a function reads of the names around it."""
    try:
        seen = inspect.getclosurevars(fn)
    except (TypeError, ValueError):
        # No function of Python, or a name that is not assigned yet.
        return []
    return list({**seen.globals, **seen.nonlocals}.items())


def _is_spread(value: object) -> bool:
    """Whether there are arrays in it that lie on several devices."""
    try:
        leaves = jax.tree.leaves(value)
    except Exception:
        # A nest of somebody's that JAX cannot take apart.
        return False
    return any(
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, Tracer)
        and len(leaf.sharding.device_set) > 1
        for leaf in leaves
    )


def _arrays(given: list[_Argument]) -> list[Any]:
    return [array for _, array in given if array is not None]


def _sizes(shapes: Sequence[Any], dtypes: Sequence[str] = ()) -> Variant:
    """Each component's number of rows, or shape where more differs.

    Raises:
      ValueError: they have different ranks or dtypes.
    """
    if len(set(map(len, shapes))) > 1 or len(set(dtypes)) > 1:
        of_dtypes = f", dtypes {dtypes}" if dtypes else ""
        raise ValueError(
            "The components of a PerReplica given to `run` must have one "
            f"rank and dtype. Received: shapes {list(shapes)}{of_dtypes}. "
            "Reshape or cast them."
        )
    if len({shape[1:] for shape in shapes}) > 1:
        return tuple(map(tuple, shapes))
    return tuple(shape[0] if shape else 0 for shape in shapes)


def _flattened(
    fn: object, args: object, kwargs: object, *, is_update: bool = False
) -> tuple[_Call, list[Any]]:
    """A call, and the leaves of its arguments."""
    if not callable(fn):
        raise TypeError(
            "`run` calls a function on every replica. Received: an object of "
            f"type {type(fn).__name__}. Pass the function itself."
        )
    if not isinstance(args, list | tuple) or not isinstance(kwargs, dict):
        raise TypeError(
            "`run` takes its function's arguments as a tuple `args` and a "
            f"dict `kwargs`. Received: args of type {type(args).__name__}, "
            f"kwargs of type {type(kwargs).__name__}. Write `args=(x,)`."
        )

    def is_leaf(value: object) -> bool:
        return value is None or values.is_distributed(value)

    nest: Any = (tuple(args), kwargs)
    leaves, structure = jax.tree.flatten(nest, is_leaf=is_leaf)
    if any(map(is_closed, leaves)):
        # Other objects of such classes are handed on as they are.
        nest = open_nest(nest, is_leaf, having=values.is_distributed)
        leaves, structure = jax.tree.flatten(nest, is_leaf=is_leaf)
    return _Call(fn, structure, is_update), leaves


def _own(leaf: Leaf, replica: int, mesh: ReplicaMesh) -> Leaf:
    """What one replica gets of an argument, in debug mode."""
    if isinstance(leaf, values.Mirrored):
        leaf = leaf.array
    if isinstance(leaf, values.PerReplica):
        # On all devices, so that it can be combined with variables.
        return jax.device_put(np.asarray(leaf.values[replica]), mesh.whole)
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return jax.device_put(leaf, mesh.whole)
    return leaf


def _component(kind: tuple[Any, ...], array: Array) -> Array:
    return array[0] if kind[0] == values.STACKED else array
