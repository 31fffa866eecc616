"""Replicas of several cores, with divided variables: one device's numbers.

Models whose variables are divided over a replica's cores, and also over the
replicas, train, evaluate and predict as on one device, with batches the
replicas share evenly and others.
"""

import functools
import itertools

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from keras_strategies.variables.model_variables import (
    all_variables,
)
from tests.parity.cases import CASES
from tests.parity.one_device import check
from tests.support.combinations import combine, few
from tests.support.models import chain
from tests.support.strategies import cores_strategy, make_strategy

layers = keras.layers
SHARDED_OF_CORES = (
    "sharded2_of_2_cores",
    "sharded4_of_2_cores_in_groups_of_2",
    "sharded_slots2_of_2_cores",
)


def make_mlp():
    return chain(
        (6,),
        layers.Dense(16, activation="relu", name="one"),
        layers.BatchNormalization(synchronized=True, name="norm"),
        layers.Dropout(0.0),
        layers.Dense(4, name="two"),
    )


def make_cnn():
    return chain(
        (6,),
        layers.Reshape((6, 1)),
        layers.Conv1D(8, 3, padding="same", name="conv"),
        layers.BatchNormalization(synchronized=True, name="norm"),
        layers.ReLU(),
        layers.GlobalAveragePooling1D(),
        layers.Dense(4, name="two"),
    )


def make_transformer():
    x = inputs = keras.Input((6,))
    x = layers.Reshape((6, 1))(x)
    x = layers.Dense(8, name="embed")(x)
    attended = layers.MultiHeadAttention(4, 4, name="heads")(x, x)
    x = layers.LayerNormalization()(x + attended)
    x = x + layers.Dense(8, name="out")(layers.Dense(16, name="in")(x))
    x = layers.Dense(4, name="two")(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, x)


MODELS = {
    "mlp": (
        make_mlp,
        {
            ".*one/kernel": (None, "model"),
            ".*one/bias": ("model",),
            ".*norm/.*": ("model",),
            ".*two/kernel": ("model", None),
        },
    ),
    "cnn": (make_cnn, {".*conv/kernel": (None, None, "model")}),
    "transformer": (
        make_transformer,
        {
            ".*heads/(query|key|value)/kernel": (None, "model", None),
            ".*heads/attention_output/kernel": ("model", None, None),
            ".*heads/(query|key|value)/bias": ("model", None),
            ".*in/kernel": (None, "model"),
            ".*in/bias": ("model",),
            ".*out/kernel": ("model", None),
        },
    ),
}


def data(rows):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(rows, 6)).astype("float32")
    return x, rng.integers(0, 4, rows)


def adam():
    return keras.optimizers.Adam(0.01, epsilon=0.01, clipnorm=1.0)


def train(strategy, make, rows, batch_size, steps_per_execution=1, of=adam):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make()
        model.compile(
            of(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=steps_per_execution,
        )
    x, y = data(rows)
    history = model.fit(
        x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0
    )
    result = {
        "history": history.history,
        "state": [np.asarray(v.value) for v in all_variables(model)],
        "evaluate": model.evaluate(x, y, batch_size=batch_size, verbose=0),
        "predict": model.predict(x, batch_size=batch_size, verbose=0),
    }
    return model, result


@functools.cache
def on_one_device(name, rows, batch_size, of=adam):
    strategy = ks.OneDeviceStrategy("cpu:0")
    return train(strategy, MODELS[name][0], rows, batch_size, of=of)[1]


def check_numbers(strategy, name, rows=38, batch_size=16, of=adam, **options):
    """Asserts one device's numbers; returns the model that was trained."""
    make = MODELS[name][0]
    model, result = train(strategy, make, rows, batch_size, of=of, **options)
    wanted = on_one_device(name, rows, batch_size, of)
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(
            got, want, rtol=2e-5, atol=2e-5
        ),
        result,
        wanted,
    )
    assert_replicated(model)
    return model


def check_model(name, replicas, cores, **options):
    strategy = cores_strategy(replicas, cores, MODELS[name][1])
    model = check_numbers(strategy, name, **options)
    assert_divided(model, cores)


def assert_divided(model, cores):
    """Weights and their slots are divided after training as before."""
    divided = [
        v for v in all_variables(model) if "model" in str(v.value.sharding.spec)
    ]
    weights = [
        v for v in model.trainable_variables if any(v is d for d in divided)
    ]
    assert weights
    # Adam: two slots each.
    slots = [
        v for v in model.optimizer.variables if any(v is d for d in divided)
    ]
    assert len(slots) == 2 * len(weights)
    for variable in divided:
        shard = variable.value.addressable_shards[0].data
        assert shard.size * cores == variable.value.size


