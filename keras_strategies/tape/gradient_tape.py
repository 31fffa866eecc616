"""`GradientTape`: TensorFlow's tape for code that JAX traces.

A tape records nothing by itself: the trace has all equations. While it records,
they are computed in a named scope, so that `gradient` knows which of them are
the tape's. Each read of a trainable variable is an equation of its own, so
that a variable is known by what its reads returned, whatever array it holds.
"""

import contextlib
import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.core import Tracer

from keras_strategies._types import Tree
from keras_strategies.spmd.identity import (
    IdentityMap,
    IdentitySet,
    temporary_attribute,
)
from keras_strategies.tape import primitives
from keras_strategies.tape.expansion import find_path
from keras_strategies.tape.primitives import (
    find_variable,
    gradient_p,
    recording,
)

_numbers = itertools.count()


class GradientTape:
    """Records operations for automatic differentiation, as in TensorFlow.

    It works in code that JAX traces: in the steps of `fit`, `evaluate` and
    `predict`, and in functions given to `run`. Elsewhere, use
    `ks.value_and_grad`.

    Source: `tf.GradientTape`. Differs from tf: `jacobian` and `batch_jacobian`
    are not supported; an array that is watched counts as watched since the tape
    records.

    Args:
      persistent: Whether `gradient` may be called more than once.
      watch_accessed_variables: Whether trainable variables that are read while
        the tape records are watched.

    Example:
      ```python
      def train_step(self, data):
          x, y = data
          with ks.GradientTape() as tape:
              loss = self.compute_loss(x, y, self(x, training=True))
          weights = self.trainable_variables
          self.optimizer.apply(tape.gradient(loss, weights), weights)
          self.metrics[0].update_state(loss)
          return self.get_metrics_result()
      ```
    """

    def __init__(
        self, persistent: bool = False, watch_accessed_variables: bool = True
    ) -> None:
        self._persistent = persistent
        self._watches_reads = watch_accessed_variables
        self._is_used = False
        self._scopes: Any = None
        self.trace: Any = None
        self._begin()

    def _begin(self) -> None:
        """Forgets what was recorded."""
        self._mark = f"ks.tape.{next(_numbers)}."
        self._reads: IdentityMap[list[Any]] = IdentityMap()
        self._watched: list[Any] = []
        self._chosen = IdentitySet()

    def __enter__(self) -> "GradientTape":
        if self._scopes is not None:
            raise ValueError(
                "Tape is still recording: an active tape must not be entered "
                "again. Create another `GradientTape`."
            )
        self.trace = primitives.find_trace()
        self._scopes = contextlib.ExitStack()
        self._scopes.enter_context(primitives.patches.hold())
        self._enter_scope()
        recording.tapes.append(self)
        self._scopes.callback(recording.tapes.remove, self)
        return self

    def __exit__(self, *_: object) -> None:
        scopes, self._scopes = self._scopes, None
        with scopes:
            self._check_is_innermost()

    @contextlib.contextmanager
    def stop_recording(self) -> Iterator[None]:
        """Stops recording while the block runs.

        Raises:
          ValueError: if the tape does not record.
        """
        self._check_records("stop_recording")
        others = [tape for tape in recording.tapes if tape is not self]
        with (
            temporary_attribute(recording, "tapes", others),
            jax.named_scope(self._mark + primitives.OFF),
        ):
            yield

    def reset(self) -> None:
        """Forgets all that was recorded, and goes on to record.

        Raises:
          ValueError: if the tape does not record, a tape that was entered
            after it does, or a named scope was entered after it.
        """
        self._check_records("reset")
        self._check_is_innermost()
        if self._names != primitives.find_names():
            raise ValueError(
                "`reset` must not be called in a named scope that was entered "
                "after the tape (`jax.named_scope`, `keras.name_scope`, a "
                "layer). Call it directly in the tape's block."
            )
        self._begin()
        self._enter_scope()

    def _enter_scope(self) -> None:
        self._scopes.enter_context(jax.named_scope(self._mark + primitives.ON))
        self._names = primitives.find_names()

    def watch(self, tensor: Tree) -> None:
        """Watches arrays and variables, so that they may be sources.

        Args:
          tensor: A nest of arrays that were computed in the current trace, and
            of variables. Those that are not of a float dtype are ignored.

        Raises:
          ValueError: if the tape does not record.
        """
        self._check_records("watch")
        for leaf in _flatten(tensor):
            if _is_variable(leaf):
                self._chosen.add(leaf)
            elif self.trace is None:
                primitives.refuse_untraced()
            elif not isinstance(leaf, Tracer):
                raise ValueError(
                    "A tape can only watch variables, and arrays that are "
                    "computed in the code that JAX traces. Received: an object "
                    f"of type {type(leaf).__name__}. Convert it within the "
                    "code: `keras.ops.convert_to_tensor`."
                )
            elif primitives.is_inexact(leaf):
                self._watched.append(leaf)

    def watched_variables(self) -> tuple[keras.Variable, ...]:
        """Returns the variables that were read while they were watched."""
        return tuple(self._reads)

    def gradient(
        self,
        target: Tree,
        sources: Tree,
        output_gradients: Tree = None,
        unconnected_gradients: Any = "none",
    ) -> Any:
        """Returns the gradient of the sum of targets with respect to sources.

        Args:
          target: A nest of arrays or variables, of any shapes.
          sources: A nest of arrays and variables that the tape watched, or of
            arrays that were computed from these.
          output_gradients: A nest like `target` of the gradients with respect
            to the targets, of their shapes. None for ones.
          unconnected_gradients: The gradient of a source on which no target
            depends: `"none"` for None, or `"zero"`.

        Returns:
          A nest like `sources`. A gradient has the shape and dtype of its
          source.

        Raises:
          RuntimeError: if a tape that is not persistent has computed gradients
            before, or if this code is not traced as part of a step.
          ValueError: if `unconnected_gradients` is another value.
        """
        if self._is_used and not self._persistent:
            raise RuntimeError(
                "A non-persistent GradientTape can only be used to compute one "
                "set of gradients. Create `GradientTape(persistent=True)`."
            )
        kind = getattr(unconnected_gradients, "value", unconnected_gradients)
        if kind not in ("none", "zero"):
            raise ValueError(
                "`unconnected_gradients` must be 'none' or 'zero'. Received: "
                f"{unconnected_gradients!r}. Pass one of these."
            )
        trace = primitives.find_trace()
        if trace is None or trace is not self.trace:
            primitives.refuse_untraced()
        self._is_used = True
        leaves, structure = jax.tree.flatten(sources, is_leaf=_is_variable)
        # As in TensorFlow, the tape records how it reads a target.
        with contextlib.nullcontext() if self._scopes else self:
            targets = [
                leaf.value if _is_variable(leaf) else leaf
                for leaf in _flatten(target)
            ]
        found = self._differentiate(leaves, *_pair(targets, output_gradients))
        for k, leaf in enumerate(leaves):
            if found[k] is None and kind == "zero":
                found[k] = jnp.zeros(leaf.shape, leaf.dtype)
        return jax.tree.unflatten(structure, found)

    def jacobian(self, *_: Any, **__: Any) -> Any:
        """Raises NotImplementedError: use `jax.jacobian`."""
        raise NotImplementedError(
            "`jacobian` and `batch_jacobian` are not supported. Use "
            "`jax.jacobian` of a function of the arrays."
        )

    batch_jacobian = jacobian

    def _check_records(self, name: str) -> None:
        if self._scopes is None:
            raise ValueError(
                f"`{name}` must be called while the tape records. Call it in "
                "the tape's `with` block."
            )

    def _check_is_innermost(self) -> None:
        if recording.tapes[-1:] != [self]:
            raise ValueError(
                "Tapes must be left in the reverse of the order in which they "
                "were entered, and only the innermost can be reset. Use nested "
                "`with` blocks."
            )

    def _differentiate(
        self,
        sources: Sequence[Any],
        targets: Sequence[Any],
        seeds: Sequence[Any],
    ) -> list[Any]:
        """Returns the gradient for each source, or None."""
        reads = [read for v in self._reads for read in self._reads[v]]
        starts = map(find_variable, [*self._watched, *reads])
        ends = map(find_variable, targets)
        equations = self.trace.frame.get_eqns()
        _, found = find_path(equations, starts, ends, self._mark)
        found.discard(None)
        connected = [
            [a for a in self._reads.get(v) or [v] if find_variable(a) in found]
            for v in sources
        ]
        flat = list(itertools.chain(*connected))
        if not flat:
            return [None] * len(sources)
        operands, count = [*targets, *seeds, *flat], len(targets)
        gradients = iter(
            gradient_p.bind(*operands, num_targets=count, mark=self._mark)
        )
        # Gradients of complex sources are conjugates of JAX's.
        parts = [[next(gradients) for _ in each] for each in connected]
        return [
            jnp.conj(functools.reduce(operator.add, each)) if each else None
            for each in parts
        ]

    def watches(self, variable: keras.Variable) -> bool:
        """Returns whether a read of a variable is a source."""
        return variable in self._chosen or (
            self._watches_reads and variable.trainable
        )

    def note_read(self, variable: keras.Variable, value: Any) -> None:
        """Notes what the read of a variable returned."""
        self._reads[variable] = [*(self._reads.get(variable) or ()), value]


def _is_variable(value: object) -> bool:
    return isinstance(value, keras.Variable)


def _flatten(nest: Tree) -> list[Any]:
    return jax.tree.leaves(nest, is_leaf=_is_variable)


def _pair(targets: Sequence[Any], seeds: Tree) -> tuple[list[Any], list[Any]]:
    """Returns the targets that have derivatives, and the seed of each."""
    leaves = [None] * len(targets)
    if seeds is not None:
        leaves = jax.tree.leaves(seeds, is_leaf=lambda x: x is None)
    if len(leaves) != len(targets):
        raise ValueError(
            "`output_gradients` must be a nest like `target`. Received: "
            f"{len(leaves)} entries for {len(targets)} targets. Pass one for "
            "each target."
        )
    pairs = zip(targets, leaves, strict=True)
    pairs = [(x, seed) for x, seed in pairs if primitives.is_inexact(x)]
    return [x for x, _ in pairs], [
        jnp.conj(jnp.full(x.shape, 1 if seed is None else seed, x.dtype))
        for x, seed in pairs
    ]
