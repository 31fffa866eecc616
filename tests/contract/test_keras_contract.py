"""What keras_strategies relies on in Keras beyond its public names.

One test a hook. One that fails after an update of Keras names what to look
at in the rooms that may use `keras.src`.
"""

import ast
import importlib
import inspect
import pathlib
import re
import threading

import jax
import keras
import numpy as np
import pytest
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.name_scope import current_path
from keras.src.backend.common.tensor_attributes import (
    get_tensor_attr,
    set_tensor_attr,
)
from keras.src.backend.common.variables import Variable as KerasVariable
from keras.src.distribution.distribution_lib import Distribution
from keras.src.losses import loss as loss_module
from keras.src.metrics.reduction_metrics import MeanMetricWrapper
from keras.src.ops.function import Function
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.compile_utils import (
    CompileLoss,
    CompileMetrics,
    MetricsList,
)
from keras.src.trainers.data_adapters import (
    array_slicing,
    data_adapter_utils,
    get_data_adapter,
    is_grain_dataset,
    is_tf_dataset,
    is_torch_dataloader,
)
from keras.src.trainers.data_adapters.array_data_adapter import (
    ArrayDataAdapter,
    can_convert_arrays,
)
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import (
    GeneratorDataAdapter,
)
from keras.src.trainers.data_adapters.grain_dataset_adapter import (
    GrainDatasetAdapter,
)
from keras.src.trainers.data_adapters.py_dataset_adapter import (
    PyDataset,
    PyDatasetAdapter,
)
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.data_adapters.torch_data_loader_adapter import (
    TorchDataLoaderAdapter,
)
from keras.src.trainers.epoch_iterator import EpochIterator
from keras.src.utils import file_utils
from keras.src.utils.python_utils import pythonify_logs

from keras_strategies.fit import scope_hooks
from keras_strategies.hooks import metric_rules
from keras_strategies.keras_bridge.keras_names import (
    BUILDS_FIRST,
    MAYBE_BUILD,
    TRAINER,
    fresh_names,
)
from keras_strategies.spmd.identity import temporary_attribute
from tests.test_layers import BRIDGE

PACKAGE = pathlib.Path(__file__).parents[2] / "keras_strategies"
X = np.arange(12, dtype="float32").reshape(6, 2)
Y = X[:, :1]

RELIED_ON = {
    # Variables. Those without values: test_keras_abstract_contract.py.
    *("_initialize_layout", "_initialize_with_initializer"),
    *("_initializer", "_layout", "_value"),
    # Models. `train_function` and its like are public; this is their ending.
    *("_function", "_assert_compile_called"),
    *("_flatten_layers", "_functional", "_jax_state", "_jax_state_synced"),
    *("_loss_tracker", "_loss_ids", "_losses", "_losses_override"),
    *("_maybe_build", "_maybe_symbolic_build", "_nodes_by_depth"),
    *("_outputs_struct", "_run_through_graph"),
    *("_remat_mode", "_symbolic_build", "_use_cached_eval_dataset"),
    # Callbacks: tests/contract/test_callbacks_contract.py.
    *("_batches_seen_since_last_saving", "_ema_weights_in_model"),
    *("_global_test_batch", "_global_train_batch"),
    *("_last_batch_seen", "_total_batches_seen"),
    # Lists of callbacks, which call `_on_train_batch_end`, too.
    "_configure_async_dispatch",
    # Layers of attention: test_keras_attention_contract.py.
    "_compute_attention",
    # The LSTM of cuDNN: also there.
    "_is_gpu_available",
    # Layers, optimizers, metrics.
    *("_accumulated_gradients", "_get_variable_index"),
    *("_epoch", "_fn", "_fn_kwargs", "_inputs", "_iterations"),
    *("_learning_rate", "_moments", "_num_samples"),
    *("_reduction_axes", "_shuffle", "_trainable_variables"),
    # Heads of many words.
    "_compile_metrics",
    "_keras_history",
}
"""Private names of Keras, each with a test here or in another of this
directory's files of Keras."""


def model_of(*layers, loss="mse", **compile_args):
    model = keras.Sequential([keras.Input((2,)), *layers])
    model.compile("sgd", loss, **compile_args)
    return model


# Which private names there are.


def _find_modules():
    """Yields the modules of the rooms that may use `keras.src`."""
    for room in BRIDGE:
        yield from (PACKAGE / room).rglob("*.py")


def test_every_private_name_used_is_listed_here():
    used, own = set(), set()
    plans = PACKAGE / "planning" / "compile"
    for path in [*_find_modules(), plans / "fit_step.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                is_self = isinstance(node.value, ast.Name) and (
                    node.value.id == "self"
                )
                (own if is_self else used).add(node.attr)
            elif isinstance(node, ast.FunctionDef):
                own.add(node.name)
            elif isinstance(node, ast.Constant):
                used.add(str(node.value))
    used = {n for n in used if re.fullmatch(r"_[a-z][a-z_]*", n)}
    # A method of named tuples, and one of this package's strategies.
    own |= {"_replace", "_get_binding"}
    unlisted = {n for n in used - own - RELIED_ON if n[:3] != "_ks"}
    assert unlisted == set(), "write a contract test and list it above"
    assert used >= RELIED_ON, "listed above, and not used any more"


def test_every_module_imported_from_keras_src_is_imported_here():
    def imported(path):
        return {
            (node.module, alias.name)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("keras.src")
            for alias in node.names
        }

    used = set().union(*map(imported, _find_modules()))
    here = pathlib.Path(__file__).parent.glob("test_keras_*.py")
    assert used - set().union(*map(imported, here)) == set()


# State of a thread: debug_run.py, on_read.py.


def test_names_are_counted_in_the_global_state():
    with fresh_names():
        assert keras.layers.Dense(1).name == "dense"
        assert keras.layers.Dense(1).name == "dense_1"
        with fresh_names():
            assert keras.layers.Dense(1).name == "dense"
        assert keras.layers.Dense(1).name == "dense_2"


