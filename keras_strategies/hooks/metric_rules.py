"""The rules by which the replicas' metric variables are combined.

Most metrics are sums over rows, so the replicas' changes are summed. Other
metrics (a maximum, a last value, the mean of a function whose value for one row
depends on other rows) are updated on every replica with the rows of all
replicas. Keras's metrics are sums over rows, except those for which
`mixes_rows` returns True. The update of a user-defined metric is traced with
the rows of a replica and with those of all, and the traces are analyzed.
"""

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import keras
from jax.extend.core import ClosedJaxpr
from keras import tree

from keras_strategies._types import Tree
from keras_strategies.hooks.gather_rows import has_rows, note_rows
from keras_strategies.keras_bridge.step_context import StepContext
from keras_strategies.passes.row_kinds.additions import (
    adds_sums,
    computes_by_rows,
    find_additions,
)
from keras_strategies.passes.stages import get_shape

SUM = "sum"
"""The replicas' changes are summed."""
MEAN = "mean"
"""The replicas' changes are averaged, because each replica updates the metric
with the mean over its rows."""
SAME = "same"
"""Every replica makes the same change, so there is nothing to combine."""
IN_TURN = "in turn"
"""Every replica makes the updates of all replicas, one after the other, so
there is nothing to combine."""
GLOBAL = "global batch"
"""None of the rules is certain to be correct, so the step must see the global
batch."""

# Metrics that are not shown to be sums, of which a warning told.
_warned: "weakref.WeakSet[keras.metrics.Metric]" = weakref.WeakSet()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """A call of a metric's `update_state` on one replica.

    Attributes:
      metric: The metric.
      args: The positional arguments of the call.
      kwargs: The keyword arguments of the call.
      num_replicas: The number of replicas.
    """

    metric: keras.metrics.Metric
    args: Sequence[Any]
    kwargs: dict[str, Any]
    num_replicas: int

    @property
    def leaves(self) -> list[Any]:
        """The arguments, without their nests."""
        return tree.flatten((self.args, self.kwargs))

    @property
    def arrays(self) -> list[Any]:
        """The arguments that are arrays."""
        return list(filter(_is_array, self.leaves))

    def choose_rule(self, rows: int) -> str:
        """Chooses the rule for an update in a model's step.

        Args:
          rows: Number of rows of a replica's batch.

        Returns:
          One of this module's rules: `SUM`, `MEAN`, `SAME` or `GLOBAL`.
        """
        if not self.arrays:
            # Arguments that are constants of the program are the same on every
            # replica.
            return SAME
        with_rows = [has_rows(a, rows) for a in self.arrays]
        if any(with_rows):
            if self._is_additive():
                return SUM
            return SAME if all(with_rows) else GLOBAL
        weight = next(iter(self.args[1:]), self.kwargs.get("sample_weight"))
        update_state = type(self.metric).update_state
        is_mean = update_state is keras.metrics.Mean.update_state
        if not is_mean or _is_array(weight):
            return GLOBAL
        # A mean that is weighted with its number of rows is a sum over rows, so
        # the replicas' changes can be summed.
        return SUM if _is_number(weight) and weight == rows else MEAN

    def choose_local_rule(self) -> str:
        """Chooses the rule for an update in a function passed to `run`.

        As in tf.distribute, each replica may update a metric with any value,
        and the replicas' changes are summed. If the metric's state is not a sum
        of its updates, the metric is instead updated on every replica with the
        values of all replicas.
        """
        if _is_keras_own(self.metric):
            return SUM
        if any(a.shape for a in self.arrays):
            return SUM if self._is_additive() else SAME
        return SUM if _run_in_thread(self._adds_the_same) else IN_TURN

    def note_sizes(self, step: StepContext) -> None:
        """Records which sizes `choose_rule` assumed to be row counts.

        A second trace with another number of rows (`StepFacts.is_retrace`)
        checks whether these sizes change with the number of rows.
        """
        rows, of = step.facts.rows, describe_metric(self.metric)
        note_rows(step, self.leaves, of)
        has_scalars = bool(self.arrays) and not any(
            has_rows(a, rows) for a in self.arrays
        )
        for leaf in filter(_is_number, self.leaves):
            step.note_size(leaf, has_scalars and leaf == rows, of)

    def _is_additive(self) -> bool:
        metric = self.metric
        if mixes_rows(metric, self.args, self.kwargs):
            return False
        if _is_keras_own(metric):
            return True
        # The answer is not kept: attributes of the metric, constants among the
        # arguments, shapes, and numbers of rows may change it.
        is_sum = _run_in_thread(self._adds_up)
        is_wrapper = isinstance(metric, keras.metrics.MeanMetricWrapper)
        if not is_sum and not is_wrapper and metric not in _warned:
            _warned.add(metric)
            warnings.warn(
                f"Metric {metric.name!r} ({type(metric).__name__}) is not "
                "shown to add a sum over rows to its states. Therefore each "
                "replica updates it with the rows of all replicas. The result "
                "is exact, but y and y_pred must be gathered from the replicas "
                "in each step.",
                UserWarning,
                stacklevel=2,
            )
        return is_sum

    def _adds_up(self) -> bool:
        """Returns whether the update adds sums over its rows to the states.

        Then the sum of the replicas' changes is the change on one device. Two
        traces of the update decide this: with the rows of a replica, and of
        all.
        """
        sizes = {a.shape[0] for a in self.arrays if a.shape}
        if len(sizes) > 1:
            return False
        # One row looks like any other dimension of size one.
        size = max((*sizes, 2))
        rows = (size, max(self.num_replicas, 2) * size)
        are_rows = [bool(a.shape) for a in self.arrays]
        traced, more = map(self._trace, rows)
        return adds_sums(traced, more, are_rows, rows)

    def _adds_the_same(self) -> bool:
        """Returns whether the update adds the same, whatever the states are."""
        traced = self._trace(0)
        return find_additions(traced, len(self.metric.variables)) is not None

    def _trace(self, rows: int) -> ClosedJaxpr:
        """Traces the update of the metric's states.

        Args:
          rows: The number of rows of the arrays, except for scalars.
        """
        # While Keras trains a model, its variables have no values.
        states = list(map(get_shape, self.metric.variables))
        update = self.metric.stateless_update_state
        nest = (tuple(self.args), self.kwargs)
        return _trace(lambda *a, **k: list(update(*a, **k)), nest, rows, states)


