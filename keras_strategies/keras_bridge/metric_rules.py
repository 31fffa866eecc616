"""How a metric that each replica updates with its own rows becomes one.

Most metrics are sums over rows: what the replicas added is added up. A metric
that is not (a maximum, a last value, a mean of a function that mixes rows)
is updated on every replica with the rows of all of them. Which it is, is
known for Keras's own metrics and tried out once for a user's.
"""

import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np
from keras import tree

SUM = "sum"
"""Each replica's change is added."""
MEAN = "mean"
"""The replicas' changes are averaged: each was told its own share's mean."""
SAME = "same"
"""Every replica made the same change."""

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
    arrays = [a for a in tree.flatten((args, kwargs)) if _is_array(a)]
    if not arrays:
        # Constants of the program: every replica is told the same.
        return SAME
    if any(has_rows(a, rows) for a in arrays):
        return SUM if _is_additive(metric, args, kwargs) else SAME
    weight = kwargs.get("sample_weight", args[1] if len(args) > 1 else None)
    is_sum = isinstance(metric, keras.metrics.Mean | keras.metrics.Sum)
    if is_sum and _is_keras_own(metric):
        return MEAN if weight is None else SUM
    return SAME


def has_rows(value: Any, rows: int) -> bool:
    """Whether an array has entries for each of `rows` rows."""
    shape = getattr(value, "shape", ())
    return len(shape) > 0 and shape[0] % rows == 0


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_keras_own(metric: keras.metrics.Metric) -> bool:
    if not _is_from_keras(type(metric)):
        return False
    if isinstance(metric, keras.metrics.MeanMetricWrapper):
        fn = metric._fn
        # A Loss object reduces over its rows itself.
        return (
            _is_from_keras(fn)
            and not isinstance(fn, keras.losses.Loss)
            and not mixes_rows(fn)
        )
    return True


def _is_from_keras(thing: Any) -> bool:
    if not hasattr(thing, "__name__"):
        thing = type(thing)
    module = getattr(thing, "__module__", "") or ""
    return module.split(".")[0] == "keras"


def mixes_rows(loss: Any) -> bool:
    """Whether a loss's value for one row depends on other rows.

    True for Keras's Dice, Tversky and Circle, as classes or functions, and
    for what was marked by `keras_strategies.global_batch_loss`.
    """
    candidates = [loss, getattr(loss, "fn", None)]
    return any(
        getattr(c, "_ks_global_batch", False)
        or isinstance(c, _ROW_MIXING_CLASSES)
        or c in _ROW_MIXING_FUNCTIONS
        for c in candidates
        if c is not None
    )


_ROW_MIXING_CLASSES = (
    keras.losses.Dice,
    keras.losses.Tversky,
    keras.losses.Circle,
)
_ROW_MIXING_FUNCTIONS = (
    keras.losses.dice,
    keras.losses.tversky,
    keras.losses.circle,
)


def _is_additive(
    metric: keras.metrics.Metric, args: Sequence[Any], kwargs: dict[str, Any]
) -> bool:
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
    rows = next(
        a.shape[0]
        for a in tree.flatten((args, kwargs))
        if _is_array(a) and len(a.shape)
    )
    shapes = tree.map_structure(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype) if _is_array(a) else a,
        (tuple(args), dict(kwargs)),
    )
    answer: list[bool] = []

    def try_out() -> None:
        try:
            answer.append(_adds_up(metric, shapes, rows))
        except Exception:  # The user's code met data it was not made for.
            answer.append(False)

    # A thread of its own: it knows nothing of the trace that is under way.
    thread = threading.Thread(target=try_out)
    thread.start()
    thread.join()
    return answer[0]


def _adds_up(metric: keras.metrics.Metric, shapes: Any, rows: int) -> bool:
    state = [np.asarray(v) for v in metric.stateless_reset_state()]
    random = np.random.default_rng(0)
    for _ in range(2):
        batch = tree.map_structure(
            lambda a: _toy(a, rows, random) if _is_struct(a) else a, shapes
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
        for m, w in zip(merged, whole, strict=True):
            if not np.allclose(m, w, rtol=1e-4, atol=1e-5):
                return False
        state = whole
    return True


def _updated(
    metric: keras.metrics.Metric, state: list[np.ndarray], batch: Any
) -> list[np.ndarray]:
    args, kwargs = batch
    new = metric.stateless_update_state(state, *args, **kwargs)
    return [np.asarray(v) for v in new]


def _is_struct(value: Any) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct)


def _toy(
    struct: jax.ShapeDtypeStruct, rows: int, random: np.random.Generator
) -> np.ndarray:
    if not struct.shape:
        return np.ones((), struct.dtype)
    if struct.shape[0] != rows:
        raise ValueError("An argument without rows cannot be divided.")
    shape = (sum(_PARTS), *struct.shape[1:])
    if np.issubdtype(struct.dtype, np.integer):
        return random.integers(0, 2, shape).astype(struct.dtype)
    values = random.uniform(0.05, 0.95, shape)
    if struct.dtype == bool:
        return values > 0.5
    return values.astype(struct.dtype)


def _take(batch: Any, part: slice) -> Any:
    return tree.map_structure(
        lambda a: a[part] if isinstance(a, np.ndarray) and a.ndim else a,
        batch,
    )
