"""Moving averages of weights (`use_ema=True`) in the checkpoints of `fit`.

Keras stores the averages in the optimizer, and assigns them to the model's
weights when a fit ends.
"""

from collections.abc import Mapping

import keras

from keras_strategies.checkpoint.contents import Document
from keras_strategies.fit.callbacks.callback_states import (
    has_swapped_averages,
)

_WEIGHTS, _OPTIMIZER = "weights", "optimizer"
_SUFFIX = "_average"

NamedVariables = Mapping[str, Mapping[str, keras.Variable]]
"""Variables, by the group and name of their arrays in a checkpoint."""


def substitute_averages(
    variables: NamedVariables, document: Document, where: str
) -> NamedVariables:
    """Maps a checkpoint's moving averages, or else its weights, to variables.

    Args:
      variables: The variable to restore from each array, by the group and name
        of the array.
      document: The JSON document of a checkpoint of `fit`.
      where: The path of the checkpoint, for messages.

    Returns:
      Each variable, by the group and name of the array to restore it from: its
      moving average if the checkpoint has one, else its array in `variables`.

    Raises:
      ValueError: if several optimizers have averages of the same weight.
    """
    state = document["state"]
    if isinstance(state, dict) and has_swapped_averages(state.get("callbacks")):
        return variables
    saved = document["variables"]
    slots: dict[str, list[str]] = {}
    for name in saved.get(_OPTIMIZER, {}):
        # "adam.dense_kernel_average" is the average of "dense.kernel".
        _, _, slot = name.partition(".")
        slots.setdefault(slot.replace(".", "_"), []).append(name)
    weights, averages = {}, {}
    for name, variable in variables.get(_WEIGHTS, {}).items():
        path, mark, number = name.partition("~")
        slot = f"{path.replace('.', '_')}{_SUFFIX}{mark}{number}"
        matches = slots.get(slot, ())
        if len(matches) > 1:
            raise ValueError(
                "A weight must be averaged by at most one optimizer. "
                f"Received: {where}, where {name!r} has several averages: "
                f"{matches}. Pass `averages=False` to load the trained weights "
                "instead of averages."
            )
        kind = saved[_WEIGHTS][name]
        if matches and saved[_OPTIMIZER][matches[0]] == kind:
            averages[matches[0]] = variable
        else:
            weights[name] = variable
    return {**variables, _WEIGHTS: weights, _OPTIMIZER: averages}
