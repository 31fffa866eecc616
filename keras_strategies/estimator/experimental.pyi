"""The public names, for type checkers; `./run names` writes them."""

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