def sharded_axes(variable):
    return {axis for axis in variable.value.sharding.spec if axis}


def assert_divided_twice(model, parts, has_replicated_weights=False):
    """Kernels (or their slots alone) lie divided over cores and replicas."""
    matrices = [v for v in model.trainable_variables if len(v.shape) > 1]
    slots = [
        v
        for v in model.optimizer.variables
        if any(tuple(v.shape) == tuple(w.shape) for w in matrices)
    ]
    over_cores = [v for v in matrices if "model" in sharded_axes(v)]
    assert over_cores
    assert slots
    divided = slots if has_replicated_weights else over_cores + slots
    for variable in divided:
        assert sharded_axes(variable) == {"model", "replica"}, variable.path
        shard = variable.value.addressable_shards[0].data
        assert shard.size * parts == variable.value.size
    if has_replicated_weights:
        assert all(sharded_axes(v) == {"model"} for v in over_cores)


def lamb():
    return keras.optimizers.Lamb(0.01, epsilon=0.01)


def muon():
    return keras.optimizers.Muon(0.01)


def adafactor():
    return keras.optimizers.Adafactor(0.01)


def globally_clipped():
    return keras.optimizers.Adam(0.01, epsilon=0.01, global_clipnorm=0.1)


@pytest.mark.parametrize("strategy", combine(SHARDED_OF_CORES, every=2))
def test_cores_and_replicas_divide_variables(strategy):
    # 16, 16 and 7 rows, which no replicas can share evenly.
    model = check_numbers(
        make_strategy(strategy, MODELS["mlp"][1]),
        "mlp",
        rows=39,
        of=globally_clipped,
    )
    assert_divided_twice(model, 4, has_replicated_weights="slots" in strategy)


# Muon and Adafactor scale what they are given to one size: of the biases of
# keys, and before a normalization, that is rounding, on any two devices.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("mlp", muon),
        ("mlp", adafactor),
        *itertools.product(MODELS, [adam, lamb, globally_clipped]),
    ],
)
@pytest.mark.parametrize(
    "strategy",
    [*SHARDED_OF_CORES, "sharded2_of_4_cores", "sharded4_of_2_cores"],
)
def test_every_model_divided_twice(strategy, name, of):
    strategy = make_strategy(strategy, MODELS[name][1])
    check_numbers(strategy, name, rows=39, of=of)


@pytest.mark.slow
def test_several_steps_of_variables_divided_twice():
    strategy = make_strategy("sharded2_of_2_cores", MODELS["mlp"][1])
    check_numbers(strategy, "mlp", rows=70, steps_per_execution=3)


def test_a_core_gathers_its_own_parts_alone():
    layout_map = {
        ".*one/kernel": (None, "model"),
        ".*two/kernel": ("model", None),
    }
    strategy = make_strategy("sharded2_of_2_cores", layout_map)
    with strategy.scope():
        model = chain(
            (64,),
            layers.Dense(256, activation="tanh", name="one"),
            layers.Dense(64, name="two"),
        )
        model.compile(keras.optimizers.Adam(), "mse")
    shape = jax.ShapeDtypeStruct((32, 64), "float32")
    program = strategy.compile_step(model, (shape, shape))
    sent = program.collective_bytes
    kernels = 2 * 64 * 256 * 4
    biases = (256 + 64) * 4
    assert kernels / 2 <= sent["all-gather"] <= kernels / 2 + 2 * biases
    assert sent["reduce-scatter"] <= kernels / 2 + biases


def test_two_replicas_of_two_cores():
    # 16, 16 and 7 rows, which two replicas cannot share evenly.
    check_model("mlp", 2, 2, rows=39)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2), (4, 2), (1, 4), (2, 1)])
@pytest.mark.parametrize("name", MODELS)
def test_other_shapes(name, shape):
    if shape[1] == 1:
        make, layout_map = MODELS[name]
        strategy = cores_strategy(*shape, layout_map)
        result = train(strategy, make, 38, 16)[1]
        wanted = on_one_device(name, 38, 16)
        np.testing.assert_allclose(
            result["predict"], wanted["predict"], rtol=2e-5, atol=2e-5
        )
        return
    check_model(name, *shape)


@pytest.mark.slow
def test_several_steps_in_one_program():
    check_model("mlp", 2, 2, rows=70, steps_per_execution=3)


