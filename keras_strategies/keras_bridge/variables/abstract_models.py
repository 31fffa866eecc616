"""Models that are made without values, and given them later."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.keras_bridge.keras_names import TRAINER
from keras_strategies.keras_bridge.patches import Patches
from keras_strategies.keras_bridge.variables import initial_values
from keras_strategies.keras_bridge.variables.abstract_variables import (
    MAX_REAL_SIZE,
    creating,
    has_lost_value,
    is_abstract,
    is_creating_abstract,
    make_abstract,
    make_real,
    shapes_alone,
    slots_of,
)
from keras_strategies.keras_bridge.variables.variable_creator import (
    ReplicaDistribution,
    distribution_scope,
    slots_follow_weights,
)

_MARK = "_ks_abstract"
_BY_SHAPES = ("int8", "int4", "float8")
"""Quantizations whose shapes and dtypes depend on no value."""


@contextlib.contextmanager
def abstract() -> Iterator[None]:
    """Models and optimizers that are made in the block have no values.

    Their variables take no memory. `strategy.compile_step` and `compile_run`
    compile for them, so that a model that no machine here could hold is
    built in seconds, and measured for the slice that it is meant for.
    Shapes, dtypes, paths and layouts are those of the model as ever, and so is
    the program. A variable of up to 64 entries (a seed, a counter, a learning
    rate) has its value, and so has one that a layer assigns in its `build`
    without reading others, up to 1 MB, such as positions. The optimizer's
    slots, and variables that such a model makes later, have none. Holds for
    this thread.

    What needs values raises RuntimeError, which names the variable:
    `get_weights`, `set_weights`, `load_weights`, `save`, `fit`,
    `numpy.asarray(variable)`, a pretrained model; also a variable that a step
    reads and that is no part of its state. `strategy.materialize(model)`
    gives the model its initial values. Not in tf.

    Example:
      ```python
      strategy = ks.MirroredStrategy()
      with strategy.scope(), ks.abstract():
          model = keras.Sequential(
              [keras.Input((1024,)), keras.layers.Dense(1024)]
          )
          model.compile("adam", "mse")
      rows = jax.ShapeDtypeStruct((64, 1024), "float32")
      print(strategy.compile_step(model, (rows, rows)))
      ```
    """
    with _patches.held(), slots_follow_weights(), creating(abstract=True):
        yield


def as_made(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """In which variables are created as a model's are: without values, if it
    was made in `abstract`."""
    return creating(abstract=hasattr(model, _MARK))


def materialize(
    model: keras.Model,
    variables: Sequence[keras.Variable],
    mesh: ReplicaMesh,
    distribution: ReplicaDistribution,
) -> None:
    """Gives the variables of an abstract model their initial values.

    Args:
      model: The model.
      variables: Its variables, those of its optimizer included.
      mesh: The replicas.
      distribution: Lays them out.

    Raises:
      ValueError: one was given a value that was not kept.
    """
    # Of an optimizer of a loop of one's own, too, which is no part of it.
    slots = [slot for variable in variables for slot in slots_of(variable)]
    found = {id(variable): variable for variable in (*variables, *slots)}
    waiting = list(filter(is_abstract, found.values()))
    lost = [v.path for v in waiting if has_lost_value(v)]
    if lost:
        raise ValueError(
            "An abstract model is given the values of its variables' "
            f"initializers. Received: {model.name!r}, of which {lost[:8]} were "
            "assigned others: of more than 1 MB, or made of values that are "
            "not there, as `quantize` does. Make it without `ks.abstract()`."
        )
    # A model in a model, too: what it makes from now on has values.
    for layer in model._flatten_layers():
        layer.__dict__.pop(_MARK, None)
    with distribution_scope(distribution), creating(abstract=False):
        for variable in waiting:
            initializer = initial_values.alike(make_real(variable), mesh)
            variable._layout = None
            variable._initialize_with_initializer(initializer)


def _building(
    model: keras.Model, build: Callable[..., None]
) -> Callable[..., None]:
    """A model's `build`, or what calls it, also after the block."""

    @functools.wraps(build)
    def build_as_made(*args: Any, **kwargs: Any) -> None:
        with as_made(model):
            build(*args, **kwargs)
        if not hasattr(model, _MARK):
            return
        for variable in model.variables:
            # In a trace Keras gives it a value only where that ends.
            is_waiting = variable._value is None and not is_abstract(variable)
            if is_waiting and math.prod(variable.shape) > MAX_REAL_SIZE:
                make_abstract(variable, variable._initializer)

    return build_as_made


def _quantizing(
    model: keras.Model, quantize: Callable[..., Any]
) -> Callable[..., Any]:
    """A model's `quantize`, by shapes and dtypes."""

    @functools.wraps(quantize)
    def quantize_as_made(
        mode: Any = None, config: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if not hasattr(model, _MARK):
            return quantize(mode, config, *args, **kwargs)
        name = mode if isinstance(mode, str) else getattr(config, "mode", mode)
        if name not in _BY_SHAPES:
            raise ValueError(
                "A model that was made in `ks.abstract()` has no values to "
                f"calibrate by. Received: quantize({name!r}) of "
                f"{model.name!r}. Choose one of {', '.join(_BY_SHAPES)}, or "
                "make it without `ks.abstract()`."
            )
        with shapes_alone():
            return quantize(mode, config, *args, **kwargs)

    return quantize_as_made


def _marking(original: Callable[..., None]) -> Callable[..., None]:
    """Marks the models of the block: what they make later has no values."""

    @functools.wraps(original)
    def init(model: keras.Model, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        if not is_creating_abstract():
            return
        of_model = {
            _MARK: True,
            "build": _building(model, model.build),
            "_maybe_build": _building(model, model._maybe_build),
            "quantize": _quantizing(model, model.quantize),
        }
        for name, value in of_model.items():
            object.__setattr__(model, name, value)

    return init


_patches = Patches(lambda: [(TRAINER, "__init__", _marking)])
