"""Callbacks for `fit`, beside Keras's own.

    kept = ks.callbacks.Checkpoint("run")
    model.fit(x, y, callbacks=[kept, ks.callbacks.Scalars("run")])

A name is imported when it is first asked for.
"""

from typing import TYPE_CHECKING

from keras_strategies._core.lazy_names import lazy_names as _lazy_names

if TYPE_CHECKING:
    from keras_strategies.checkpoint.callback import Checkpoint as Checkpoint
    from keras_strategies.strategy.scalars import Scalars as Scalars

_MODULES = {"Checkpoint": "checkpoint.callback", "Scalars": "strategy.scalars"}

__getattr__, __dir__ = _lazy_names(__name__, "keras_strategies", _MODULES)
