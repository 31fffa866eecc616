"""Names of `tf.estimator.experimental`.

    hook = ks.estimator.experimental.stop_if_no_decrease_hook(
        estimator, "loss", max_steps_without_decrease=1000
    )
    estimator.train(input_fn, hooks=[hook])

A name is imported when it is first asked for.
"""

from typing import TYPE_CHECKING

from keras_strategies._core.names.lazy_names import lazy_names as _lazy_names

if TYPE_CHECKING:
    from keras_strategies.estimator.contrib.early_stopping import (
        make_early_stopping_hook as make_early_stopping_hook,
    )
    from keras_strategies.estimator.contrib.early_stopping import (
        stop_if_higher_hook as stop_if_higher_hook,
    )
    from keras_strategies.estimator.contrib.early_stopping import (
        stop_if_lower_hook as stop_if_lower_hook,
    )
    from keras_strategies.estimator.contrib.early_stopping import (
        stop_if_no_decrease_hook as stop_if_no_decrease_hook,
    )
    from keras_strategies.estimator.contrib.early_stopping import (
        stop_if_no_increase_hook as stop_if_no_increase_hook,
    )
    from keras_strategies.estimator.contrib.in_memory import (
        InMemoryEvaluatorHook as InMemoryEvaluatorHook,
    )

_MODULES = {
    "InMemoryEvaluatorHook": "contrib.in_memory",
    "make_early_stopping_hook": "contrib.early_stopping",
    "stop_if_higher_hook": "contrib.early_stopping",
    "stop_if_lower_hook": "contrib.early_stopping",
    "stop_if_no_decrease_hook": "contrib.early_stopping",
    "stop_if_no_increase_hook": "contrib.early_stopping",
}

__getattr__, __dir__ = _lazy_names(
    __name__, __name__.rpartition(".")[0], _MODULES
)
