"""What abstract models rely on in Keras: abstract_variables.py."""

import inspect

import jax
import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

VERSION = tuple(map(int, keras.__version__.split(".")[:2]))


class Watched(keras.Variable):
    """Notes by which methods it gets its value, and who reads it."""

    def __init__(self, *args, **kwargs):
        self.calls = []
        super().__init__(*args, **kwargs)

    def _initialize(self, value):
        self.calls.append("_initialize")
        super()._initialize(value)

    def _initialize_layout(self):
        self.calls.append("_initialize_layout")
        super()._initialize_layout()

    def _initialize_with_initializer(self, initializer):
        assert self._shape == (2, 3), "_shape"
        assert self._dtype == "float32", "_dtype"
        assert self._value is None if hasattr(self, "_value") else True
        self.calls.append("_initialize_with_initializer")
        super()._initialize_with_initializer(initializer)

    def _deferred_initialize(self):
        self.calls.append("_deferred_initialize")
        super()._deferred_initialize()


def test_a_variable_is_given_its_value_by_these_methods():
    made = Watched("zeros", shape=(2, 3))
    assert made.calls[0] == "_initialize_with_initializer"
    assert "_initialize_layout" in made.calls
    given = Watched(np.zeros((2, 3), "float32"))
    assert given.calls == ["_initialize", "_initialize_layout"]
    with keras.StatelessScope():
        later = Watched("zeros", shape=(2, 3))
        assert later.calls == []
    assert later.calls[0] == "_deferred_initialize"


def test_a_constructor_checks_the_shape_of_its_value_last():
    class Noting(keras.Variable):
        seen = ()

        def _validate_shape(self, shape):
            self.seen = (*self.seen, getattr(self, "_value", None) is not None)
            return super()._validate_shape(shape)

    # In `_initialize`, which an abstract variable does not call, and after it.
    assert Noting(np.zeros(2)).seen == (False, True)


def test_an_assigned_value_goes_through_direct_assign():
    class Noting(keras.Variable):
        seen = ()

        def _direct_assign(self, value):
            self.seen = (*self.seen, value.shape)

    variable = keras.Variable("zeros", shape=(2,))
    variable.__class__ = Noting
    variable.assign(np.ones(2))
    with keras.StatelessScope():
        variable.assign(np.ones(2))
    assert variable.seen == ((2,),)


def test_a_variable_of_another_class_reads_its_value_by_the_property():
    class Other(keras.Variable):
        reads = 0

        @property
        def value(self):
            Other.reads += 1
            return self._maybe_autocast(self._convert_to_tensor(np.ones(2)))

    variable = keras.Variable("zeros", shape=(2,))
    variable.__class__ = Other
    reads = [
        lambda: np.asarray(variable),
        lambda: keras.ops.sum(variable),
        lambda: jax.numpy.array(variable),
        lambda: variable + 1,
        lambda: variable[0],
        lambda: variable.assign_add(np.ones(2)),
    ]
    for count, read in enumerate(reads, start=1):
        read()
        assert Other.reads == count


def test_shapes_are_inferred_in_a_symbolic_scope():
    seen = []

    class Layer(keras.layers.Layer):
        def call(self, x):
            seen.append((in_symbolic_scope(), get_stateless_scope() is None))
            return x

    layer = Layer()
    layer(keras.Input((3,)))
    assert seen[-1] == (True, False)
    layer(np.ones((1, 3)))
    assert seen[-1] == (False, True)
    layer.stateless_call([], [], np.ones((1, 3)))
    assert seen[-1] == (False, False)


def test_a_scope_answers_by_its_mapping_alone():
    variable = keras.Variable("zeros", shape=(2,))
    scope = keras.StatelessScope([(variable, np.ones(2, "float32"))])
    other = keras.Variable("zeros", shape=(2,))
    assert scope.get_current_value(other) is None
    assert scope.get_current_value(variable).shape == (2,)


def test_who_makes_a_variable_is_on_the_stack_of_names():
    makers = []

    class Layer(keras.layers.Layer):
        def build(self, shape):
            stack = global_state.get_global_attribute("name_scope_stack")
            makers.append(stack[-1].caller)

    layer = Layer()
    layer.build((1, 2))
    assert makers == [layer]


def test_a_model_is_built_by_these_methods_of_its_own():
    model = keras.Sequential([keras.layers.Dense(2)])
    # What sets attributes of the one model counts on both.
    assert "build" in vars(model)
    # Wrapped for each model, up to Keras 3.15 (keras#23345).
    assert ("quantize" in vars(model)) == (VERSION < (3, 16))
    calls = []

    def noting(name, own):
        def call(*args, **kwargs):
            calls.append(name)
            return own(*args, **kwargs)

        return call

    for name in ("build", "_maybe_build"):
        object.__setattr__(model, name, noting(name, getattr(model, name)))
    model(np.ones((1, 2)))
    assert calls[0] == "_maybe_build"
    parameters = inspect.signature(keras.Model.quantize).parameters
    assert list(parameters)[1:3] == ["mode", "config"]
