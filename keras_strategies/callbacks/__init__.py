"""Callbacks for `fit`, beside Keras's own.

    checkpoint = ks.callbacks.Checkpoint("run")
    model.fit(x, y, callbacks=[checkpoint, ks.callbacks.Scalars("run")])

A name is imported when it is first asked for.
"""

from keras_strategies._core.names.lazy_names import lazy_names as _lazy_names

_MODULES = {
    "Checkpoint": "callbacks.checkpoint",
    "Scalars": "callbacks.scalars",
}

__getattr__, __dir__ = _lazy_names(__name__, "keras_strategies", _MODULES)
