"""The rules by which the replicas' metric variables are combined.

Most metrics are sums over rows, so the replicas' changes are summed. Other
metrics (a maximum, a last value, the mean of a function whose value for one row
depends on other rows) are updated on every replica with the rows of all
replicas. Keras's metrics are sums over rows, except those for which
`mixes_rows` returns True. A user-defined metric is tested once on toy data.
"""

import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import keras
import numpy as np
from keras import tree

from keras_strategies._types import Array, Leaf, Tree
from keras_strategies.hooks.gather_rows import has_rows, note_rows
from keras_strategies.keras_bridge.step_context import StepContext

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

_PARTS = (3, 5)
# Whether a metric is a sum over rows, for each form of its calls.
_verdicts: "weakref.WeakKeyDictionary[keras.metrics.Metric, dict[Any, bool]]"
_verdicts = weakref.WeakKeyDictionary()


def choose_update_rule(
    metric: keras.metrics.Metric,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    rows: int,
) -> str:
    """Chooses the rule for one call of `metric.update_state` in a model's step.

    Args:
      metric: The metric.
      args: The positional arguments of the call.
      kwargs: The keyword arguments of the call.
      rows: Number of rows of a replica's batch.

    Returns:
      One of this module's rules: `SUM`, `MEAN`, `SAME` or `GLOBAL`.
    """
    arrays = _find_arrays((args, kwargs))
    if not arrays:
        # Arguments that are constants of the program are the same on every
        # replica.
        return SAME
    with_rows = [has_rows(a, rows) for a in arrays]
    if any(with_rows):
        if _is_additive(metric, args, kwargs):
            return SUM
        return SAME if all(with_rows) else GLOBAL
    weight = kwargs.get("sample_weight", args[1] if len(args) > 1 else None)
    is_mean = type(metric).update_state is keras.metrics.Mean.update_state
    if not is_mean or _is_array(weight):
        return GLOBAL
    # A mean that is weighted with its number of rows is a sum over rows, so the
    # replicas' changes can be summed.
    return SUM if _is_number(weight) and weight == rows else MEAN


def choose_local_rule(
    metric: keras.metrics.Metric, args: Sequence[Any], kwargs: dict[str, Any]
) -> str:
    """Returns the rule for an update in a function passed to `run`.

    As in tf.distribute, each replica may update a metric with any value, and
    the replicas' changes are summed. If the metric's state is not a sum of its
    updates, the metric is instead updated on every replica with the values of
    all replicas.
    """
    if _is_keras_own(metric):
        return SUM
    if find_max_rank((args, kwargs)):
        return SUM if _is_additive(metric, args, kwargs) else SAME
    is_sum = _run_in_thread(lambda: _adds_the_same(metric, args, kwargs))
    return SUM if is_sum else IN_TURN


def describe_metric(metric: keras.metrics.Metric) -> str:
    """Returns a metric's name and class, for error messages."""
    return f"metric {metric.name!r} ({type(metric).__name__})"


