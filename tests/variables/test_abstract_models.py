"""Models without values: the same model and program, and no memory."""

import contextlib
import gc
import io
import re
import threading

import jax
import keras
import numpy as np
import pytest
from keras.src.optimizers.base_optimizer import BaseOptimizer

import keras_strategies as ks
from benchmarks.program_texts import normal_hlo
from keras_strategies.keras_bridge.keras_names import TRAINER
from keras_strategies.testing import assert_replicated
from tests.support.combinations import combine
from tests.support.plain_keras import mirrored

layers = keras.layers
Spec = jax.ShapeDtypeStruct
READ = "has a shape and no value"


def dense():
    model = keras.Sequential(
        [
            keras.Input((96,)),
            layers.Dense(128, activation="tanh", kernel_regularizer="l2"),
            layers.Dropout(0.2),
            layers.BatchNormalization(),
            layers.Dense(8),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-2, clipnorm=1.0), "mse")
    return model, (Spec((16, 96), "float32"), Spec((16, 8), "float32"))


class Positions(layers.Layer):
    """Its table is assigned in `build`."""

    def build(self, shape):
        self.table = self.add_weight(
            shape=shape[1:], trainable=False, name="table"
        )
        self.table.assign(np.arange(np.prod(shape[1:])).reshape(shape[1:]))
        self.scale = self.add_weight(shape=shape[1:], name="scale")

    def call(self, x):
        return x + self.table * self.scale


class Attention(keras.Model):
    """Built by its first call."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(64, 32)
        self.positions = Positions()
        self.attention = layers.MultiHeadAttention(2, 16)
        self.norm = layers.LayerNormalization()
        self.head = layers.Dense(64)

    def call(self, tokens):
        x = self.positions(self.embed(tokens))
        return self.head(self.norm(x + self.attention(x, x)))


def attention():
    model = Attention()
    model.compile(
        keras.optimizers.AdamW(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model, (Spec((16, 12), "int32"), Spec((16, 12), "int32"))


def rematerialized():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        inputs = keras.Input((32,))
        x = inputs
        names = ["one", "two"]
        with keras.RematScope(mode="list_of_layers", layer_names=names):
            for name in names:
                x = layers.Dense(32, "gelu", name=name)(x)
        model = keras.Model(inputs, layers.Dense(4)(x))
    finally:
        keras.config.set_dtype_policy(before)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer), "mse")
    return model, (Spec((16, 32), "float32"), Spec((16, 4), "float32"))


CASES = {
    "dense": dense,
    "attention": attention,
    "rematerialized": rematerialized,
}


def divided(devices=4):
    partitioner = ks.experimental.FullySharded(min_size=256)
    return ks.MirroredStrategy(
        [f"cpu:{i}" for i in range(devices)], variable_partitioner=partitioner
    )


def compiled(name, *, abstract, strategy=None):
    """A model, its variables and the program of its train step."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    strategy = strategy or divided()
    if abstract:
        with strategy.scope(), ks.abstract():
            model, batch = CASES[name]()
    else:
        with strategy.scope():
            model, batch = CASES[name]()
    return model, strategy, strategy.compile_step(model, batch)


def list_variables(model):
    groups = model, model.optimizer
    found = [v for group in groups for v in group.variables]
    return [*found, *model.metrics_variables]


def is_abstract(variable):
    return variable._value is None


@pytest.mark.parametrize("name", combine(CASES, every=3))
def test_variables_and_programs_are_those_of_the_real_model(name):
    real, strategy, real_program = compiled(name, abstract=False)
    abstract, _, program = compiled(name, abstract=True)
    pairs = list(
        zip(list_variables(real), list_variables(abstract), strict=True)
    )
    for one, other in pairs:
        one_spec, other_spec = (
            (
                v.path,
                v.shape,
                v.dtype,
                v.trainable,
                v._layout and v._layout.spec,
            )
            for v in (one, other)
        )
        assert one_spec == other_spec
        assert is_abstract(other) == (np.prod(one.shape) > 64)
    assert normal_hlo(program.as_text()) == normal_hlo(real_program.as_text())


