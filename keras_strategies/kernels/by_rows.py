"""Parts of models whose author says that they compute each row by itself."""

import dataclasses
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import keras
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec
from keras.src.backend.common.stateless_scope import get_stateless_scope

from keras_strategies._types import Array, Tree
from keras_strategies.keras_bridge.patches import Patch, replacement
from keras_strategies.kernels.mapped_kernels import (
    Trace,
    current_trace,
    map_over_cores,
)
from keras_strategies.kernels.row_test import as_function, find_difference
from keras_strategies.passes import stages
from keras_strategies.passes.row_kinds.separate_parts import mark_part

Part = TypeVar("Part")

_marked: weakref.WeakSet[keras.Layer] = weakref.WeakSet()
"""The marked layers."""

_tested: Any = weakref.WeakKeyDictionary()
"""The tests of each marked layer or function that passed."""


def by_rows(part: Part) -> Part:
    """Marks a part of a model that computes each row of its results by itself.

    A step runs on each replica only if it is shown to compute the numbers of
    one device. Nothing is shown of kernels (Pallas), of callbacks into Python,
    and of some loops. If all that such a part computes for a row depends on the
    same row of its arguments, and on arrays without rows, such as weights, mark
    it, and the step stays mapped. Where a step runs over the global batch, each
    replica computes its own rows of a marked Pallas kernel, so that it compiles
    for several TPU cores.

    The rows are the first dimension of the first array among the arguments, of
    all arguments of the same size, and of all results. Arrays without rows may
    also be captured. A marked part must not write variables, add losses or draw
    random numbers.

    What the mark says is tested when a step is traced: the results of two
    halves of some rows, and their derivatives, must be those of all of these
    rows. The rows and weights of the test are random numbers. A part that
    cannot run on this machine, such as a kernel for TPUs that are not attached,
    is not tested.

    Args:
      part: A function of arrays; a layer, whose `call` is then marked; or a
        subclass of `keras.layers.Layer`. Functions and classes can be marked
        with `by_rows` as a decorator. Copies of a layer that are made from its
        config are not marked, but those of a marked class are.

    Returns:
      The same object if `part` is a layer or class; a wrapper if it is a
      function.

    Raises:
      TypeError: if `part` is not a function, a layer or a class of layers.

    Example:
      ```python
      @ks.by_rows
      class Sines(keras.layers.Layer):
          def call(self, x):
              shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
              return jax.pure_callback(np.sin, shape, jax.lax.stop_gradient(x))
      ```

    References:
      docs/parity.md lists what is shown without a mark.
    """
    marked: Any = part
    if inspect.isclass(part) and issubclass(part, keras.Layer):
        marked.call = _mark_function(marked.call)
        return marked
    if isinstance(part, keras.Layer):
        _marked.add(part)
        return marked
    if inspect.isclass(part) or not callable(part):
        raise TypeError(
            "`part` must be a function, a `keras.Layer` or a subclass of it. "
            f"Received: {part!r} of type {type(part).__name__}. Pass a layer, "
            "or a function whose first argument is an array with rows."
        )
    return _mark_function(marked)


def find_layer_patches() -> Iterator[Patch]:
    """Yields the patch by which steps call marked layers, if there are any.

    A method that a layer itself stores would be the same object in each trace,
    and JAX would rematerialize it with the arrays of the first one. A class of
    its own would be saved instead of the layer's.
    """
    if _marked:
        yield keras.Layer, "__call__", _call_layer


@replacement
def _call_layer(
    original: Callable[..., Any],
    layer: keras.Layer,
    *args: Tree,
    **kwargs: Tree,
) -> Any:
    if current_trace() is None or layer not in _marked:
        return original(layer, *args, **kwargs)
    # Not by `setattr`, which tracks what is set.
    attributes: dict[str, Any] = layer.__dict__
    function = _mark_function(type(layer).call)
    attributes["call"] = types.MethodType(function, layer)
    try:
        return original(layer, *args, **kwargs)
    finally:
        del attributes["call"]


