"""Callbacks for `fit`, beside Keras's own.

    kept = ks.callbacks.Checkpoint("run")
    model.fit(x, y, callbacks=[kept, ks.callbacks.Scalars("run")])

A name is imported when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_strategies.checkpoint.callback import Checkpoint as Checkpoint
    from keras_strategies.strategy.scalars import Scalars as Scalars

_MODULES = {"Checkpoint": "checkpoint.callback", "Scalars": "strategy.scalars"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"keras_strategies.{_MODULES[name]}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