def describe_metric(metric: keras.metrics.Metric) -> str:
    """Returns a metric's name and class, for error messages."""
    return f"metric {metric.name!r} ({type(metric).__name__})"


def _is_number(value: object) -> bool:
    """Returns whether a value is a Python number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_keras_own(metric: keras.metrics.Metric) -> bool:
    if not _is_from_keras(type(metric)):
        return False
    if isinstance(metric, keras.metrics.MeanMetricWrapper):
        fn = metric._fn
        # A Loss object reduces over its rows itself.
        return _is_from_keras(fn) and not isinstance(fn, keras.losses.Loss)
    return True


def _is_from_keras(thing: object) -> bool:
    if not hasattr(thing, "__name__"):
        thing = type(thing)
    module = getattr(thing, "__module__", "") or ""
    return module.split(".")[0] == "keras"


def mixes_rows(loss: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Returns whether a loss's or metric's value for a row uses other rows.

    This is true for losses marked by `keras_strategies.global_batch_loss`. A
    function of Keras, or one with an axis, is traced and analyzed: Keras's
    Circle loss mixes rows, and so do Dice and Tversky unless they have an
    axis; hinge losses, which read all labels to find out whether labels are 0
    and 1 or -1 and 1; and most functions if the arrays have no other axis.

    Args:
      loss: A loss or metric.
      args: The positional arguments of its call or update.
      kwargs: The keyword arguments.
    """
    fn = getattr(loss, "fn", getattr(loss, "_fn", None))
    if any(getattr(c, "_ks_global_batch", False) for c in (loss, fn)):
        return True
    options = getattr(loss, "_fn_kwargs", None) or {}
    if fn is None or not (_is_from_keras(fn) or "axis" in options):
        return False
    is_loss = isinstance(loss, keras.losses.Loss)
    call = loss.call if is_loss else functools.partial(fn, **options)

    def compute(y_true: Tree, y_pred: Tree, sample_weight: Tree = None) -> Tree:
        del sample_weight
        return call(y_true, y_pred)

    def mixes() -> bool:
        traced = _trace(compute, (tuple(args), kwargs), _ROWS)
        return not computes_by_rows(traced, _ROWS)

    return _run_in_thread(mixes)


# No other size is likely to be the same.
_ROWS = 1009


def _trace(
    fn: Callable[..., Any], nest: Tree, rows: int, *states: Tree
) -> ClosedJaxpr:
    """Traces `fn(*states, *args, **kwargs)` with another number of rows.

    Args:
      fn: The function.
      nest: `(args, kwargs)`.
      rows: The number of rows of the arrays, except for scalars.
      *states: Nests of shapes.
    """
    leaves, structure = jax.tree.flatten(nest)

    def call(states: Any, arrays: list[Any]) -> Any:
        rest = iter(arrays)
        filled = [next(rest) if _is_array(a) else a for a in leaves]
        args, kwargs = jax.tree.unflatten(structure, filled)
        return fn(*states, *args, **kwargs)

    arrays = [
        jax.ShapeDtypeStruct((rows, *a.shape[1:]) if a.shape else (), a.dtype)
        for a in filter(_is_array, leaves)
    ]
    return jax.make_jaxpr(call)(states, arrays)


def _run_in_thread(question: Callable[[], bool]) -> bool:
    """Calls a predicate in a separate thread, in which nothing is being traced.

    Returns:
      The predicate's answer, or False if it raised an error.
    """
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(question)
    # The user's code may support only other numbers of rows.
    return answer.exception() is None and answer.result()
