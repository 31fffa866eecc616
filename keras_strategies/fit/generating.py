"""Checks that processes that share weights compute from the same values.

JAX assumes that arrays on the host are equal in all processes. Outside of `fit`
and `run`, they are the arguments of layers that are called eagerly, and of
keras-hub's `generate`, which calls a compiled function.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
from jax.core import Tracer

from keras_strategies._types import Tree
from keras_strategies.fit.inputs.agree_source import check_same_values
from keras_strategies.keras_bridge.patches import Patches
from keras_strategies.passes.traces import is_tracing
from keras_strategies.spmd.host_arrays import holds_numbers
from keras_strategies.spmd.identity import temporary_attribute
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.variables.shardings import get_placement

_SYMBOLS: Any = Tracer, keras.KerasTensor
_MAKER = "make_generate_function"


def find_maker(model: keras.Model, mesh: ReplicaMesh) -> dict[str, Any]:
    """Returns a replacement for a method of keras-hub's tasks, by its name.

    Args:
      model: The model. The result is empty if it has no such method.
      mesh: The mesh of its strategy's replicas. The result is empty if they
        are in one process.
    """
    if mesh.num_processes == 1 or not hasattr(type(model), _MAKER):
        return {}
    return {_MAKER: functools.partial(_make, model)}


def _make(model: Any) -> Callable[..., Any]:
    generate = getattr(type(model), _MAKER)(model)

    @functools.wraps(generate)
    def check_and_generate(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        sampler = getattr(model, "sampler", None)
        seeds = [v.value for v in getattr(sampler, "variables", ())]
        _check(model, "generate", (inputs, seeds))
        return generate(inputs, *args, **kwargs)

    return check_and_generate


def check_calls(owner: object) -> None:
    """Makes processes compare arguments of layers that they call eagerly.

    Args:
      owner: The object with whose lifetime that ends.
    """
    held = contextlib.ExitStack()
    held.enter_context(_patches.hold())
    weakref.finalize(owner, held.close)


def _wrap_call(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(layer: keras.Layer, *args: Tree, **kwargs: Tree) -> Any:
        leaves = jax.tree.leaves((args, kwargs))
        is_traced = any(isinstance(leaf, _SYMBOLS) for leaf in leaves)
        if _thread.is_checked or is_traced or is_tracing():
            return original(layer, *args, **kwargs)
        local = [leaf for leaf in leaves if _is_local(leaf)]
        name = f"a call of the layer {layer.name!r}"
        is_checked = bool(local) and _check(layer, name, local)
        with temporary_attribute(_thread, "is_checked", is_checked):
            return original(layer, *args, **kwargs)

    return call


def _is_local(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array):
        return leaf.is_fully_addressable or leaf.is_fully_replicated
    return holds_numbers(np.asarray(leaf))


def _check(layer: keras.Layer, name: str, values: Tree) -> bool:
    """Raises ValueError in all processes if their values differ.

    Returns:
      Whether the values were compared. If all weights are replicated, each
      process computes by itself.
    """
    for variable in layer.variables:
        value, placement = variable._value, get_placement(variable)
        is_local = getattr(value, "is_fully_addressable", True)
        if placement and not (is_local or value.is_fully_replicated):
            check_same_values(placement.mesh, name, values, "variables")
            return True
    return False


class _Thread(threading.local):
    is_checked = False


_thread = _Thread()
_patches = Patches(lambda: [(keras.Layer, "__call__", _wrap_call)])
