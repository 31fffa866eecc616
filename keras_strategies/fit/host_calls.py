"""Calls of a bound model's loops by Keras itself, on the host.

A planned script may call `predict` or `evaluate` before it trains. The devices
of its strategy are absent, so Keras runs the call on this machine.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from keras_strategies.fit.binding import Binding
from keras_strategies.fit.loop_call import Call
from keras_strategies.keras_bridge import keras_names
from keras_strategies.spmd.attributes import temporary_attribute
from keras_strategies.variables.variable_creator import (
    distribution_scope,
)


def run_on_host(binding: Binding, call: Call) -> Any:
    """Runs `evaluate`, `predict` or one of their `*_on_batch` forms by Keras.

    Args:
      binding: The model's binding.
      call: The call, whose data are arrays.

    Returns:
      The method's result: logs or outputs.
    """
    if call.name.startswith("predict"):
        binding._build_for_call([(0, 0, [(call["x"],)])])
    else:
        batch = (call["x"], call["y"], call["sample_weight"])
        binding._build(data_batch=batch)
    with (
        _keras_methods(binding),
        distribution_scope(None),
        # It would raise in the strategy's scope: the devices are absent.
        temporary_attribute(binding, "check_context", lambda: None),
    ):
        return call.run()


@contextlib.contextmanager
def _keras_methods(binding: Binding) -> Iterator[None]:
    """Gives a bound model Keras's step functions while the block runs."""
    functions, attributes = binding._functions, binding.model.__dict__
    names = (*functions.makers(), "_symbolic_build", keras_names.MAYBE_BUILD)
    bound = {n: attributes.pop(n) for n in names if n in attributes}
    functions.reset()
    try:
        yield
    finally:
        attributes.update(bound)
        functions.reset()
