"""Callbacks for `fit`, in addition to Keras's.

    checkpoint = ks.callbacks.Checkpoint("run")
    model.fit(x, y, callbacks=[checkpoint, ks.callbacks.Scalars("run")])

Each class is imported when it is first used.
"""

from keras_strategies.names.lazy_names import lazy_names as _lazy_names

_MODULES = {
    "Checkpoint": "callbacks.checkpoint",
    "RunReport": "reporting.run_report",
    "Scalars": "callbacks.scalars",
}

__getattr__, __dir__ = _lazy_names(__name__, "keras_strategies", _MODULES)