def small(strategy, *, abstract=True, width=96):
    """A compiled Functional model."""
    scope = strategy.scope()
    with scope, ks.abstract() if abstract else contextlib.nullcontext():
        inputs = keras.Input((width,))
        hidden = layers.Dense(width, "tanh", name="hidden")(inputs)
        model = keras.Model(inputs, layers.Dense(width, name="out")(hidden))
        model.compile("adam", "mse")
    return model


def rows_of(width=96, rows=16):
    return Spec((rows, width), "float32")


def test_slots_and_models_that_a_function_makes_have_no_values():
    strategy = divided()
    with strategy.scope(), ks.abstract():
        model = Attention()
        optimizer = keras.optimizers.Adam()

    def step(tokens):
        model(tokens)
        weights = model.trainable_variables
        loss, grads = ks.value_and_grad(
            lambda: keras.ops.mean(model(tokens) ** 2), weights
        )()
        optimizer.apply(grads, weights)
        return loss

    program = strategy.compile_run(step, (Spec((16, 12), "int32"),))
    large = [v for v in model.trainable_variables if np.prod(v.shape) > 64]
    slots = [v for v in optimizer.variables if np.prod(v.shape) > 64]
    assert len(slots) == 2 * len(large) > 0
    assert all(map(is_abstract, [*large, *slots]))
    state = sum(np.prod(v.shape) * 4 for v in [*large, *slots])
    assert state / 4 < program.argument_bytes < state / 2


def test_a_model_that_is_not_built_predicts_without_values():
    strategy = divided()
    with strategy.scope(), ks.abstract():
        model = strategy.attach(Attention())
    tokens = Spec((16, 12), "int32")
    program = strategy.compile_step(model, tokens, kind="predict")
    assert program.collectives["all-gather"] > 0
    assert is_abstract(model.embed.embeddings)


def test_the_order_of_the_contexts_does_not_matter():
    strategy = divided()
    with ks.abstract(), strategy.scope():
        model = keras.Sequential([keras.Input((96,)), layers.Dense(96)])
        model.compile("adam", "mse")
    (kernel, bias), rows = model.trainable_variables, rows_of()
    program = strategy.compile_step(model, (rows, rows))
    assert is_abstract(kernel)
    assert is_abstract(bias)
    assert program.collectives["all-gather"] == 1


def test_a_model_is_attached_later():
    with ks.abstract():
        model = keras.Sequential([keras.Input((96,)), layers.Dense(96)])
        model.compile("adam", "mse")
    strategy = divided()
    strategy.attach(model)
    program = strategy.compile_step(model, (rows_of(), rows_of()))
    assert all(map(is_abstract, model.optimizer.variables[2:]))
    assert program.argument_bytes < 3 * 4 * 96 * 96


ZEROS = np.zeros((16, 96), "float32")
READS = {
    "asarray": lambda model, _: np.asarray(model.layers[1].kernel),
    "numpy": lambda model, _: model.layers[1].kernel.numpy(),
    "ops": lambda model, _: keras.ops.sum(model.layers[1].kernel),
    "assign": lambda model, _: model.layers[1].kernel.assign(
        np.zeros((96, 96))
    ),
    "get_weights": lambda model, _: model.get_weights(),
    "set_weights": lambda model, _: model.set_weights(
        [np.zeros(v.shape) for v in model.weights]
    ),
    "save": lambda model, path: model.save(path / "model.keras"),
    "fit": lambda model, _: model.fit(ZEROS, ZEROS, verbose=0),
    "evaluate": lambda model, _: model.evaluate(ZEROS, ZEROS, verbose=0),
    "predict": lambda model, _: model.predict(ZEROS, verbose=0),
    "call": lambda model, _: model(ZEROS),
}


@pytest.mark.parametrize("way", READS)
def test_what_needs_values_says_how_to_have_them(way, tmp_path):
    model = small(divided(2))
    with pytest.raises(RuntimeError, match=READ) as caught:
        READS[way](model, tmp_path)
    for part in ("hidden/", "compile_step", "materialize"):
        assert part in str(caught.value)


@pytest.mark.filterwarnings("ignore:Skipping nested container")
def test_weights_are_not_loaded(tmp_path):
    strategy = divided(2)
    path = tmp_path / "real.weights.h5"
    small(strategy, abstract=False).save_weights(path)
    model = small(strategy)
    # Keras quotes the errors that it meets.
    with pytest.raises(ValueError, match=READ):
        model.load_weights(path)