def note_sizes(
    step: StepContext,
    metric: keras.metrics.Metric,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Records which sizes `choose_update_rule` assumed to be row counts.

    A second trace with another number of rows (`StepFacts.is_retrace`) checks
    whether these sizes change with the number of rows.
    """
    leaves, rows = tree.flatten((args, kwargs)), step.facts.rows
    of = describe_metric(metric)
    note_rows(step, leaves, of)
    arrays = _find_arrays(leaves)
    may_count = bool(arrays) and not any(has_rows(a, rows) for a in arrays)
    for leaf in filter(_is_number, leaves):
        step.note_size(leaf, may_count and leaf == rows, of)


def _is_number(value: object) -> bool:
    """Returns whether a value is a Python number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _find_arrays(nest: Tree) -> list[Any]:
    return list(filter(_is_array, tree.flatten(nest)))


def _is_keras_own(metric: keras.metrics.Metric) -> bool:
    if not _is_from_keras(type(metric)):
        return False
    if isinstance(metric, keras.metrics.MeanMetricWrapper):
        fn = metric._fn
        # A Loss object reduces over its rows itself.
        return _is_from_keras(fn) and not isinstance(fn, keras.losses.Loss)
    return True


def find_max_rank(arrays: Tree) -> int:
    """Returns the largest number of dimensions in a nest of arrays."""
    return max((len(a.shape) for a in _find_arrays(arrays)), default=0)


def _is_from_keras(thing: object) -> bool:
    if not hasattr(thing, "__name__"):
        thing = type(thing)
    module = getattr(thing, "__module__", "") or ""
    return module.split(".")[0] == "keras"


def mixes_rows(loss: object, ndim: int) -> bool:
    """Returns whether a loss's or metric's value for a row uses other rows.

    This is true for:
    - Keras's Dice, Tversky and Circle losses;
    - Keras's hinge losses, which read all labels to find out whether labels are
      0 and 1 or -1 and 1;
    - losses that reduce over the axis of the rows, as Keras's loss functions do
      if the arrays have no other axis;
    - losses marked by `keras_strategies.global_batch_loss`.

    Args:
      loss: A loss or metric, either an object or a function.
      ndim: Number of dimensions of the predictions.
    """
    fn = getattr(loss, "fn", getattr(loss, "_fn", None))
    if any(
        getattr(c, "_ks_global_batch", False)
        or isinstance(c, _ROW_MIXING_CLASSES)
        or c in _ROW_MIXING_FUNCTIONS
        for c in (loss, fn)
        if c is not None
    ):
        return True
    if ndim == 1 and fn is not None and _is_from_keras(fn):
        return True
    axes = (getattr(loss, "_fn_kwargs", None) or {}).get("axis")
    axes = axes if isinstance(axes, list | tuple) else [axes]
    return any(isinstance(a, int) and a in (0, -ndim) for a in axes)


_ROW_MIXING_CLASSES = (
    keras.losses.Dice,
    keras.losses.Tversky,
    keras.losses.Circle,
    keras.losses.Hinge,
    keras.losses.SquaredHinge,
)
_ROW_MIXING_FUNCTIONS = tuple(made().fn for made in _ROW_MIXING_CLASSES)


def _is_additive(
    metric: keras.metrics.Metric, args: Sequence[Any], kwargs: dict[str, Any]
) -> bool:
    if mixes_rows(metric, find_max_rank((args, kwargs))):
        return False
    if _is_keras_own(metric):
        return True
    verdicts = _verdicts.setdefault(metric, {})
    form = _find_form(args, kwargs)
    if form not in verdicts:
        is_first = all(verdicts.values())
        verdicts[form] = _try_out(metric, args, kwargs)
        is_wrapper = isinstance(metric, keras.metrics.MeanMetricWrapper)
        if is_first and not verdicts[form] and not is_wrapper:
            warnings.warn(
                f"Metric {metric.name!r} ({type(metric).__name__}) is not a "
                "sum over rows: updating it with two parts of a batch gives "
                "another result than updating it with the entire batch. "
                "Therefore each replica updates it with the rows of all "
                "replicas. The result is exact, but y and y_pred must be "
                "gathered from the replicas in each step.",
                UserWarning,
                stacklevel=2,
            )
    return verdicts[form]


def _find_form(args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable:
    """Returns what the test of a call on toy data depends on.

    A metric may be a sum over rows without sample weights, and not with them.
    """
    leaves, structure = jax.tree.flatten((tuple(args), kwargs))
    return structure, tuple(
        (len(leaf.shape), str(leaf.dtype)) if _is_array(leaf) else type(leaf)
        for leaf in leaves
    )


def _try_out(
    metric: keras.metrics.Metric, args: Sequence[Any], kwargs: dict[str, Any]
) -> bool:
    """Tests on random data whether a metric is a sum over rows.

    The metric is updated with the parts of a toy batch, and the changes are
    summed. It is a sum over rows if this gives the same state as an update with
    the entire batch.
    """
    batch = (tuple(args), dict(kwargs))
    rows = next(a.shape[0] for a in _find_arrays(batch) if len(a.shape))
    return _run_in_thread(lambda: _adds_up(metric, batch, rows))


def _run_in_thread(question: Callable[[], bool]) -> bool:
    """Calls a predicate in a separate thread, in which nothing is being traced.

    Returns:
      The predicate's answer, or False if it raised an error.
    """
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(question)
    # The user's code may fail on toy data that it does not support.
    return answer.exception() is None and answer.result()


def _adds_the_same(
    metric: keras.metrics.Metric, args: Sequence[Any], kwargs: dict[str, Any]
) -> bool:
    """Returns whether a scalar update adds the same, whatever the state is."""
    random = np.random.default_rng(0)
    for toy in _TOYS:

        def scalar(like: Leaf, toy: _Toy = toy) -> Leaf:
            if not _is_array(like):
                return like
            value = random.uniform(toy.low, toy.high)
            return np.asarray(value).astype(like.dtype)

        state = _make_reset_state(metric)
        for _ in range(12):
            batch = tree.map_structure(scalar, (tuple(args), dict(kwargs)))
            first = _make_reset_state(metric)
            at_once = _compute_update(metric, first, batch)
            later = _compute_update(metric, state, batch)
            for a, f, x, s in zip(at_once, first, later, state, strict=True):
                added = np.subtract(a, f, dtype="float64")
                then = np.subtract(x, s, dtype="float64")
                if not np.allclose(added, then, rtol=1e-3, atol=1e-4):
                    return False
            state = later
    return True


def _adds_up(metric: keras.metrics.Metric, like: Tree, rows: int) -> bool:
    """Tests on ranges of random data whether a metric is a sum over rows.

    A range of toy data decides nothing if it does not change the metric, or if
    the metric raises an error. The result is True if at least one range shows
    that the metric is a sum, and no range shows that it is not.
    """
    answers: list[bool | None] = []
    error: Exception | None = None
    for toy in _TOYS:
        try:
            answers.append(_adds_up_on(toy, metric, like, rows))
        except Exception as e:  # The user's code may not support these data.
            error = e
    if not answers and error is not None:
        raise error
    return any(answers) and False not in answers


def _adds_up_on(
    toy: "_Toy", metric: keras.metrics.Metric, like: Tree, rows: int
) -> bool | None:
    """Tests on one range of random data whether a metric is a sum over rows.

    Returns None if the data do not decide this, because they do not change the
    metric.
    """
    state = _make_reset_state(metric)
    random = np.random.default_rng(0)
    adds_up = None
    for _ in range(2):
        batch = tree.map_structure(
            lambda a: _make_toy(a, rows, toy, random) if _is_array(a) else a,
            like,
        )
        at_once = _compute_update(metric, state, batch)
        # The rule SUM does the same: it sums the changes of both parts, where
        # each part updates the metric from `state`.
        merged = [np.array(s) for s in state]
        start = 0
        for size in _PARTS:
            part = _take(batch, slice(start, start + size))
            changed = _compute_update(metric, state, part)
            merged = [
                m + (c - s)
                for m, c, s in zip(merged, changed, state, strict=True)
            ]
            start += size
        for m, w, s in zip(merged, at_once, state, strict=True):
            # Entries that are not finite, because of an overflow or of the
            # logarithm of a negative number, are ignored.
            finite = np.isfinite(np.asarray(m, "float64")) & np.isfinite(w)
            if not np.allclose(m[finite], w[finite], rtol=1e-4, atol=1e-5):
                return False
            if not np.array_equal(w[finite], s[finite]):
                adds_up = True
        state = at_once
    return adds_up


def _make_reset_state(metric: keras.metrics.Metric) -> list[np.ndarray]:
    return [np.asarray(v) for v in metric.stateless_reset_state()]


def _compute_update(
    metric: keras.metrics.Metric,
    state: list[np.ndarray],
    batch: Tree,
) -> list[np.ndarray]:
    args, kwargs = batch
    new = metric.stateless_update_state(state, *args, **kwargs)
    return [np.asarray(v) for v in new]


class _Toy(NamedTuple):
    """A range of random test data; some metrics change in one range only."""

    low: float
    high: float
    largest_int: int


_TOYS = (_Toy(0.05, 0.95, 1), _Toy(-3.0, 3.0, 9), _Toy(-200.0, 200.0, 99))


def _make_toy(
    like: Array, rows: int, toy: _Toy, random: np.random.Generator
) -> np.ndarray:
    if not like.shape:
        return np.ones((), like.dtype)
    if like.shape[0] != rows:
        raise ValueError("An argument without rows cannot be split.")
    shape = (sum(_PARTS), *like.shape[1:])
    if np.issubdtype(like.dtype, np.integer):
        values = random.integers(0, toy.largest_int + 1, shape)
        return values.astype(like.dtype)
    values = random.uniform(toy.low, toy.high, shape)
    if like.dtype == bool:
        return values > (toy.low + toy.high) / 2
    return values.astype(like.dtype)


def _take(batch: Tree, part: slice) -> Tree:
    return tree.map_structure(
        lambda a: a[part] if isinstance(a, np.ndarray) and a.ndim else a, batch
    )
