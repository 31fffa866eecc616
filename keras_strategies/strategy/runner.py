"""Implements `Strategy.run`: finds or compiles the program of each call."""

import collections
import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from keras_strategies._types import Leaf, Tree
from keras_strategies.keras_bridge.ported_code import explaining_errors
from keras_strategies.keras_bridge.step_context import ReplicaScope
from keras_strategies.names import dry_run
from keras_strategies.run.debug_run import debug_run
from keras_strategies.run.function_keys import (
    REPLICATED,
    STATIC,
    describe_argument,
    is_closed,
    make_key,
    open_nest,
)
from keras_strategies.run.run_program import RunProgram
from keras_strategies.spmd import values
from keras_strategies.spmd.host_arrays import from_tensor
from keras_strategies.spmd.identity import temporary_attribute
from keras_strategies.spmd.mesh import ReplicaMesh, has_sharding
from keras_strategies.spmd.replica_map import drop_dim, split_tokens
from keras_strategies.step.ragged.variants import Variant
from keras_strategies.strategy import current
from keras_strategies.strategy.replica_context import ReplicaContext
from keras_strategies.variables import model_variables

_Argument = tuple[tuple[Any, ...], Any]
"""An argument's (layout, shape, dtype, key), and its array or None."""

_MAX_PROGRAMS = 128
_MAX_FLAGS = 8
_WARN_AFTER = 5


class _Thread(threading.local):
    is_debugging = False


