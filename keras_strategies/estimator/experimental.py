"""The public names that correspond to `tf.estimator.experimental`.

    hook = ks.estimator.experimental.stop_if_no_decrease_hook(
        estimator, "loss", max_steps_without_decrease=1000
    )
    estimator.train(input_fn, hooks=[hook])

Each name is imported when it is first used.
"""

from keras_strategies.names.lazy_names import lazy_names as _lazy_names

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
