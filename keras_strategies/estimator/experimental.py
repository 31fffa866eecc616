"""Names of `tf.estimator.experimental`.

    hook = ks.estimator.experimental.stop_if_no_decrease_hook(
        estimator, "loss", max_steps_without_decrease=1000
    )
    estimator.train(input_fn, hooks=[hook])

A name is imported when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_strategies.estimator.early_stopping import (
        make_early_stopping_hook as make_early_stopping_hook,
    )
    from keras_strategies.estimator.early_stopping import (
        stop_if_higher_hook as stop_if_higher_hook,
    )
    from keras_strategies.estimator.early_stopping import (
        stop_if_lower_hook as stop_if_lower_hook,
    )
    from keras_strategies.estimator.early_stopping import (
        stop_if_no_decrease_hook as stop_if_no_decrease_hook,
    )
    from keras_strategies.estimator.early_stopping import (
        stop_if_no_increase_hook as stop_if_no_increase_hook,
    )
    from keras_strategies.estimator.in_memory import (
        InMemoryEvaluatorHook as InMemoryEvaluatorHook,
    )

_MODULES = {
    "InMemoryEvaluatorHook": "in_memory",
    "make_early_stopping_hook": "early_stopping",
    "stop_if_higher_hook": "early_stopping",
    "stop_if_lower_hook": "early_stopping",
    "stop_if_no_decrease_hook": "early_stopping",
    "stop_if_no_increase_hook": "early_stopping",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package = __name__.rpartition(".")[0]
    module = importlib.import_module(f"{package}.{_MODULES[name]}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