def test_data_that_end_before_their_steps_do_warn_in_known_words():
    """`keras_strategies.estimator.engine` leaves that warning out."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="^Your input ran out of data"):
        model.fit(
            np.zeros((2, 1)), np.zeros((2, 1)), steps_per_epoch=3, verbose=0
        )


def test_the_current_path_is_the_prefix_of_a_variables_path():
    with keras.name_scope("outer"), keras.name_scope("inner"):
        assert current_path() == "outer/inner"
        variable = keras.Variable(0.0, name="one")
    assert variable.path == "outer/inner/one"


def test_what_is_open_in_a_thread_is_kept_in_its_global_state():
    tracker = global_state.GLOBAL_STATE_TRACKER
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        kept = dict(vars(tracker))
    finally:
        keras.config.set_dtype_policy(before)
    seen = []

    def look():
        assert keras.config.dtype_policy().name == "float32"
        vars(tracker).update(kept)
        seen.append(keras.config.dtype_policy().name)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == ["mixed_bfloat16"]
    assert keras.config.dtype_policy() is before


def test_a_metric_is_the_caller_of_the_scope_that_it_makes_variables_in():
    callers = []

    def creator(shape, dtype):
        stack = global_state.get_global_attribute("name_scope_stack")
        callers.append(stack[-1].caller if stack else None)
        return keras.ops.zeros(shape, dtype)

    keras.Variable(creator, shape=())
    metric = keras.metrics.Sum()
    variable = metric.add_variable((), creator)
    assert callers == [None, metric]
    assert variable.synchronization == "on_read"
    assert variable.aggregation == "sum"


def test_a_variable_made_in_a_stateless_scope_waits_for_its_value():
    with keras.StatelessScope():
        variable = keras.Variable(
            lambda shape, dtype: keras.ops.ones(shape, dtype), shape=()
        )
        assert variable._value is None, "_value"
        value = variable._initializer(variable.shape, dtype=variable.dtype)
        assert float(value) == 1.0, "_initializer"
    assert float(variable._value) == 1.0


# Distribution and variables: variable_creator.py.


class Recording(Distribution):
    """Answers as ours does, and notes who asked."""

    def __init__(self):
        mesh = keras.distribution.DeviceMesh(
            (2,), ["replica"], devices=["cpu:0", "cpu:1"]
        )
        super().__init__(
            mesh, batch_dim_name="replica", auto_shard_dataset=False
        )
        self.sharding = jax.sharding.NamedSharding(
            mesh.backend_mesh, jax.sharding.PartitionSpec()
        )
        self.asked = []

    def get_variable_layout(self, variable):
        self.asked.append(variable)
        return self.sharding

    def get_tensor_layout(self, path):
        return None


@pytest.fixture
def recording():
    distribution = Recording()
    keras.distribution.set_distribution(distribution)
    yield distribution
    keras.distribution.set_distribution(None)


@pytest.mark.parametrize("kind", ["weight", "statistic", "metric", "seed"])
def test_distribution_is_asked_for_the_layout_of_every_variable(
    recording, kind
):
    layer = keras.layers.BatchNormalization()
    layer.build((None, 2))
    variable = {
        "weight": layer.gamma,
        "statistic": layer.moving_mean,
        "metric": keras.metrics.Mean().variables[0],
        "seed": keras.random.SeedGenerator(1).state,
    }[kind]
    assert any(v is variable for v in recording.asked), "get_variable_layout"
    assert variable._layout is recording.sharding, "_layout"
    assert len(variable.value.sharding.device_set) == 2


def test_slots_take_the_layout_of_their_weight_without_asking(recording):
    weight = keras.Variable([1.0, 2.0])
    recording.asked.clear()
    optimizer = keras.optimizers.Adam()
    optimizer.build([weight])
    slots = [v for v in optimizer.variables if v.shape == (2,)]
    assert len(slots) == 2
    for slot in slots:
        assert slot._layout is recording.sharding, "_layout of a slot"
        assert not any(v is slot for v in recording.asked)


def test_slots_are_made_by_add_variable_from_reference(monkeypatch):
    made = []
    name = "add_variable_from_reference"
    original = getattr(BaseOptimizer, name)

    def noting(*args, **kwargs):
        made.append(original(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(BaseOptimizer, name, noting)
    optimizer = keras.optimizers.Adam(use_ema=True)
    optimizer.build([keras.Variable([1.0, 2.0])])
    slots = [v for v in optimizer.variables if v.shape == (2,)]
    assert {id(v) for v in made} == {id(v) for v in slots}


def test_assigned_value_goes_where_the_layout_says(recording):
    keras.distribution.set_distribution(None)
    variable = keras.Variable([1.0, 2.0])
    assert variable._layout is None, "_layout"
    variable._layout = recording.sharding
    variable.assign([3.0, 4.0])
    assert variable.value.sharding == recording.sharding
    value = variable.value
    variable.assign(value)
    assert variable._value is value, "an array in place is taken as it is"


def test_value_of_a_variable_is_its_private_value():
    variable = keras.Variable([1.0])
    array = jax.numpy.asarray([2.0])
    variable._value = array
    assert variable.value is array, "_value"


def test_distribution_of_a_thread_is_its_own(recording):
    seen = []
    thread = threading.Thread(
        target=lambda: seen.append(keras.distribution.distribution())
    )
    thread.start()
    thread.join()
    assert seen == [None], "keras.distribution.distribution"
    assert keras.distribution.distribution() is recording


def test_seed_variable_is_known_by_name_shape_and_dtype():
    generator = keras.random.SeedGenerator(5)
    state = generator.state
    assert state.name == "seed_generator_state"
    assert tuple(state.shape) == (2,)
    assert "uint32" in str(state.dtype)
    generator.next()
    generator.next()
    # The stream's seed, and how many draws were made.
    np.testing.assert_array_equal(state.numpy(), [5, 2])
    dropout = keras.layers.Dropout(0.5)
    assert dropout.seed_generator.state.name == "seed_generator_state"


def test_all_random_numbers_have_a_key_of_two_numbers_from_one_function(
    monkeypatch,
):
    module = importlib.import_module("keras.src.backend.jax.random")
    drawn, draw = [], module.jax_draw_seed
    monkeypatch.setattr(
        module,
        "jax_draw_seed",
        lambda seed: drawn.append(draw(seed)) or drawn[-1],
    )
    keras.random.normal((2,), seed=keras.random.SeedGenerator(1))
    keras.random.uniform((2,), seed=3)
    keras.layers.Dropout(0.5)(np.ones((1, 2), "float32"), training=True)
    assert [(x.shape, str(x.dtype)) for x in drawn] == [((2,), "uint32")] * 3


def test_metric_variables_say_what_others_do_not():
    layer = keras.layers.Layer()
    free = layer.add_weight(shape=())
    assert free.aggregation not in ("sum", "only_first_replica")
    optimizer = keras.optimizers.SGD()
    assert optimizer.iterations.aggregation == "only_first_replica"


def test_variable_init_has_named_arguments():
    parameters = inspect.signature(keras.Variable.__init__).parameters
    assert {"initializer", "shape", "dtype", "trainable", "name"} <= set(
        parameters
    ), "keras.Variable.__init__, wrapped by variable_creator_scope"


# The trainer: binding.py, step_functions.py.


def test_compile_comes_from_the_trainer():
    assert keras.Model.compile is TRAINER.compile, "TRAINER.compile"
    assert keras.Sequential.compile is TRAINER.compile
    model = model_of()
    model.train_function = model.test_function = model.predict_function = 1
    model.compile("sgd", "mse")
    assert model.train_function is None
    assert model.test_function is None
    assert model.predict_function is None


def test_loops_come_from_the_trainer():
    owners = {scope_hooks.find_loop_owner(name) for name in scope_hooks.LOOPS}
    assert len(owners) == 1, owners
    assert keras.Model not in owners
    assert TRAINER not in owners
    for name in scope_hooks.LOOPS:
        (owner,) = owners
        assert getattr(keras.Model, name) is vars(owner)[name], name


def test_making_a_model_goes_through_the_trainers_constructor(monkeypatch):
    made = []
    original = TRAINER.__init__

    def noting(model, *args, **kwargs):
        original(model, *args, **kwargs)
        # `bind_on_use` sets an attribute at this point.
        object.__setattr__(model, "_ks_note", "ours")
        made.append(model)

    monkeypatch.setattr(TRAINER, "__init__", noting)
    models = [model_of(), keras.Model(), keras.Sequential()]
    assert [m for m in models if m not in made] == []
    assert {vars(m)["_ks_note"] for m in models} == {"ours"}


def test_fit_takes_a_callback_list_as_it_is():
    noted = []

    class Noting(keras.callbacks.CallbackList):
        def on_train_batch_end(self, batch, logs=None):
            noted.append(batch)

    model = model_of(keras.layers.Dense(1))
    given = Noting(add_history=True, model=model, epochs=1, steps=2, verbose=0)
    history = model.fit(X, Y, batch_size=3, verbose=0, callbacks=given)
    assert noted == [0, 1]
    assert list(history.history) == ["loss"]


@pytest.mark.parametrize("kind", ["train", "test", "predict"])
def test_a_list_without_listeners_does_nothing_at_the_end_of_a_batch(kind):
    # QuietCallbackList leaves this method out.
    history = keras.callbacks.History()
    full = keras.callbacks.CallbackList([history], model=model_of())
    full.on_train_begin()
    before = (dict(vars(history)), set(vars(full)))
    getattr(full, f"on_{kind}_batch_end")(0, {"loss": 1.0})
    full.on_train_end()
    assert (dict(vars(history)), set(vars(full))) == before


def test_a_list_tells_of_batches_and_chooses_threads_by_two_methods():
    called = []

    class Noting(keras.callbacks.CallbackList):
        def _configure_async_dispatch(self, callbacks):
            called.append(callbacks)
            super()._configure_async_dispatch(callbacks)

        def _on_train_batch_end(self, batch, logs=None):
            called.append((batch, threading.current_thread().name))

    class Listens(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            pass

    silent = keras.callbacks.History()
    for callback, is_told_here in ((silent, False), (Listens(), True)):
        called.clear()
        full = Noting([callback], model=model_of())
        full.on_train_begin()
        full.on_train_batch_end(3, {})
        full.on_train_end()
        callbacks, (batch, thread) = called
        assert callbacks == [callback]
        assert batch == 3
        assert (thread == threading.current_thread().name) == is_told_here


def test_logs_are_made_numbers_where_they_can_be():
    vector = jax.numpy.ones(2)
    logs = pythonify_logs({"b": {"c": jax.numpy.float32(2)}, "a": vector})
    assert list(logs) == ["a", "c"]
    assert type(logs["c"]) is float
    assert logs["a"].shape == (2,)
    assert pythonify_logs(None) == {}


def test_steps_that_accumulate_count_in_the_optimizers_own_variable():
    sgd = keras.optimizers.SGD(gradient_accumulation_steps=3)
    optimizer = keras.optimizers.LossScaleOptimizer(sgd)
    weight = keras.Variable([1.0])
    optimizer.build([weight])
    for _ in range(4):
        sgd.apply([jax.numpy.ones(1)])
    assert int(sgd._iterations.value) == 4
    assert int(sgd.iterations) == 1
    assert any(v is sgd._iterations for v in optimizer.variables)


def test_an_update_adds_the_accumulators_to_the_gradients():
    sgd = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    first, second = keras.Variable([1.0]), keras.Variable([1.0])
    sgd.build([first, second])
    one, other = sgd._accumulated_gradients
    assert sgd._get_variable_index(second) == 1
    other.assign([6.0])
    zeros = [jax.numpy.zeros(1)] * 2
    sgd.apply(zeros)
    assert float(other.value[0]) == 6
    one.assign([4.0])
    sgd.apply(zeros)
    assert [float(v.value[0]) for v in (first, second)] == [-1, -2]
    assert [float(v.value[0]) for v in (one, other)] == [0, 0]


def test_accumulators_without_a_gradient_are_not_used():
    sgd = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    first, second = keras.Variable([1.0]), keras.Variable([1.0])
    sgd.build([first, second])
    sgd._accumulated_gradients[1].assign([6.0])
    for _ in range(2):
        with pytest.warns(UserWarning, match="Gradients do not exist"):
            sgd.apply([jax.numpy.ones(1), None])
    assert float(second.value[0]) == 1
    assert float(sgd._accumulated_gradients[1].value[0]) == 6


def test_loss_scaling_divides_gradients_before_they_are_accumulated():
    sgd = keras.optimizers.SGD(gradient_accumulation_steps=2)
    optimizer = keras.optimizers.LossScaleOptimizer(sgd, initial_scale=8.0)
    weight = keras.Variable([1.0])
    optimizer.build([weight])
    assert sgd.loss_scale_factor is None
    slots = [v.value for v in optimizer.variables]
    place = [v is sgd._accumulated_gradients[0] for v in optimizer.variables]
    for grad, expected in ((16.0, 2), (float("nan"), 0)):
        grads = [jax.numpy.full(1, grad)]
        _, new = optimizer.stateless_apply(slots, grads, [weight.value])
        assert float(new[place.index(True)][0]) == expected


def test_loops_go_through_attributes_of_the_instance():
    called = []

    def noting(model, name):
        original = getattr(model, name)

        def note(*args, **kwargs):
            called.append((name, sorted(kwargs)))
            return original(*args, **kwargs)

        object.__setattr__(model, name, note)

    model = model_of(keras.layers.Dense(1))
    for name in (
        "make_train_function",
        "make_test_function",
        "make_predict_function",
        "_symbolic_build",
        "evaluate",
        *[MAYBE_BUILD] * BUILDS_FIRST,
    ):
        noting(model, name)
    model.fit(X, Y, validation_data=(X, Y), verbose=0)
    model.predict(X, verbose=0)
    names = [name for name, _ in called]
    assert names == [
        *[MAYBE_BUILD] * BUILDS_FIRST,
        "_symbolic_build",
        "make_train_function",
        "evaluate",
        # In 3.16 `_symbolic_build` follows where something is not built.
        MAYBE_BUILD if BUILDS_FIRST else "_symbolic_build",
        "make_test_function",
        "make_predict_function",
    ]
    assert "_use_cached_eval_dataset" in dict(called)["evaluate"]
    called.clear()
    model.train_on_batch(X, Y)
    model.test_on_batch(X, Y)
    model.predict_on_batch(X)
    assert called == [
        ("_symbolic_build", ["data_batch"]),
        ("make_train_function", []),
        ("_symbolic_build", ["data_batch"]),
        ("make_test_function", []),
        ("make_predict_function", []),
    ]


def test_train_function_gets_the_state_and_an_iterator():
    model = model_of(keras.layers.Dense(1), metrics=["mae"])
    seen = []

    def make_train_function(force=False):
        def function(state, iterator):
            seen.append([len(group) for group in state])
            list(iterator)
            return {"loss": 1.0}, state

        model.train_function = function

    object.__setattr__(model, "make_train_function", make_train_function)
    model.fit(X, Y, batch_size=6, verbose=0)
    assert seen == [
        [
            len(model.trainable_variables),
            len(model.non_trainable_variables),
            len(model.optimizer.variables),
            len(model.metrics_variables),
        ]
    ]


def test_symbolic_build_makes_optimizer_and_metrics():
    parameters = inspect.signature(keras.Model._symbolic_build).parameters
    assert list(parameters) == ["self", "iterator", "data_batch"]
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    keras.Model._symbolic_build(model, data_batch=(X, Y, None))
    assert model.built, "_symbolic_build"
    assert model.optimizer.built
    assert len(model.metrics_variables) == 4


def test_symbolic_build_reads_an_epoch_iterator():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("adam", "mse")
    iterator = EpochIterator(Adapter())
    keras.Model._symbolic_build(model, iterator=iterator)
    assert model.optimizer.built


def test_assert_compile_called_refuses_a_model_that_was_not_compiled():
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="compile"):
        model._assert_compile_called("fit")
    model.compile("sgd", "mse")
    assert model._assert_compile_called("fit") is None


def test_flatten_layers_reaches_the_model_and_nested_layers():
    inner = keras.Sequential([keras.layers.Dense(1)])
    model = keras.Sequential([keras.Input((2,)), inner])
    layers = list(model._flatten_layers())
    for layer in (model, inner, inner.layers[0]):
        assert any(each is layer for each in layers), "_flatten_layers"


def test_state_is_given_back_through_jax_state():
    model = model_of(keras.layers.Dense(1))
    new = [v.value + 1 for v in model.trainable_variables]
    model._jax_state = {"trainable_variables": new}
    model._jax_state_synced = False
    model.jax_state_sync()
    assert model._jax_state_synced, "_jax_state_synced"
    for variable, value in zip(model.trainable_variables, new, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    # A synced state is not read again.
    model.trainable_variables[0].assign(new[0] + 1)
    model.jax_state_sync()
    np.testing.assert_array_equal(
        model.trainable_variables[0].numpy(), new[0] + 1
    )


def test_state_is_taken_again_after_a_callback_asked_for_it():
    model = model_of(keras.layers.Dense(1, kernel_initializer="ones"))
    kernels = []

    class Sets(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            kernel = self.model.trainable_variables[0]
            kernel.assign([[5.0], [5.0]])
            kernels.append(kernel.value)

    def make_train_function(force=False):
        def function(state, iterator):
            next(iterator)
            kernels.append(state[0][0])
            return {"loss": 1.0}, state

        model.train_function = function

    object.__setattr__(model, "make_train_function", make_train_function)
    model.fit(X, Y, batch_size=3, verbose=0, callbacks=[Sets()])
    np.testing.assert_array_equal(kernels[2], [[5.0], [5.0]])


# Data: feed.py.


class Adapter(DataAdapter):
    """Two batches of two rows."""

    def get_numpy_iterator(self):
        return iter([(X[:2], Y[:2]), (X[2:4], Y[2:4])])

    def get_jax_iterator(self, super_batch=None):
        assert super_batch is None
        return self.get_numpy_iterator()

    @property
    def num_batches(self):
        return 2

    @property
    def batch_size(self):
        return 2

    @property
    def has_partial_batch(self):
        return False

    @property
    def partial_batch_size(self):
        return None


def test_data_adapter_passes_through_untouched():
    adapter = Adapter()
    assert get_data_adapter(x=adapter) is adapter
    assert EpochIterator(adapter).data_adapter is adapter


def test_fit_reads_a_data_adapter_given_as_x():
    model = model_of(keras.layers.Dense(1))
    history = model.fit(Adapter(), verbose=0)
    assert history.params["steps"] == 2


def test_epoch_iterator_yields_steps_and_an_iterator():
    iterator = EpochIterator(Adapter(), steps_per_execution=1)
    steps = []
    with iterator.catch_stop_iteration():
        for begin, end, batches in iterator:
            steps.append((begin, end, next(iter(batches))[0].shape))
    assert steps == [(0, 0, (2, 2)), (1, 1, (2, 2))]
    iterator.reset()


def test_stop_iteration_from_a_step_ends_the_epoch():
    iterator = EpochIterator(Adapter(), steps_per_execution=2)
    steps = []
    with iterator.catch_stop_iteration():
        for begin, end, _ in iterator:
            steps.append((begin, end))
            if len(steps) == 2:
                raise StopIteration
    assert steps[0] == (0, 1), "catch_stop_iteration"


def test_adapters_are_chosen_by_kind_of_data():
    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return X, Y

    generator = get_data_adapter(x=((X, Y) for _ in range(2)))
    assert isinstance(generator, GeneratorDataAdapter)
    assert isinstance(get_data_adapter(x=Data()), PyDatasetAdapter)
    arrays = get_data_adapter(x=X, y=Y, batch_size=4)
    assert (arrays.num_batches, arrays.partial_batch_size) == (2, 2)
    rows = [len(x) for x, _ in arrays.get_numpy_iterator()]
    assert rows == [4, 2]
    assert all(
        isinstance(x, np.ndarray) for x, _ in arrays.get_numpy_iterator()
    )


@pytest.mark.torch
def test_datasets_of_others_are_chosen_by_kind():
    import grain
    import tensorflow as tf
    import torch

    dataset = tf.data.Dataset.from_tensor_slices(X).batch(2)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.tensor(X)), batch_size=2
    )
    of_grain = grain.MapDataset.source(list(X)).batch(2)
    for given, is_one, kind in (
        (dataset, is_tf_dataset, TFDatasetAdapter),
        (loader, is_torch_dataloader, TorchDataLoaderAdapter),
        (of_grain, is_grain_dataset, GrainDatasetAdapter),
    ):
        assert is_one(given)
        assert not is_one(X)
        assert isinstance(get_data_adapter(x=given), kind)


def test_array_adapters_tell_what_they_hold():
    adapter = ArrayDataAdapter(X, Y, batch_size=4, shuffle="batch")
    assert adapter._num_samples == 6, "_num_samples"
    assert adapter._shuffle == "batch", "_shuffle"
    assert can_convert_arrays((X, None, Y))
    assert not can_convert_arrays(("text",))
    assert PyDataset is keras.utils.PyDataset


def test_backups_are_found_restored_and_saved_by_methods(tmp_path):
    backup = keras.callbacks.BackupAndRestore(tmp_path / "b")
    assert not file_utils.exists(backup._weights_path)
    assert not file_utils.exists(backup._training_metadata_path)
    model = model_of(keras.layers.Dense(1))
    backup.set_model(model)
    backup._save_model()
    assert file_utils.exists(backup._weights_path), "_save_model"
    assert file_utils.exists(backup._training_metadata_path)


def test_helpers_for_data():
    (x, y, weight), held = array_slicing.train_validation_split(
        (X, Y, None), validation_split=0.5
    )
    assert weight is None
    np.testing.assert_array_equal(x, X[:3])
    np.testing.assert_array_equal(held[1], Y[3:])
    unpack = data_adapter_utils.unpack_x_y_sample_weight
    assert unpack((1, 2)) == (1, 2, None)
    weights = data_adapter_utils.class_weight_to_sample_weights(
        np.array([0, 1, 1]), {0: 1.0, 1: 3.0}
    )
    np.testing.assert_array_equal(weights, [1, 3, 3])
    assert not data_adapter_utils.is_tensorflow_sparse(X)
    assert callable(data_adapter_utils.tf_sparse_to_jax_sparse)


# Layers: batch_norm.py.


def test_batch_normalization_computes_its_moments_in_one_method():
    layer = keras.layers.BatchNormalization(momentum=0.0)
    layer.build((None, 2))
    assert list(layer._reduction_axes) == [0], "_reduction_axes"
    calls = []

    def moments(inputs, mask):
        calls.append(mask)
        return keras.ops.full((2,), 7.0), keras.ops.ones((2,))

    object.__setattr__(layer, "_moments", moments)
    layer(X, training=True)
    assert calls == [None], "_moments"
    np.testing.assert_allclose(layer.moving_mean.numpy(), [7, 7])


def test_synchronized_is_refused_on_jax():
    with pytest.raises(ValueError, match="synchronized=True"):
        keras.layers.BatchNormalization(synchronized=True)


# Losses: trace_hooks.py.


@pytest.mark.parametrize("name", ["reduce_values", "apply_mask"])
def test_losses_reduce_through_globals_of_the_loss_module(name, monkeypatch):
    calls = []
    original = getattr(loss_module, name)

    def noting(*args, **kwargs):
        calls.append((args, kwargs))
        return original(*args, **kwargs)

    monkeypatch.setattr(loss_module, name, noting)
    y_pred = keras.ops.convert_to_tensor(X)
    set_keras_mask(y_pred, keras.ops.ones((6,), "bool"))
    keras.losses.MeanSquaredError()(X, y_pred, np.ones(6, "float32"))
    assert len(calls) == 1, name
    bound = inspect.signature(original).bind(*calls[0][0], **calls[0][1])
    expected = {
        "reduce_values": ["values", "sample_weight", "reduction"],
        "apply_mask": ["sample_weight", "mask", "dtype", "reduction"],
    }
    assert set(bound.arguments) <= set(expected[name])
    assert list(inspect.signature(original).parameters) == expected[name]


def test_mask_gives_kept_entries_the_weight_total_by_kept():
    mask = np.array([True, True, False, False])
    weight = loss_module.apply_mask(
        np.ones(4, "float32"),
        mask=mask,
        dtype="float32",
        reduction="sum_over_batch_size",
    )
    np.testing.assert_allclose(weight, [2, 2, 0, 0])


def test_layers_hold_ids_of_losses_in_a_scope_and_losses_without():
    layer = keras.layers.ActivityRegularization(l2=1.0)
    with keras.StatelessScope(collect_losses=True) as scope:
        layer(X)
        assert layer._loss_ids == {id(loss) for loss in scope.losses}
        assert len(layer.losses) == 1
        layer._loss_ids.clear()
        assert layer.losses == []
    assert "_loss_ids" in vars(layer)
    assert layer._losses == []
    layer(X)
    assert layer.losses == layer._losses
    assert len(layer._losses) == 1


def test_losses_reduce_once_whatever_call_they_have(monkeypatch):
    calls = []
    original = loss_module.reduce_values

    def noting(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(loss_module, "reduce_values", noting)
    for name, cls in loss_classes().items():
        calls.clear()
        cls()(*loss_arguments(name))
        assert len(calls) == 1, name
    with_a_call = [c for c in loss_classes().values() if "__call__" in vars(c)]
    shared = [c for c in loss_classes().values() if c not in with_a_call]
    for cls in shared:
        assert cls.__call__ is loss_module.Loss.__call__, cls
    assert [c.__name__ for c in with_a_call] in (
        [],
        ["SparseCategoricalFocalCrossentropy"],  # 3.16
    )


def test_masks_travel_with_tensors():
    tensor = keras.ops.ones((3,))
    assert get_keras_mask(tensor) is None
    set_keras_mask(tensor, "mask")
    assert get_keras_mask(tensor) == "mask"


def test_traced_arrays_have_attributes():
    def read(x):
        set_tensor_attr(x, "_ks_contract", 3)
        assert get_tensor_attr(x, "_ks_contract") == 3
        assert get_tensor_attr(x + 1, "_ks_contract") is None
        return x

    jax.make_jaxpr(read)(1.0)


def test_predictions_leave_the_gradient_for_the_metrics():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    state = [
        [v.value for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.metrics_variables,
        )
    ]
    x, y = np.ones((4, 3)), np.ones((4, 2))
    loss, (unscaled, y_pred, *new) = model.compute_loss_and_updates(
        *state, x, y, None
    )
    assert (loss.shape, unscaled.shape, y_pred.shape) == ((), (), (4, 2))
    assert len(new) == 2
    accuracy = keras.metrics.SparseCategoricalAccuracy
    assert accuracy.update_state is MeanMetricWrapper.update_state
    assert model._compile_metrics is None
    model.compile("sgd", "mse", metrics=["mae"])
    model.fit(x, y, verbose=0)
    assert [m.name for m in model._compile_metrics.metrics] == ["mae"]


def test_a_tensor_knows_the_operation_that_computes_it():
    layer = keras.layers.Dense(2)
    outputs = layer(keras.Input((3,)))
    assert outputs._keras_history.operation is layer


LOSS_ARGUMENTS = {
    "CTC": (
        np.array([[1, 2], [2, 1], [1, 1], [2, 2]]),
        np.random.default_rng(1).uniform(0.1, 1, (4, 5, 4)),
    ),
    "Circle": (
        np.array([0, 1, 0, 1]),
        np.random.default_rng(1).normal(size=(4, 3)),
    ),
}
CLASSES = np.array([0, 1, 2, 0])
PROBABILITIES = np.random.default_rng(1).dirichlet(np.ones(3), 4)
OF_CLASS_IDS = (
    "SparseCategoricalCrossentropy",
    "SparseCategoricalFocalCrossentropy",
    "CategoricalGeneralizedCrossEntropy",
)


def loss_classes():
    return {
        name: cls
        for name, cls in vars(keras.losses).items()
        if isinstance(cls, type)
        and issubclass(cls, keras.losses.Loss)
        and cls is not keras.losses.Loss
    }


def loss_arguments(name):
    one_hot = np.eye(3)[CLASSES]
    y_true = CLASSES if name in OF_CLASS_IDS else one_hot
    y_true, y_pred = LOSS_ARGUMENTS.get(name, (y_true, PROBABILITIES))
    return y_true, y_pred.astype("float32")


def mixes_rows(name, cls):
    """Whether the first row's loss changes when other rows do."""
    y_true, y_pred = loss_arguments(name)
    others = [0, 3, 1, 2]
    loss = cls(reduction=None)
    try:
        before = np.asarray(loss(y_true, y_pred))
        # The first row stays; the others change places and values.
        scale = np.array([1, 0.9, 0.8, 0.7], "float32")
        scale = scale.reshape(-1, *[1] * (y_pred.ndim - 1))
        after = np.asarray(loss(y_true[others], y_pred[others] * scale))
    except ValueError as error:
        pytest.fail(f"{name} needs arguments of its own above: {error}")
    return before.ndim == 0 or not np.allclose(before[0], after[0], rtol=1e-5)


