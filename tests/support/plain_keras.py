"""Doing one thing with plain Keras on one device and with a strategy."""

import contextlib
import random

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.fit.binding import find_binding
from keras_strategies.keras_bridge.keras_names import SUPER_BATCHES
from keras_strategies.testing import assert_replicated

no_data_left = pytest.mark.filterwarnings(
    "ignore:Your input ran out of data:UserWarning"
)
no_shuffle = pytest.mark.filterwarnings(
    "ignore:.shuffle=True. was passed:UserWarning"
)


def mirrored(replicas):
    """A strategy over the first devices."""
    return ks.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])


def dense(units=1, *, seed=1, **kwargs):
    """A layer whose weights are the same each time it is built."""
    kernel = keras.initializers.GlorotUniform(seed=seed)
    return keras.layers.Dense(units, kernel_initializer=kernel, **kwargs)


_pairs = {}


def run_both(build, act, *, replicas=2, is_fresh=False, **compile_args):
    """Does `act(model)` with a plain model and with a distributed one.

    The two models are kept for the next call with the same arguments, and
    set back to their first weights then: compiling is what costs time.

    Args:
      build: Makes the model; the weights must come out the same each time.
      act: What is done; returns a nest of numbers and arrays.
      replicas: Number of replicas of the strategy.
      is_fresh: Whether models of this call's own are wanted.
      **compile_args: Passed to `compile`; what is callable is called first.

    Returns:
      For each of the two: what `act` returned, and the weights.
    """
    values = sorted((k, id(v)) for k, v in compile_args.items())
    key = (build, replicas, *values)
    pair = None if is_fresh else _pairs.get(key)
    if pair is None:
        strategies = (None, mirrored(replicas))
        pair = [_make(build, s, compile_args) for s in strategies]
        if not is_fresh:
            # The arguments are held too, so that their ids stay theirs.
            _pairs[key] = pair = (*pair, compile_args)
    results = []
    for model, first in pair[:2]:
        for variable, value in first:
            variable.assign(value)
        np.random.seed(7)
        random.seed(7)
        result = act(model)
        results.append((result, model.get_weights()))
    assert_replicated(pair[1][0])
    return results


def _make(build, strategy, compile_args):
    """A compiled model, and the first values of its variables."""
    scope = strategy.scope() if strategy else contextlib.nullcontext()
    with scope:
        model = build()
        if compile_args:
            arguments = {
                key: value() if callable(value) else value
                for key, value in compile_args.items()
            }
            model.compile(**arguments)
        elif strategy:
            strategy.attach(model)
        variables = list(model.variables)
        if model.built and compile_args:
            model.optimizer.build(model.trainable_variables)
            variables += model.optimizer.variables
    return model, [(v, np.array(v.value)) for v in variables]


_FUNCTIONS = ("train_function", "test_function", "predict_function")


def on_batch(model, name, *data):
    """Calls `model.train_on_batch`, or another one of that kind, by name.

    With several steps an execution plain Keras 3.16 takes the rows of the
    batch for steps (docs/versions.md): it does it with one.
    """
    act = getattr(model, name)
    steps = model.steps_per_execution
    if steps == 1 or not SUPER_BATCHES or find_binding(model) is not None:
        return act(*data)
    made = {function: getattr(model, function) for function in _FUNCTIONS}
    one = dict.fromkeys(_FUNCTIONS) | {"steps_per_execution": 1}
    try:
        for key, value in one.items():
            setattr(model, key, value)
        return act(*data)
    finally:
        for key, value in (made | {"steps_per_execution": steps}).items():
            setattr(model, key, value)


def assert_same(plain, ours, *, tolerance=1e-5):
    """Asserts that two nests hold the same shapes, types and numbers."""
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    paths = jax.tree_util.tree_leaves_with_path(ours)
    leaves = jax.tree.leaves(plain)
    for (path, one), other in zip(paths, leaves, strict=True):
        name = jax.tree_util.keystr(path)
        assert np.shape(one) == np.shape(other), name
        if hasattr(other, "dtype"):
            assert one.dtype == other.dtype, name
        np.testing.assert_allclose(
            np.asarray(one, "float64"),
            np.asarray(other, "float64"),
            rtol=tolerance,
            atol=tolerance,
            err_msg=name,
        )


def check_same(build, act, **kwargs):
    """Asserts that plain Keras and a strategy do the same."""
    plain, ours = run_both(build, act, **kwargs)
    assert_same(plain, ours)
    return ours
