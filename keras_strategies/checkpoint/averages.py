"""Averages of weights (`use_ema=True`) in the checkpoint of a fit.

Keras keeps them in the optimizer and gives them to the model when a fit ends.
"""

from collections.abc import Mapping

import keras

from keras_strategies.checkpoint.contents import Document
from keras_strategies.keras_bridge.callbacks.callback_states import (
    has_swapped_averages,
)

_WEIGHTS, _OPTIMIZER = "weights", "optimizer"
_SUFFIX = "_average"

Found = Mapping[str, Mapping[str, keras.Variable]]


def with_averages(found: Found, document: Document, where: str) -> Found:
    """Returns which array each variable gets: a weight its average.

    Args:
      found: The variables by group and name of the arrays.
      document: That of a fit's checkpoint.
      where: The checkpoint, for messages.

    Raises:
      ValueError: a weight has averages of several optimizers.
    """
    state = document["state"]
    if isinstance(state, dict) and has_swapped_averages(state.get("callbacks")):
        return found
    saved = document["variables"]
    slots: dict[str, list[str]] = {}
    for name in saved.get(_OPTIMIZER, {}):
        # "adam.dense_kernel_average", of the weight "dense.kernel".
        _, _, slot = name.partition(".")
        slots.setdefault(slot.replace(".", "_"), []).append(name)
    weights, averages = {}, {}
    for name, variable in found.get(_WEIGHTS, {}).items():
        path, mark, number = name.partition("~")
        slot = f"{path.replace('.', '_')}{_SUFFIX}{mark}{number}"
        named = slots.get(slot, ())
        if len(named) > 1:
            raise ValueError(
                "A weight must have the average of one optimizer. Received: "
                f"{where}, where {name!r} has {named}. Pass "
                "`averages=False` for the weights that were trained."
            )
        kind = saved[_WEIGHTS][name]
        if named and saved[_OPTIMIZER][named[0]] == kind:
            averages[named[0]] = variable
        else:
            weights[name] = variable
    return {**found, _WEIGHTS: weights, _OPTIMIZER: averages}