class Runner:
    """Runs functions on a strategy's replicas, and caches their programs.

    Args:
      strategy: The strategy.
      mesh: The mesh of the strategy's replicas.
    """

    def __init__(
        self, strategy: current.AnyStrategy, mesh: ReplicaMesh
    ) -> None:
        self._strategy = strategy
        self._mesh = mesh
        self._programs = collections.OrderedDict[Any, list[RunProgram]]()
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
          args: The function's positional arguments.
          kwargs: The function's keyword arguments.
          is_update: Whether the function runs in the cross-replica context and
            writes the same value to every copy of a variable; see
            `StrategyExtended.update`.
        """
        if (dry := dry_run.get()) is not None:
            return dry.run(self, fn, args, kwargs)
        current.check_not_mixing(self._strategy)
        self._mesh.check_can_run()
        call, leaves = _flatten_call(fn, args, kwargs, is_update=is_update)
        leaves = list(map(from_tensor, leaves))
        if self._thread.is_debugging:
            return self._debug(call, leaves)
        arguments = list(map(self._convert_argument, leaves))
        # Only one thread at a time may read the variables' values, change them
        # and store the new ones.
        with explaining_errors("run"), self._lock:
            return self._run_compiled(call, arguments)

    def _run_compiled(self, call: "_Call", arguments: list[_Argument]) -> Tree:
        kept = tuple(kind[:4] for kind, _ in arguments)
        key = (make_key(call.fn), call.structure, kept, call.is_update)
        # One for each set of trainable variables, because a loop may alternate.
        programs = self._programs.get(key, [])
        program = next((p for p in programs if p.is_current), None)
        if program is None:
            program = self._make_program(call, arguments)
            self._programs[key] = [program, *programs[: _MAX_FLAGS - 1]]
            self._count_compilation(call.fn)
            while len(self._programs) > _MAX_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        model_variables.sync_fits(program.lifted)
        return program(_list_arrays(arguments), self._last)

    def lower(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> tuple[Any, list[Any]]:
        """Lowers the program that a call of `run` would execute.

        Returns:
          The lowered program, and the variables that the program writes.
        """
        current.check_not_mixing(self._strategy)
        call, leaves = _flatten_call(fn, args, kwargs)
        arguments = [describe_argument(leaf, self._mesh) for leaf in leaves]
        with self._lock:
            program = self._make_program(call, arguments)
            return program.lower(_list_arrays(arguments)), program.written

    def enable_debugging(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which this thread runs functions eagerly."""
        return temporary_attribute(self._thread, "is_debugging", True)

    def _debug(self, call: "_Call", leaves: list[Any]) -> Tree:
        mesh = self._mesh
        if mesh.num_processes > 1:
            raise RuntimeError(
                "`debug` works only with a single process. Received: `run` of "
                f"a strategy with {mesh.num_processes} processes. Debug with a "
                "`MirroredStrategy` in a single process, with the same data."
            )
        model_variables.sync_all_fits()
        split = [leaf for leaf in leaves if isinstance(leaf, values.PerReplica)]
        rows = [self._combine_components(value)[2] for value in split]

        def call_replica(replica: int) -> Tree:
            return call([_take_replica(v, replica, mesh) for v in leaves])

        return debug_run(
            call_replica,
            mesh=mesh,
            scope=self._strategy.scope,
            replica_scope=self._make_replica_scope(call),
            rows=list(zip(*(r for r in rows if r is not None), strict=True)),
            is_update=call.is_update,
        )

    @property
    def num_programs(self) -> int:
        """The number of cached programs."""
        return sum(map(len, self._programs.values()))

    def _convert_argument(self, leaf: Leaf) -> _Argument:
        """Returns an argument's key for caching programs, and its array."""
        if isinstance(leaf, values.PerReplica):
            layout, array, rows = self._combine_components(leaf)
            return (layout, array.shape, array.dtype, rows), array
        if isinstance(leaf, values.Mirrored):
            leaf = leaf.array
        if isinstance(leaf, jax.Array | np.ndarray | np.generic):
            replicated = self._mesh.whole
            is_placed = isinstance(leaf, jax.Array) and has_sharding(
                leaf, replicated
            )
            array = leaf if is_placed else jax.device_put(leaf, replicated)
            return (REPLICATED, array.shape, array.dtype, None), array
        return (STATIC, None, None, make_key(leaf), leaf), None

    def _combine_components(
        self, value: values.PerReplica
    ) -> tuple[str, Any, Variant | None]:
        """Returns a value's layout, its components as one array, and sizes.

        Components of different shapes are padded to one shape; the sizes are
        then their true sizes. Otherwise None is returned for the sizes.
        """
        values.check_home(value, self._mesh)
        if value.layout != values.PARTS:
            sizes = value.shapes and _find_sizes(value.shapes)
            return value.layout, value.arrays[0], sizes
        parts = value.arrays
        shapes = [np.shape(part) for part in parts]
        dtypes = [str(jax.numpy.result_type(part)) for part in parts]
        sizes = _find_sizes(shapes, dtypes)
        if len(set(shapes)) == 1:
            stacked = values.stack_replicas(parts, self._mesh)
            return values.STACKED, stacked, None
        maximum = tuple(map(max, zip(*shapes, strict=True)))
        equal = [
            values.pad_to(jax.numpy.asarray(part), maximum) for part in parts
        ]
        return values.STACKED, values.stack_replicas(equal, self._mesh), sizes

    def _drop_dim(self, kind: tuple[Any, ...], array: Any) -> Any:
        if kind[0] == values.STACKED:
            array = drop_dim(array, self._mesh)
        has_rows = kind[0] in (values.STACKED, values.ROWS)
        return split_tokens(array, self._mesh) if has_rows else array

    def _make_program(
        self, call: "_Call", arguments: list[_Argument]
    ) -> RunProgram:
        kinds = [kind for kind, _ in arguments]
        array_kinds = [kind for kind in kinds if kind[0] != STATIC]

        def join_components(components: list[Any]) -> Tree:
            rest = map(self._drop_dim, array_kinds, components)
            return call(
                kind[4] if kind[0] == STATIC else next(rest) for kind in kinds
            )

        program = RunProgram(
            join_components,
            [kind[0] in (values.STACKED, values.ROWS) for kind in array_kinds],
            [kind[3] for kind in array_kinds],
            mesh=self._mesh,
            replica_scope=self._make_replica_scope(call),
            is_update=call.is_update,
        )
        runtime = self._strategy._runtime
        with self._strategy.scope():
            program.prepare(_list_arrays(arguments), runtime.registry)
        if any(v.trainable for v in program.lifted):
            runtime.distribution.placements.layout_map.check_keys(
                [*program.lifted, *runtime.registry]
            )
        return program

    def _make_replica_scope(self, call: "_Call") -> ReplicaScope:
        """Returns a function that enters the replica context of a call."""
        if not call.is_update:
            return functools.partial(ReplicaContext, self._strategy)
        return lambda step: current.replica_context(self._strategy, None)

    def _count_compilation(self, fn: Any) -> None:
        code = getattr(fn, "__code__", None)
        self._num_made[code] += 1
        if code is not None and self._num_made[code] == _WARN_AFTER:
            warnings.warn(
                f"`run` has compiled {fn.__name__!r} {_WARN_AFTER} times. "
                "It compiles a function again if the shapes or dtypes of its "
                "arguments change, or if a Python number or object among its "
                "arguments or in its closure changes. Pass such values as "
                "arrays.",
                UserWarning,
                stacklevel=4,
            )


