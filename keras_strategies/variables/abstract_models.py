"""Models that are created without values and may be initialized later."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_strategies.keras_bridge.keras_names import TRAINER
from keras_strategies.keras_bridge.patches import Patches, replacement
from keras_strategies.spmd.identity import IdentitySet
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.variables import initial_values
from keras_strategies.variables.abstract_variables import (
    MAX_REAL_SIZE,
    creating,
    is_abstract,
    is_creating_abstract,
    list_slots,
    make_abstract,
    make_real,
)
from keras_strategies.variables.variable_creator import (
    ReplicaDistribution,
    distribution_scope,
    slot_creation,
)

_MARK = "_ks_abstract"


@contextlib.contextmanager
def abstract() -> Iterator[None]:
    """Creates models and optimizers in the block without variable values.

    The variables of these models take no memory, and `strategy.compile_step`
    and `compile_run` accept the models. So a model that is too large for this
    machine can be built in seconds, and its memory on a TPU slice can be
    measured. Shapes, dtypes, paths, layouts and the program equal those of an
    ordinary model. A variable of up to 64 entries (a seed, a counter, a
    learning rate) does get its value. So does a variable that is created from a
    value, or to which a layer assigns a value in its `build` without reading
    other variables, such as positions. Optimizer slots, and variables that such
    a model creates after the block, have no values. Affects only this thread.

    Code that needs values, such as `get_weights`, `set_weights`,
    `load_weights`, `save`, `fit`, `numpy.asarray(variable)`, or code that loads
    a pretrained model, raises a RuntimeError that contains a variable's path. A
    step also raises it if it reads such a variable that is not in its state.
    `strategy.materialize(model)` initializes the variables. TensorFlow has no
    equivalent.

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
    with _patches.hold(), slot_creation.hold(), creating(abstract=True):
        yield


def creating_like(
    model: keras.Model,
) -> contextlib.AbstractContextManager[None]:
    """Creates variables in the block with values only if a model's have values.

    A model's variables have no values if it was created in an `abstract` scope.
    """
    return creating(abstract=hasattr(model, _MARK))


def materialize(
    model: keras.Model,
    variables: Sequence[keras.Variable],
    mesh: ReplicaMesh,
    distribution: ReplicaDistribution,
) -> None:
    """Initializes the variables of an abstract model.

    Args:
      model: The model.
      variables: The model's variables, including those of its optimizer.
      mesh: The mesh of the replicas.
      distribution: The distribution that places the variables.
    """
    # Includes the slots of a custom loop's optimizer, which are not variables
    # of the model.
    slots = [slot for variable in variables for slot in list_slots(variable)]
    waiting = list(filter(is_abstract, IdentitySet((*variables, *slots))))
    # Variables that the model and its nested models create from now on get
    # values.
    for layer in model._flatten_layers():
        layer.__dict__.pop(_MARK, None)
    with distribution_scope(distribution), creating(abstract=False):
        for variable in waiting:
            initializer = make_real(variable)
            kind = initial_values.name_initializer(initializer)
            noted = initial_values.note_existing(mesh, variable, kind)
            variable._layout = None
            variable._initialize_with_initializer(
                initial_values.make_chief_initializer(initializer, mesh, noted)
            )


def _wrap_build(
    model: keras.Model, build: Callable[..., None]
) -> Callable[..., None]:
    """Wraps `build` (or `_maybe_build`) so that it creates no values."""

    @functools.wraps(build)
    def build_like_model(*args: Any, **kwargs: Any) -> None:
        with creating_like(model):
            build(*args, **kwargs)
        if not hasattr(model, _MARK):
            return
        for variable in model.variables:
            # Otherwise, in a trace, Keras would initialize the variable when
            # the trace ends.
            is_waiting = variable._value is None and not is_abstract(variable)
            if is_waiting and math.prod(variable.shape) > MAX_REAL_SIZE:
                make_abstract(variable, variable._initializer)

    return build_like_model


@replacement
def _init(
    original: Callable[..., None], model: keras.Model, *args: Any, **kwargs: Any
) -> None:
    """Creates a model, and marks it if it is created without values."""
    original(model, *args, **kwargs)
    if not is_creating_abstract():
        return
    attributes = model.__dict__
    attributes[_MARK] = True
    attributes["build"] = _wrap_build(model, model.build)
    attributes["_maybe_build"] = _wrap_build(model, model._maybe_build)


_patches = Patches(lambda: [(TRAINER, "__init__", _init)])