def test_a_function_does_not_run_without_values():
    strategy = divided(2)
    model = small(strategy)
    with pytest.raises(RuntimeError, match=READ):
        strategy.run(model, (np.zeros((4, 96), "float32"),))


class Borrowing(keras.Model):
    """Reads the variables of a layer that it does not own."""

    def __init__(self, lender):
        super().__init__()
        self.own = layers.Dense(96)
        self.lender = lambda: lender

    def call(self, x):
        return self.own(x) @ self.lender().kernel


def test_a_value_that_is_no_part_of_the_state_is_refused():
    strategy = divided()
    with strategy.scope(), ks.abstract():
        lender = layers.Dense(96, name="lender")
        lender.build((None, 96))
        model = Borrowing(lender)
        model.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match="not in the state") as caught:
        strategy.compile_step(model, (rows_of(), rows_of()))
    assert "'lender/kernel'" in str(caught.value)


def patched():
    """What the context changes of Keras."""
    names = "__init__", "_initialize", "_initialize_with_initializer"
    found = [vars(keras.Variable).get(name) for name in names]
    slot = BaseOptimizer.add_variable_from_reference
    return [*found, vars(TRAINER)["__init__"], slot]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_in_keras_after_the_context(fails):
    before, strategy = patched(), divided()
    for contexts in (
        (strategy.scope, ks.abstract),
        (ks.abstract, strategy.scope),
    ):
        with contexts[0](), contexts[1]():
            assert patched() != before
        assert patched() == before
    with contextlib.suppress(ZeroDivisionError), ks.abstract():
        assert patched() != before
        with ks.abstract():
            layers.Dense(96).build((None, 96))
        assert patched() != before
        if fails:
            raise ZeroDivisionError
    assert patched() == before
    layer = layers.Dense(96)
    layer.build((None, 96))
    assert np.asarray(layer.kernel).any()


def test_another_thread_makes_values_meanwhile():
    layer = layers.Dense(96)
    with ks.abstract():
        thread = threading.Thread(target=layer.build, args=((None, 96),))
        thread.start()
        thread.join()
    assert np.asarray(layer.kernel).any()