def test_losses_and_metrics_keep_their_axis():
    # The axis that they reduce, which may be that of the rows.
    for cls in (
        keras.losses.CosineSimilarity,
        keras.metrics.CosineSimilarity,
        keras.metrics.PearsonCorrelation,
        keras.metrics.ConcordanceCorrelation,
    ):
        assert cls(axis=0)._fn_kwargs == {"axis": 0}, cls


def test_losses_that_mix_rows_are_found():
    classes = loss_classes()
    found = {
        name
        for name, cls in classes.items()
        if metric_rules.mixes_rows(cls(), loss_arguments(name), {})
    }
    mixing = {name for name, cls in classes.items() if mixes_rows(name, cls)}
    # These find out from all labels whether they are 0 and 1.
    assert found == mixing | {"Hinge", "SquaredHinge"}


# Optimizers: trace_hooks.py.


def test_optimizer_knows_its_trainable_variables():
    weight = keras.Variable([1.0])
    optimizer = keras.optimizers.SGD()
    optimizer.build([weight])
    assert optimizer._trainable_variables[0] is weight


def test_stateless_apply_goes_through_apply():
    calls = []

    class Noting(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            calls.append(trainable_variables)
            return super().apply(grads, trainable_variables)

    weight = keras.Variable([1.0])
    optimizer = Noting()
    optimizer.build([weight])
    values = [v.value for v in optimizer.variables]
    optimizer.stateless_apply(values, [jax.numpy.ones(1)], [weight.value])
    assert len(calls) == 1
    parameters = inspect.signature(BaseOptimizer.stateless_apply).parameters
    assert list(parameters)[1:] == [
        "optimizer_variables",
        "grads",
        "trainable_variables",
    ]


def test_loss_scaling_has_a_stateless_apply_of_its_own():
    cls = keras.optimizers.LossScaleOptimizer
    assert "stateless_apply" in vars(cls), "it bypasses `apply`"
    assert "scale_loss" in vars(cls)
    assert "scale_loss" in vars(BaseOptimizer)


def test_train_step_scales_the_loss_through_the_optimizer():
    calls = []

    class Noting(keras.optimizers.SGD):
        def scale_loss(self, loss):
            calls.append(loss)
            return super().scale_loss(loss)

    model = model_of(keras.layers.Dense(1))
    model.compile(Noting(), "mse")
    model.train_on_batch(X, Y)
    assert len(calls) == 1


def test_float8_variables_are_marked():
    source = inspect.getsource(BaseOptimizer)
    assert "overwrite_with_gradient" in source


# Metrics: trace_hooks.py, metric_rules.py.


def test_compiled_metrics_are_lists_of_metrics():
    assert issubclass(CompileMetrics, keras.metrics.Metric)
    assert issubclass(MetricsList, keras.metrics.Metric)
    model = model_of(keras.layers.Dense(1), metrics=["mae"])
    model.train_on_batch(X, Y)
    kinds = [type(m) for m in model.metrics]
    assert kinds[0] is keras.metrics.Mean, "the loss tracker"
    assert CompileMetrics in kinds


def test_a_compiled_loss_is_a_loss_that_calls_the_given_ones():
    seen = []

    class Own(keras.losses.Loss):
        def call(self, y_true, y_pred):
            seen.append(self)
            return keras.ops.mean(y_true - y_pred, axis=-1)

    assert issubclass(CompileLoss, keras.losses.Loss)
    own = Own()
    model = model_of(keras.layers.Dense(1), loss=own)
    model.train_on_batch(X, Y)
    assert isinstance(model._compile_loss, CompileLoss), "_compile_loss"
    assert seen[0] is own


def test_function_of_a_metric_wrapper():
    metric = keras.metrics.MeanAbsoluteError()
    assert isinstance(metric, keras.metrics.MeanMetricWrapper)
    assert metric._fn is keras.losses.mean_absolute_error, "_fn"


def test_loss_tracker_counts_the_rows_of_a_step():
    model = model_of(keras.layers.Dense(1))
    model.train_on_batch(X, Y)
    tracker = model.metrics[0]
    assert float(tracker.variables[1].value) == 6
    assert model._loss_tracker is tracker, "_loss_tracker"


def test_array_adapter_chooses_rows_for_any_nest():
    from keras.src.trainers.data_adapters.array_data_adapter import (
        ArrayDataAdapter,
    )
    from keras.src.trainers.data_adapters.array_slicing import (
        NumpySliceable,
        convert_to_sliceable,
    )

    adapter = ArrayDataAdapter(X, Y, batch_size=4)
    sliceable = convert_to_sliceable(adapter._inputs, target_backend="numpy")
    assert {type(leaf) for leaf in sliceable} == {NumpySliceable}
    assert sliceable[0].array.shape == X.shape
    chosen = list(adapter._get_iterator(lambda leaf, indices: indices, 0))
    assert chosen == [slice(0, 4), slice(4, 6)], "`indices` by keyword"


# Stateless scopes: variables_used.py.


def test_a_variable_asks_the_innermost_scope_alone():
    variable = keras.Variable([1.0])
    outer = keras.StatelessScope([(variable, np.array([2.0]))])
    with outer:
        with keras.StatelessScope() as inner:
            assert inner.original_scope is outer
            assert inner.get_current_value(variable) is None
            # Not 2: the outer scope is not asked.
            assert float(variable.value[0]) == 1.0
        assert float(variable.value[0]) == 2.0


def test_scopes_are_told_of_reads_and_writes():
    told = []

    class Noting(keras.StatelessScope):
        def get_current_value(self, variable):
            told.append("read")
            return super().get_current_value(variable)

        def add_update(self, update):
            told.append(update[0])
            return super().add_update(update)

    variable = keras.Variable([1.0])
    with Noting():
        variable.assign(variable.value + 1)
    assert told[0] == "read"
    assert told[-1] is variable
    assert float(variable.value[0]) == 1.0


def test_variables_created_in_a_scope_get_their_values_after_it():
    with keras.StatelessScope():
        layer = keras.layers.Dense(1)
        layer.build((None, 2))
        assert layer.kernel._value is None
    assert layer.kernel.value.shape == (2, 1)


def test_writing_a_variable_goes_through_its_base_class(monkeypatch):
    written = []
    for name in ("assign", "assign_add", "assign_sub"):
        original = getattr(KerasVariable, name)

        def noting(variable, value, name=name, original=original):
            written.append(name)
            return original(variable, value)

        monkeypatch.setattr(KerasVariable, name, noting)
    variable = keras.Variable(1.0)
    variable.assign(2.0)
    variable.assign_add(1.0)
    variable.assign_sub(1.0)
    assert written == ["assign", "assign_add", "assign", "assign_sub", "assign"]


def test_a_users_variable_is_named_by_its_path_and_kerass_are_not():
    assert (v := keras.Variable(1.0)).path == v.name
    layer = keras.layers.BatchNormalization()
    layer.build((None, 2))
    metric = keras.metrics.Mean()
    optimizer = keras.optimizers.Adam()
    optimizer.build(layer.trainable_variables)
    seeds = [keras.random.SeedGenerator(1).state]
    for v in (
        *layer.variables,
        *metric.variables,
        *optimizer.variables,
        *seeds,
    ):
        assert v.path != v.name, v.path


def test_losses_of_a_call_are_kept_on_the_model_until_they_are_read():
    model = model_of(keras.layers.Dense(1, kernel_regularizer="l2"))
    model._losses_override = [np.float32(7)]
    assert model.losses == [np.float32(7)]
    model._losses_override = []
    assert len(model.losses) == 1


# Learning rates that are read during a fit: model_variables.py.


def test_an_optimizer_s_rate_is_a_variable_or_computes_it():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    for given, kind in ((0.1, keras.Variable), (schedule, type(schedule))):
        optimizer = keras.optimizers.SGD(given)
        assert isinstance(optimizer._learning_rate, kind)
        assert float(optimizer.learning_rate) == pytest.approx(0.1)
        assert optimizer._iterations is optimizer.variables[0]


# Equal blocks of models: equal_blocks.py.


def test_a_sequential_model_has_a_functional_one():
    model = model_of(keras.layers.Dense(1))
    assert isinstance(model._functional, keras.Model)
    assert model._functional.layers[1:] == model.layers
    assert model._functional.outputs[0] is model.outputs[0]
    inputs = keras.Input((2,))
    functional = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    assert getattr(functional, "_functional", None) is None


def test_a_functional_model_has_its_calls_by_their_depths():
    inputs = keras.Input((2,))
    dense = keras.layers.Dense(3)
    outputs = keras.ops.add(dense(inputs), 1.0)
    model = keras.Model(inputs, {"a": outputs})
    nodes = model._nodes_by_depth
    assert sorted(nodes) == [0, 1, 2]
    (last,), (middle,), (first,) = nodes[0], nodes[1], nodes[2]
    assert first.is_input
    assert middle.operation is dense
    assert not middle.is_input
    assert middle.input_tensors[0] is inputs
    assert middle.output_tensors[0] is last.input_tensors[0]
    assert last.output_tensors[0] is outputs
    assert middle.arguments.fill_in({id(inputs): X}) == ((X,), {})
    assert model._outputs_struct == {"a": outputs}
    assert model.outputs[0] is outputs


def test_a_functional_model_computes_each_operation_that_it_is_given():
    inputs = keras.Input((2,))
    dense = keras.layers.Dense(3)
    model = keras.Model(inputs, dense(inputs) + 1.0)
    given = []

    # Keras 3.15 passes a function, Keras 3.16 none.
    def run(graph, inputs, *, operation_fn=lambda operation: operation):
        def choose(operation):
            given.append(operation)
            return operation_fn(operation)

        return original(graph, inputs, operation_fn=choose)

    original = Function._run_through_graph
    wanted = np.asarray(model(X))
    with temporary_attribute(Function, "_run_through_graph", run):
        np.testing.assert_array_equal(model(X), wanted)
    assert given[0] is dense
    assert len(given) == 2


def test_a_layer_keeps_how_it_is_computed_again():
    assert keras.layers.Dense(1)._remat_mode is None
    names = ["one"]
    with keras.RematScope(mode="list_of_layers", layer_names=names):
        mode = keras.layers.Dense(1, name="one")._remat_mode
    assert (mode.mode, mode.layer_names) == ("list_of_layers", names)
    with keras.RematScope(mode="larger_than", output_size_threshold=7):
        mode = keras.layers.Dense(1)._remat_mode
    assert (mode.mode, mode.output_size_threshold) == ("larger_than", 7)
    layer = keras.layers.Dense(1)
    layer.build((None, 2))

    def is_again():
        values = [v.value for v in layer.weights]
        program = jax.make_jaxpr(layer.stateless_call)(values, [], X)
        names = {eqn.primitive.name for eqn in program.eqns}
        return "checkpoint" in names or "remat2" in names

    assert not is_again()
    with keras.RematScope(mode="full"):
        layer._remat_mode = keras.layers.Dense(1)._remat_mode
    assert is_again()


def test_averages_of_weights_are_named_by_the_weights():
    layer = keras.layers.Dense(1, name="layer")
    layer.build((None, 2))
    optimizer = keras.optimizers.SGD(use_ema=True, name="sgd")
    optimizer.build(layer.trainable_variables)
    paths = [v.path for v in optimizer.variables]
    assert paths[2:] == ["sgd/layer_kernel_average", "sgd/layer_bias_average"]


# Weights of pretrained models: patches.py.


def test_applications_get_their_weights_from_addresses_of_this_form():
    directory = pathlib.Path(inspect.getfile(keras.Model)).parents[1]
    calls = 0
    for path in (directory / "applications").glob("*.py"):
        if path.stem.endswith("_test"):
            continue
        text = path.read_text()
        calls += text.count("file_utils.get_file(")
        for node in ast.walk(ast.parse(text)):
            address = getattr(node, "value", None)
            if not isinstance(address, str) or "\n" in address:
                continue
            if address.startswith("https://") and address[-5:] != ".json":
                assert "/keras-applications/" in address, path
    assert calls > 10
    assert file_utils.get_file is keras.utils.get_file
    assert list(inspect.signature(file_utils.get_file).parameters)[:2] == [
        "fname",
        "origin",
    ]


def test_variables_are_read_from_scopes_by_one_method():
    """`GradientTape` wraps it; Keras also calls it to regularize weights."""
    read = []

    class Scope(keras.StatelessScope):
        def get_current_value(self, variable):
            read.append(variable)
            return super().get_current_value(variable)

    layer = keras.layers.Dense(2, kernel_regularizer="l2")
    layer.build((None, 3))
    value = jax.numpy.ones((3, 2))
    with Scope([(layer.kernel, value)]):
        layer.kernel.value  # noqa: B018
        assert [variable is layer.kernel for variable in read] == [True]
        read.clear()
        assert len(layer.losses) == 1
    assert any(variable is layer.kernel for variable in read)