class _Call(NamedTuple):
    """A function and the structure of its arguments; callable with leaves."""

    fn: Callable[..., Any]
    structure: Any
    is_update: bool

    def __call__(self, leaves: Iterable[Any]) -> Tree:
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        return self.fn(*args, **kwargs)


def _list_arrays(arguments: list[_Argument]) -> list[Any]:
    return [array for _, array in arguments if array is not None]


def _find_sizes(shapes: Sequence[Any], dtypes: Sequence[str] = ()) -> Variant:
    """Returns the components' row counts, or shapes if other dimensions differ.

    Raises:
      ValueError: if components have different ranks or dtypes.
    """
    if len(set(map(len, shapes))) > 1 or len(set(dtypes)) > 1:
        dtypes_text = f", dtypes {dtypes}" if dtypes else ""
        raise ValueError(
            "The components of a PerReplica given to `run` must have the same "
            f"rank and dtype. Received: shapes {list(shapes)}{dtypes_text}. "
            "Reshape or cast the components."
        )
    if len({shape[1:] for shape in shapes}) > 1:
        return tuple(map(tuple, shapes))
    return tuple(shape[0] if shape else 0 for shape in shapes)


def _flatten_call(
    fn: Callable[..., Any],
    args: object,
    kwargs: object,
    *,
    is_update: bool = False,
) -> tuple[_Call, list[Any]]:
    """Returns the `_Call` of a function, and the leaves of its arguments."""
    if not isinstance(args, list | tuple) or not isinstance(kwargs, dict):
        raise TypeError(
            "`run` needs the function's arguments as a tuple `args` and a "
            f"dict `kwargs`. Received: args of type {type(args).__name__}, "
            f"kwargs of type {type(kwargs).__name__}. Pass `args=(x,)`."
        )

    def is_leaf(value: object) -> bool:
        return value is None or values.is_distributed(value)

    nest: Any = (tuple(args), kwargs)
    leaves, structure = jax.tree.flatten(nest, is_leaf=is_leaf)
    if any(map(is_closed, leaves)):
        # Mappings that JAX does not flatten are opened only if they contain a
        # distributed value; others are passed unchanged.
        nest = open_nest(nest, is_leaf, having=values.is_distributed)
        leaves, structure = jax.tree.flatten(nest, is_leaf=is_leaf)
    return _Call(fn, structure, is_update), leaves


def _take_replica(leaf: Leaf, replica: int, mesh: ReplicaMesh) -> Leaf:
    """Returns one replica's component of an argument, in debug mode."""
    if isinstance(leaf, values.Mirrored):
        leaf = leaf.array
    if isinstance(leaf, values.PerReplica):
        # On all devices, as the values of variables that it is combined with.
        return jax.device_put(np.asarray(leaf.values[replica]), mesh.whole)
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return jax.device_put(leaf, mesh.whole)
    return leaf