def test_models_made_outside_are_untouched():
    strategy = mirrored(2)
    with strategy.scope():
        built = keras.Sequential([keras.Input((96,)), layers.Dense(96)])
        later = keras.Sequential([layers.Dense(96)])
        for model in (built, later):
            model.compile("adam", "mse")
    plain = keras.Sequential([keras.Input((96,)), layers.Dense(96)])
    plain.compile("adam", "mse")
    weights = built.get_weights()
    zeros = np.zeros((16, 96), "float32")
    with ks.abstract():
        for one, other in zip(weights, built.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
        for model in (built, later, plain):
            # Makes the slots, and the second one's weights.
            model.fit(zeros, zeros, verbose=0)
    assert_replicated(later)


@pytest.mark.parametrize("name", combine(CASES, every=3))
def test_materialized_models_have_their_initial_values(name):
    real, strategy, _ = compiled(name, abstract=False)
    abstract, _, _ = compiled(name, abstract=True, strategy=strategy)
    assert strategy.materialize(abstract) is abstract
    pairs = zip(list_variables(real), list_variables(abstract), strict=True)
    for one, other in pairs:
        assert one.value.sharding == other.value.sharding
        assert type(one) is type(other)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize(
    "whole", combine(["FullySharded", "SlotsOnly"], every=2)
)
def test_materialized_slots_lie_where_those_of_the_real_model_do(whole):
    partitioner = getattr(ks.experimental, whole)(min_size=256)
    strategy = ks.MirroredStrategy(variable_partitioner=partitioner)
    found = []
    for abstract in (False, True):
        model = small(strategy, abstract=abstract)
        strategy.compile_step(model, (rows_of(), rows_of()))
        strategy.materialize(model)
        slots = model.optimizer.variables
        found.append([v.value.sharding for v in (*model.variables, *slots)])
    assert found[0] == found[1]


class Nested(keras.Model):
    """Its inner model is made with it, and built by its first call."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential(
            [layers.Dense(64, activation="tanh"), layers.Dense(96)]
        )

    def call(self, x):
        return self.inner(x)


@pytest.mark.parametrize("is_built", combine([True, False], every=2))
def test_a_materialized_model_of_models_trains(is_built):
    x = np.random.default_rng(0).normal(size=(32, 96)).astype("float32")
    strategy, found = divided(), []
    for scope in (strategy.scope(), None):
        keras.utils.set_random_seed(1)
        without_values = ks.abstract() if scope else contextlib.nullcontext()
        with scope or contextlib.nullcontext(), without_values:
            model = Nested()
            model.compile("adam", "mse")
        if scope and is_built:
            strategy.compile_step(model, (rows_of(), rows_of()))
        if scope:
            strategy.materialize(model)
        model.fit(x, x, batch_size=16, verbose=0, shuffle=False)
        found.append(model.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_an_optimizer_that_is_not_compiled_is_materialized():
    strategy, x = divided(), np.ones((16, 96), "float32")
    with strategy.scope(), ks.abstract():
        model = keras.Sequential([keras.Input((96,)), layers.Dense(96)])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)
    strategy.attach(model)
    slot = optimizer.variables[-2]
    assert is_abstract(slot)
    strategy.materialize(model)
    assert not slot.value.sharding.is_fully_replicated

    def step(x):
        weights = model.trainable_variables
        loss, grads = ks.value_and_grad(
            lambda: keras.ops.mean(keras.ops.square(model(x))), weights
        )()
        optimizer.apply(grads, weights)
        return loss

    losses = [
        float(strategy.reduce("mean", strategy.run(step, (rows,)), axis=None))
        for rows in strategy.experimental_distribute_dataset(iter([x, x]))
    ]
    assert losses[1] < losses[0]
    assert np.asarray(slot).any()


def test_what_a_layer_assigns_in_build_is_kept():
    strategy = divided()
    with strategy.scope(), ks.abstract():
        # Of two megabytes.
        layer = Positions()
        model = keras.Sequential([keras.Input((512, 1024)), layer])
        model.compile("sgd", "mse")
        other = layers.Dense(96)
        other.build((None, 96))
        with pytest.raises(ValueError, match="must match"):
            other.kernel.assign(np.ones(3))
        assert is_abstract(other.kernel)
    wanted = np.arange(512 * 1024).reshape(512, 1024)
    np.testing.assert_array_equal(np.asarray(layer.table), wanted)
    assert not layer.table.value.sharding.is_fully_replicated
    assert is_abstract(layer.scale)
    rows = Spec((16, 512, 1024), "float32")
    strategy.compile_step(model, (rows, rows))
    strategy.materialize(model)
    np.testing.assert_array_equal(layer.table, wanted)


@pytest.mark.filterwarnings("ignore:Layer InputLayer")
def test_quantizing_needs_values():
    model = small(divided())
    with pytest.raises(RuntimeError, match=READ):
        model.quantize("int8")


def test_low_rank_weights_train_alone():
    strategy = divided()
    with strategy.scope(), ks.abstract():
        model = keras.Sequential([keras.Input((96,)), layers.Dense(96)])
        model.layers[0].enable_lora(4)
        model.compile("adam", "mse")
    program = strategy.compile_step(model, (rows_of(), rows_of()))
    assert [v.shape for v in model.trainable_variables] == [
        (96,),
        (96, 4),
        (4, 96),
    ]
    # The kernel has no slots.
    assert program.argument_bytes < 2 * 4 * 96 * 96


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_large_model_takes_no_memory():
    gc.collect()
    before = resident()
    strategy = ks.MirroredStrategy(
        variable_partitioner=ks.experimental.FullySharded()
    )
    with strategy.scope(), ks.abstract():
        blocks = [layers.Dense(16384) for _ in range(5)]
        model = keras.Sequential([keras.Input((16384,)), *blocks])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    assert model.count_params() > 1.3e9
    assert len(model.optimizer.variables) == 22
    assert resident() - before < 2e8
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        strategy.describe(model)
    # A device's shares of the kernels and slots, which are not there yet.
    shares = 5 * 134.217728
    assert re.search(rf"16384,16384.*{shares:,.3f}", out.getvalue())
    assert re.search(rf"slots .*{2 * shares:,.0f}\.", out.getvalue())
