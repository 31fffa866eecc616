"""The runner of `Strategy.run`: it finds or makes a call's program."""

import collections
import contextlib
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from keras_strategies._core.attributes import attribute_set
from keras_strategies._core.host_arrays import from_tensor
from keras_strategies._core.mesh import ReplicaMesh, has_sharding
from keras_strategies._core.values import (
    PADDED,
    PARTS,
    ROWS,
    STACKED,
    Mirrored,
    PerReplica,
    check_home,
    is_distributed,
    stacked,
)
from keras_strategies.keras_bridge.run.debug_run import debug_run
from keras_strategies.keras_bridge.run.function_keys import (
    function_key,
    value_key,
)
from keras_strategies.keras_bridge.run.run_program import RunProgram
from keras_strategies.keras_bridge.step_context import StepContext
from keras_strategies.keras_bridge.variables import deferred_creation
from keras_strategies.strategy import current, run_shapes
from keras_strategies.strategy.replica_context import ReplicaContext
from keras_strategies.strategy.run_shapes import STATIC, WHOLE

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
    ) -> Any:
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
        _check_call(fn, args, kwargs)
        leaves, structure = jax.tree.flatten(
            (tuple(args), kwargs), is_leaf=_is_leaf
        )
        leaves = list(map(from_tensor, leaves))
        if self._thread.is_debugging:
            _check_debug(self._mesh)
            return self._debug(fn, leaves, structure, is_update)
        kinds, arrays = [], []
        for leaf in leaves:
            kind, array = self._argument(leaf)
            kinds.append(kind)
            if kind[0] != STATIC:
                arrays.append(array)
        try:
            # State is taken, changed and put back: one thread at a time.
            with self._lock:
                return self._compiled(fn, structure, kinds, arrays, is_update)
        except _NEEDS_VALUE as error:
            raise TypeError(
                "A function given to `run` is traced, so its arrays have no "
                "values that Python could use. Received: a function that "
                "makes a number, a condition or a numpy array of one "
                f"({type(error).__name__}). Use `keras.ops` (`where`, `cond`, "
                "`cast`) instead, or look at values in `with "
                "strategy.debug():`."
            ) from error

    def _compiled(
        self,
        fn: Callable[..., Any],
        structure: Any,
        kinds: list[tuple[Any, ...]],
        arrays: list[Any],
        is_update: bool,
    ) -> Any:
        kept = tuple(k[:4] for k in kinds)
        key = (function_key(fn), structure, kept, is_update)
        # One for each set of flags: a loop may freeze layers in turn.
        made = self._programs.get(key, [])
        program = next((p for p in made if p.is_current), None)
        if program is None:
            program = self._make(fn, structure, kinds, arrays, is_update)
            self._programs[key] = [program, *made[: _MAX_FLAGS - 1]]
            self._count(fn)
            while len(self._programs) > _MAX_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        deferred_creation.sync_fits(program.lifted)
        return program(arrays, self._last)

    def lower(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Lowers the program of a call; see `Strategy.compile_run`."""
        current.check_not_mixing(self._strategy)
        _check_call(fn, args, kwargs)
        leaves, structure = jax.tree.flatten(
            (tuple(args), kwargs), is_leaf=_is_leaf
        )
        given = [run_shapes.argument(leaf, self._mesh) for leaf in leaves]
        kinds = [kind for kind, _ in given]
        arrays = [array for _, array in given if array is not None]
        with self._lock:
            program = self._make(fn, structure, kinds, arrays, False)
            return program.lower(arrays)

    def debugging(self) -> contextlib.AbstractContextManager[None]:
        """Runs functions eagerly in this thread while the block runs."""
        return attribute_set(self._thread, "is_debugging", True)

    def _debug(
        self, fn: Any, leaves: list[Any], structure: Any, is_update: bool
    ) -> Any:
        mesh = self._mesh
        rows = []
        deferred_creation.sync_all_fits()
        for leaf in leaves:
            if isinstance(leaf, PerReplica):
                _, _, counts = self._one_array(leaf)
                rows += [] if counts is None else [counts]

        def of_replica(replica: int) -> Any:
            own = [_own(leaf, replica, mesh) for leaf in leaves]
            args, kwargs = jax.tree.unflatten(structure, own)
            return fn(*args, **kwargs)

        scope = self._update_scope if is_update else self._replica_scope
        return debug_run(
            of_replica,
            mesh=mesh,
            scope=self._strategy.scope,
            replica_scope=scope,
            rows=list(zip(*rows, strict=True)),
            is_update=is_update,
        )

    @property
    def num_programs(self) -> int:
        """How many programs are kept."""
        return sum(map(len, self._programs.values()))

    def _argument(self, leaf: Any) -> tuple[tuple[Any, ...], Any]:
        """How an argument enters the program: (kind, shape, dtype, key)."""
        if isinstance(leaf, PerReplica):
            layout, array, rows = self._one_array(leaf)
            return (layout, array.shape, array.dtype, rows), array
        if isinstance(leaf, Mirrored):
            leaf = leaf.array
        if isinstance(leaf, jax.Array | np.ndarray | np.generic):
            array = leaf
            if not (
                isinstance(leaf, jax.Array)
                and has_sharding(leaf, self._mesh.whole)
            ):
                array = jax.device_put(leaf, self._mesh.whole)
            return (WHOLE, array.shape, array.dtype, None), array
        return (STATIC, None, None, value_key(leaf), leaf), None

    def _one_array(
        self, value: PerReplica
    ) -> tuple[str, Any, tuple[int, ...] | None]:
        """The layout, the array, and each replica's rows if they differ."""
        check_home(value, self._mesh)
        if value.layout == PADDED:
            return (STACKED, value.arrays[0], _rows_of(value))
        if value.layout != PARTS:
            return value.layout, value.arrays[0], None
        parts = value.arrays
        shapes = [np.shape(part) for part in parts]
        dtypes = [str(jax.numpy.result_type(part)) for part in parts]
        if len(set(dtypes)) > 1 or len({(len(s), s[1:]) for s in shapes}) > 1:
            raise ValueError(
                "The components of a PerReplica given to `run` may differ in "
                "their number of rows only, the first dimension. Received: "
                f"shapes {shapes}, dtypes {dtypes}. Pad them to one shape."
            )
        if len(set(shapes)) == 1:
            return STACKED, stacked(parts, self._mesh), None
        rows = tuple(shape[0] for shape in shapes)
        padded = [_padded(part, max(rows)) for part in parts]
        return STACKED, stacked(padded, self._mesh), rows

    def _make(
        self,
        fn: Callable[..., Any],
        structure: Any,
        kinds: list[tuple[Any, ...]],
        arrays: list[Any],
        is_update: bool,
    ) -> RunProgram:
        def of_components(components: list[Any]) -> Any:
            given = iter(components)
            leaves = [
                kind[4] if kind[0] == STATIC else _component(kind, next(given))
                for kind in kinds
            ]
            args, kwargs = jax.tree.unflatten(structure, leaves)
            return fn(*args, **kwargs)

        is_split = [k[0] in (STACKED, ROWS) for k in kinds if k[0] != STATIC]
        rows = [k[3] for k in kinds if k[0] != STATIC]
        program = RunProgram(
            of_components,
            is_split,
            rows,
            mesh=self._mesh,
            replica_scope=(
                self._update_scope if is_update else self._replica_scope
            ),
            is_update=is_update,
        )
        with self._strategy.scope():
            program.prepare(arrays, self._strategy._runtime.registry)
        return program

    def _replica_scope(self, step: StepContext) -> Any:
        context = ReplicaContext(self._strategy, step)
        return current.replica_context(self._strategy, context)

    def _update_scope(self, step: StepContext) -> Any:
        del step
        return current.replica_context(self._strategy, None)

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


def _check_debug(mesh: ReplicaMesh) -> None:
    if mesh.num_processes > 1:
        raise RuntimeError(
            "`debug` runs all replicas in one process. Received: `run` on a "
            f"strategy of {mesh.num_processes} processes. Debug with a "
            "`MirroredStrategy` on one of them, with the same data."
        )


def _rows_of(value: PerReplica) -> tuple[int, ...]:
    """Each replica's rows of a padded value.

    Raises:
      ValueError: the components differ in other dimensions.
    """
    shapes = value.shapes or ()
    if len({shape[1:] for shape in shapes}) > 1 or not all(shapes):
        raise ValueError(
            "The components of a PerReplica given to `run` may differ in "
            "their number of rows only, the first dimension. Received: "
            f"shapes {list(shapes)}. Pad them to one shape."
        )
    return tuple(shape[0] for shape in shapes)


def _check_call(fn: Any, args: Any, kwargs: Any) -> None:
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


def _is_leaf(value: Any) -> bool:
    return value is None or is_distributed(value)


def _own(leaf: Any, replica: int, mesh: ReplicaMesh) -> Any:
    """What one replica gets of an argument, in debug mode."""
    if isinstance(leaf, Mirrored):
        leaf = leaf.array
    if isinstance(leaf, PerReplica):
        # On all devices, so that it can be combined with variables.
        return jax.device_put(np.asarray(leaf.values[replica]), mesh.whole)
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return jax.device_put(leaf, mesh.whole)
    return leaf


def _padded(part: Any, rows: int) -> Any:
    array = jax.numpy.asarray(part)
    missing = [(0, rows - array.shape[0])] + [(0, 0)] * (array.ndim - 1)
    return jax.numpy.pad(array, missing)


def _component(kind: tuple[Any, ...], array: Any) -> Any:
    return array[0] if kind[0] == STACKED else array