@pytest.mark.slow
def test_dropout_has_a_mask_for_each_replica_and_one_for_its_cores():
    def make():
        return chain(
            (6,),
            layers.Dense(16, name="one"),
            layers.Dropout(0.5, seed=3),
            layers.Dense(4, name="two"),
        )

    keys = MODELS["mlp"][1].items()
    layout_map = {key: spec for key, spec in keys if "norm" not in key}
    divided = train(cores_strategy(2, 2, layout_map), make, 32, 16)[1]
    mirrored = train(ks.MirroredStrategy(jax.devices()[:2]), make, 32, 16)[1]
    np.testing.assert_allclose(
        divided["predict"], mirrored["predict"], rtol=2e-5, atol=2e-5
    )


def custom_loop(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make_mlp()
        optimizer = keras.optimizers.Adam(0.01, epsilon=0.01, clipnorm=1.0)
    loss_of = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=None
    )
    x, y = data(32)

    def step(batch):
        x, y = batch
        loss, grads = ks.value_and_grad(
            lambda: ks.compute_average_loss(
                loss_of(y, model(x, training=True))
            ),
            model.trainable_variables,
        )()
        optimizer.apply(grads, model.trainable_variables)
        return loss

    dataset = strategy.experimental_make_numpy_dataset((x, y)).batch(16)
    totals = []
    for _ in range(2):
        for batch in strategy.experimental_distribute_dataset(dataset):
            losses = strategy.run(step, (batch,))
            assert len(strategy.experimental_local_results(losses)) == 2
            totals.append(strategy.reduce("sum", losses, axis=None))
    assert_replicated(model)
    return model, [*map(float, totals), np.asarray(model(x))]


@functools.cache
def custom_loop_of_one_core():
    return custom_loop(ks.MirroredStrategy(jax.devices()[:2]))[1]


@pytest.mark.parametrize(
    ("strategy", "axes"),
    few(
        [
            ("tpu2_of_2_cores", (None, "model")),
            ("sharded2_of_2_cores", ("replica", "model")),
        ],
        every=2,
    ),
)
def test_a_custom_loop_equals_one_of_replicas_of_one_core(strategy, axes):
    strategy = make_strategy(strategy, MODELS["mlp"][1])
    model, result = custom_loop(strategy)
    kernel = model.layers[0].kernel
    assert tuple(kernel.value.sharding.spec) == axes
    for got, want in zip(result, custom_loop_of_one_core(), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("strategy", ["tpu2_of_2_cores", "sharded2_of_2_cores"])
def test_replicas_with_other_rows_than_others(strategy):
    strategy = make_strategy(strategy, {".*dense/kernel": (None, "model")})
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layer = layers.Dense(4, name="dense")
        layer.build((None, 6))
    x = data(7)[0]
    dataset = strategy.experimental_make_numpy_dataset((x,)).batch(7)
    (batch,) = iter(strategy.experimental_distribute_dataset(dataset))
    outputs = strategy.run(lambda batch: layer(batch[0]), (batch,))
    assert [len(o) for o in strategy.experimental_local_results(outputs)] == [
        4,
        3,
    ]
    gathered = strategy.gather(outputs, axis=0)
    np.testing.assert_allclose(gathered, layer(x), rtol=1e-5, atol=1e-6)


def test_a_model_divided_twice_is_saved_whole(tmp_path):
    strategy = make_strategy("sharded2_of_2_cores", MODELS["mlp"][1])
    with strategy.scope():
        model = chain(
            (6,), layers.Dense(16, name="one"), layers.Dense(4, name="two")
        )
        model.compile(keras.optimizers.Adam(), "mse")
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for got, want in zip(
        loaded.get_weights(), model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(got, want)
    # A model with its slots is divided as one of the scope.
    strategy.attach(loaded)
    for divided in (model, loaded):
        assert_divided_twice(divided, 4)


def test_an_embedding_gets_nothing_from_the_padding():
    # What is padded would be token 0, whose row no loss sees here.
    check("mask", "tpu2_of_2_cores", ((13, 5),))


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["tpu2_of_2_cores", "tpu4_of_2_cores", "tpu1_of_4_cores"]
)
@pytest.mark.parametrize("name", CASES)
def test_every_case_with_whole_variables(name, strategy):
    check(name, strategy, ((64, 16), (13, 5)))


def last_even(shape):
    """A layout that divides whatever two cores can divide."""
    axes = [None] * len(shape)
    fits = [dim for dim, size in enumerate(shape) if size % 2 == 0]
    if fits:
        axes[fits[-1]] = "model"
    return tuple(axes)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SHARDED_OF_CORES)
@pytest.mark.parametrize("name", CASES)
def test_every_case_divided_twice(name, strategy):
    layout_map = {".*": last_even}
    model = check(name, strategy, ((64, 16), (13, 5)), layout_map=layout_map)
    assert any("model" in sharded_axes(v) for v in model.trainable_variables)
