"""Checks that processes that share weights generate from the same prompts.

keras-hub's `generate` calls a compiled function, in which JAX assumes that
arrays on the host are equal in all processes.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_strategies.fit.inputs.agree_source import check_same_values
from keras_strategies.spmd.mesh import ReplicaMesh

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
    return {_MAKER: functools.partial(_make, model, mesh)}


def _make(model: Any, mesh: ReplicaMesh) -> Callable[..., Any]:
    generate = getattr(type(model), _MAKER)(model)

    @functools.wraps(generate)
    def check_and_generate(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # If all weights are replicated, each process generates by itself.
        if not all(w.value.is_fully_replicated for w in model.variables):
            sampler = getattr(model, "sampler", None)
            seeds = [v.value for v in getattr(sampler, "variables", ())]
            check_same_values(mesh, "generate", (inputs, seeds), "variables")
        return generate(inputs, *args, **kwargs)

    return check_and_generate