def _mark_function(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def call_by_rows(*args: Tree, **kwargs: Tree) -> Any:
        trace = current_trace()
        leaves, structure = jax.tree.flatten((args, kwargs))
        arrays = [leaf for leaf in leaves if _is_array(leaf)]
        if trace is None or not arrays:
            return function(*args, **kwargs)
        is_method = isinstance(leaves[0], keras.Layer)
        owner = leaves[0] if is_method else call_by_rows
        tested = _tested.setdefault(owner, set())
        call = _Call(
            function=function, leaves=leaves, structure=structure, tested=tested
        )
        return call.compute(trace, arrays)

    return call_by_rows


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray) and leaf.ndim > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of a marked function.

    Attributes:
      function: The function.
      leaves: The leaves of its arguments.
      structure: The structure of its arguments, `(args, kwargs)`.
      tested: The shapes and platforms with which it was tested.
    """

    function: Callable[..., Any]
    leaves: Sequence[Any]
    structure: Any
    tested: set[Any]

    @property
    def name(self) -> str:
        """The function's name, for messages."""
        return getattr(
            self.function, "__qualname__", type(self.function).__name__
        )

    def compute(self, trace: Trace, arrays: Sequence[Array]) -> Any:
        """Computes the function as a part that computes each row by itself.

        Args:
          trace: The trace of the step.
          arrays: The arrays among the arguments.
        """
        count = arrays[0].shape[0]
        have_rows = [array.shape[0] == count for array in arrays]
        traced, shapes = self._trace(with_rows(arrays, have_rows, count))
        self._test(trace, arrays, have_rows)
        part = as_function(traced)
        has_kernels = stages.has_primitives(traced, "pallas_call")
        if has_kernels and (trace.rows or trace.model):
            # XLA cannot partition kernels.
            replicas = trace.mesh.num_replicas if trace.is_global else 1
            shapes_of_one = with_rows(arrays, have_rows, -(-count // replicas))
            traced, _ = self._trace(shapes_of_one)
            part = _map_over_cores(trace, traced, have_rows, count)
        results = mark_part(part, [*traced.consts, *arrays], self.name)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    def _trace(self, arrays: Sequence[Any]) -> tuple[ClosedJaxpr, Any]:
        """Traces the function, and returns the shapes of its results, too."""

        def compute(*arrays: Array) -> Any:
            given = iter(arrays)
            leaves = [
                next(given) if _is_array(leaf) else leaf for leaf in self.leaves
            ]
            args, kwargs = jax.tree.unflatten(self.structure, leaves)
            try:
                return self.function(*args, **kwargs)
            except Exception as error:
                rows = arrays[0].shape[0]
                raise ValueError(
                    "A part marked with `ks.by_rows` must compute any number "
                    f"of rows. Received: {self.name!r}, which fails for {rows} "
                    f"rows ({type(error).__name__}: {error}). Remove the mark, "
                    "or the number of rows from the part."
                ) from error

        scope: Any = get_stateless_scope()
        before = _read(scope)
        # Equations keep the mesh with which they were traced, but kernels are
        # mapped over other axes of it later.
        no_mesh = jax.sharding.AbstractMesh((), ())
        with jax.sharding.use_abstract_mesh(no_mesh):
            traced, shapes = jax.make_jaxpr(compute, return_shape=True)(*arrays)
        if _read(scope) != before:
            raise RuntimeError(
                "A part marked with `ks.by_rows` must not write variables, add "
                f"losses or draw random numbers. Received: {self.name!r}, "
                "which does. Mark only the part that does not, such as the "
                "function that calls a kernel."
            )
        rows = arrays[0].shape[:1]
        wrong = [s for s in jax.tree.leaves(shapes) if s.shape[:1] != rows]
        if wrong:
            raise ValueError(
                "Each result of a part marked with `ks.by_rows` must have a "
                f"row for each of the {rows[0]} rows of its first argument. "
                f"Received: a result of shape {wrong[0].shape} of "
                f"{self.name!r}. Mark a part whose results have rows."
            )
        return traced, shapes

    def _test(
        self, trace: Trace, arrays: Sequence[Array], have_rows: Sequence[bool]
    ) -> None:
        """Raises ValueError if numbers show that rows are not separate."""
        platform = trace.mesh.platform
        key = (platform, *((a.shape[1:], str(a.dtype)) for a in arrays))
        if key in self.tested:
            return
        half = max(1, arrays[0].shape[0] // 2)
        all_rows, half_rows = (
            self._trace(with_rows(arrays, have_rows, rows))[0]
            for rows in (2 * half, half)
        )
        found = find_difference(all_rows, half_rows, have_rows, platform)
        if found is not None:
            raise ValueError(
                "A part marked with `ks.by_rows` must compute each row by "
                f"itself. Received: {self.name!r}. For random numbers, {found} "
                f"of two halves of {2 * half} rows are not those of all rows. "
                "Remove the mark, or compute each row only from the same row "
                "of the arguments."
            )
        self.tested.add(key)


def with_rows(
    arrays: Sequence[Array], have_rows: Sequence[bool], rows: int
) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of arrays, with another number of rows."""
    return [
        jax.ShapeDtypeStruct(
            (rows, *array.shape[1:]) if has_rows else array.shape, array.dtype
        )
        for array, has_rows in zip(arrays, have_rows, strict=True)
    ]


def _read(scope: Any) -> Any:
    """Returns what a scope has collected: values of variables, and losses."""
    if scope is None:
        return None
    values = {key: id(value) for key, value in scope.state_mapping.items()}
    return values, len(scope.losses)


def _map_over_cores(
    trace: Trace, traced: ClosedJaxpr, have_rows: Sequence[bool], count: int
) -> Callable[..., list[Any]]:
    """Returns a part as a function of its constants and operands.

    In the trace of a global batch, each replica computes its own rows. All
    cores of a replica compute the same.

    Args:
      trace: The trace of the step.
      traced: The part, with the rows of one replica.
      have_rows: Whether each operand has rows.
      count: The number of rows.
    """
    rows, none = PartitionSpec(trace.rows), PartitionSpec()
    specs = [none] * len(traced.consts)
    specs += [rows if has_rows else none for has_rows in have_rows]

    def compute_rows(*operands: Array) -> list[Any]:
        return map_over_cores(
            trace,
            as_function(traced),
            operands,
            specs,
            out_spec=rows,
            count=count,
            # Any part can compute with copies of a row.
            padding="edge",
        )

    return compute_rows
