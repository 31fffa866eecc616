"""The rules by which the replicas' metrics are merged.

Most metrics are sums over rows: what the replicas added is added up. A metric
that is not (a maximum, a last value, a mean of a function that mixes rows)
is updated on every replica with the rows of all of them. Which it is, is
known for Keras's own metrics and tried out once for a user's.
"""

import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import tree

from keras_strategies._types import Array, Leaf, Tree
from keras_strategies.keras_bridge.hooks.gather_rows import has_rows, note_rows
from keras_strategies.keras_bridge.step_context import StepContext

SUM = "sum"
"""Each replica's change is added."""
MEAN = "mean"
"""The replicas' changes are averaged: each was given its own share's mean."""
SAME = "same"
"""Every replica made the same change."""
IN_TURN = "in turn"
"""Every replica made the updates of all, one after the other."""
GLOBAL = "global batch"
"""No rule is right for sure: the step must see the global batch."""

_PARTS = (3, 5)
_verdicts: "weakref.WeakKeyDictionary[keras.metrics.Metric, bool]"
_verdicts = weakref.WeakKeyDictionary()


def rule_of_update(
    metric: keras.metrics.Metric,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    rows: int,
) -> str:
    """The rule for one call of `metric.update_state`, from its arguments.

    Args:
      metric: The metric.
      args: What it is updated with.
      kwargs: The same, by name.
      rows: Rows of a replica's batch.
    """
    arrays = _arrays((args, kwargs))
    if not arrays:
        # Constants of the program are the same on every replica.
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
    # Weighted with its rows, a replica's mean adds to a sum over rows.
    return SUM if _is_number(weight) and weight == rows else MEAN


def rule_of_local_update(
    metric: keras.metrics.Metric, args: Sequence[Any], kwargs: dict[str, Any]
) -> str:
    """The rule for an update in a user's own replica function.

    As in tf.distribute a replica adds what it likes, and all is added up. A
    metric that is not a sum of its updates sees the entries of all replicas.
    """
    if _is_keras_own(metric):
        return SUM
    if rank((args, kwargs)):
        return SUM if _is_additive(metric, args, kwargs) else SAME
    is_sum = _in_own_thread(lambda: _adds_the_same(metric, args, kwargs))
    return SUM if is_sum else IN_TURN


def title(metric: keras.metrics.Metric) -> str:
    """A metric's name and class, for messages."""
    return f"metric {metric.name!r} ({type(metric).__name__})"


def note_sizes(
    step: StepContext,
    metric: keras.metrics.Metric,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Notes what `rule_of_update` took for rows, for a probe to confirm."""
    leaves, rows = tree.flatten((args, kwargs)), step.facts.rows
    of = title(metric)
    note_rows(step, leaves, of)
    arrays = _arrays(leaves)
    may_count = bool(arrays) and not any(has_rows(a, rows) for a in arrays)
    for leaf in filter(_is_number, leaves):
        step.took_for_rows(leaf, may_count and leaf == rows, of)


def _is_number(value: object) -> bool:
    """Whether a value is a Python number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _arrays(nest: Tree) -> list[Any]:
    return list(filter(_is_array, tree.flatten(nest)))


def _is_keras_own(metric: keras.metrics.Metric) -> bool:
    if not _is_from_keras(type(metric)):
        return False
    if isinstance(metric, keras.metrics.MeanMetricWrapper):
        fn = metric._fn
        # A Loss object reduces over its rows itself.
        return _is_from_keras(fn) and not isinstance(fn, keras.losses.Loss)
    return True


def rank(arrays: Tree) -> int:
    """The largest number of dimensions in a nest of arrays."""
    return max((len(a.shape) for a in _arrays(arrays)), default=0)


def _is_from_keras(thing: object) -> bool:
    if not hasattr(thing, "__name__"):
        thing = type(thing)
    module = getattr(thing, "__module__", "") or ""
    return module.split(".")[0] == "keras"


def mixes_rows(loss: object, ndim: int) -> bool:
    """Whether the value of a loss or metric for one row depends on others.

    True for Keras's Dice, Tversky and Circle, for its hinge losses (they look
    at all labels to tell 0/1 from -1/1), for what reduces over the axis of
    the rows (any function of Keras's does, of arrays that have no other),
    and for what was marked by `keras_strategies.global_batch_loss`.

    Args:
      loss: A loss or metric, an object or a function.
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
    if mixes_rows(metric, rank((args, kwargs))):
        return False
    if _is_keras_own(metric):
        return True
    verdict = _verdicts.get(metric)
    if verdict is None:
        verdict = _try_out(metric, args, kwargs)
        _verdicts[metric] = verdict
        if not verdict and not isinstance(
            metric, keras.metrics.MeanMetricWrapper
        ):
            warnings.warn(
                f"Metric {metric.name!r} ({type(metric).__name__}) is not a "
                "sum over rows: updating it with two halves of a batch is "
                "not updating it with the whole. It is evaluated on the "
                "gathered rows of all replicas, which is exact and costs one "
                "gather of y and y_pred a step.",
                UserWarning,
                stacklevel=2,
            )
    return verdict


def _try_out(
    metric: keras.metrics.Metric, args: Sequence[Any], kwargs: dict[str, Any]
) -> bool:
    """Whether updates with parts of toy batches add up to the whole's."""
    batch = (tuple(args), dict(kwargs))
    rows = next(a.shape[0] for a in _arrays(batch) if len(a.shape))
    return _in_own_thread(lambda: _adds_up(metric, batch, rows))


def _in_own_thread(question: Callable[[], bool]) -> bool:
    """The answer, found where nothing is known of the trace under way."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(question)
    # It failed where the user's code met data it was not made for.
    return answer.exception() is None and answer.result()


def _adds_the_same(
    metric: keras.metrics.Metric, args: Sequence[Any], kwargs: dict[str, Any]
) -> bool:
    """Whether updates with scalars add what does not depend on the state."""
    random = np.random.default_rng(0)
    for toy in _TOYS:

        def scalar(like: Leaf, toy: _Toy = toy) -> Leaf:
            if not _is_array(like):
                return like
            value = random.uniform(toy.low, toy.high)
            return np.asarray(value).astype(like.dtype)

        state = _reset(metric)
        for _ in range(12):
            batch = tree.map_structure(scalar, (tuple(args), dict(kwargs)))
            first = _reset(metric)
            at_once = _updated(metric, first, batch)
            later = _updated(metric, state, batch)
            for a, f, x, s in zip(at_once, first, later, state, strict=True):
                added = np.subtract(a, f, dtype="float64")
                then = np.subtract(x, s, dtype="float64")
                if not np.allclose(added, then, rtol=1e-3, atol=1e-4):
                    return False
            state = later
    return True


def _adds_up(metric: keras.metrics.Metric, like: Tree, rows: int) -> bool:
    """Whether toy batches of some kind show a sum, and none the contrary."""
    found: list[bool | None] = []
    error: Exception | None = None
    for toy in _TOYS:
        try:
            found.append(_adds_up_on(toy, metric, like, rows))
        except Exception as e:  # Data that the user's code was not made for.
            error = e
    if not found and error is not None:
        raise error
    return any(found) and False not in found


def _adds_up_on(
    toy: "_Toy", metric: keras.metrics.Metric, like: Tree, rows: int
) -> bool | None:
    """As `_adds_up`, of one kind of toy data; None where nothing shows."""
    state = _reset(metric)
    random = np.random.default_rng(0)
    found = None
    for _ in range(2):
        batch = tree.map_structure(
            lambda a: _toy(a, rows, toy, random) if _is_array(a) else a, like
        )
        whole = _updated(metric, state, batch)
        merged = [np.array(s) for s in state]
        start = 0
        for size in _PARTS:
            part = _take(batch, slice(start, start + size))
            changed = _updated(metric, state, part)
            merged = [
                m + (c - s)
                for m, c, s in zip(merged, changed, state, strict=True)
            ]
            start += size
        for m, w, s in zip(merged, whole, state, strict=True):
            # An overflow or a logarithm of a negative number shows nothing.
            finite = np.isfinite(np.asarray(m, "float64")) & np.isfinite(w)
            if not np.allclose(m[finite], w[finite], rtol=1e-4, atol=1e-5):
                return False
            if not np.array_equal(w[finite], s[finite]):
                found = True
        state = whole
    return found


def _reset(metric: keras.metrics.Metric) -> list[np.ndarray]:
    return [np.asarray(v) for v in metric.stateless_reset_state()]


def _updated(
    metric: keras.metrics.Metric,
    state: list[np.ndarray],
    batch: Tree,
) -> list[np.ndarray]:
    args, kwargs = batch
    new = metric.stateless_update_state(state, *args, **kwargs)
    return [np.asarray(v) for v in new]


class _Toy(NamedTuple):
    """Ranges of toy data: what a metric counts may show in one only."""

    low: float
    high: float
    largest_int: int


_TOYS = (_Toy(0.05, 0.95, 1), _Toy(-3.0, 3.0, 9), _Toy(-200.0, 200.0, 99))


def _toy(
    like: Array, rows: int, toy: _Toy, random: np.random.Generator
) -> np.ndarray:
    if not like.shape:
        return np.ones((), like.dtype)
    if like.shape[0] != rows:
        raise ValueError("An argument without rows cannot be divided.")
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
