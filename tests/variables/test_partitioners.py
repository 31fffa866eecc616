"""Which variables replicas divide: partitioners, their rules and errors."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.variables.partitioners import Partitioner
from tests.support.combinations import combine
from tests.support.strategies import cores_strategy

FullySharded = ks.experimental.FullySharded
SlotsOnly = ks.experimental.SlotsOnly


@pytest.fixture(autouse=True)
def fresh_names():
    keras.backend.clear_session(free_memory=False)


def strategy_of(partitioner, count=4):
    return ks.MirroredStrategy(
        jax.devices()[:count], variable_partitioner=partitioner
    )


def list_specs(partitioner, count=4, units=16, make=strategy_of):
    strategy = make(partitioner, count)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(units, name="one"),
                keras.layers.BatchNormalization(name="norm"),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(3, name="two"),
            ],
            name="net",
        )
        model.compile(keras.optimizers.Adam(), "mse", metrics=["mae"])
        model.optimizer.build(model.trainable_variables)
    return {
        v.path.partition("/")[2]: tuple(getattr(v.value.sharding, "spec", ()))
        for v in [*model.variables, *model.optimizer.variables]
    }


def test_fully_sharded():
    found = list_specs(FullySharded(min_size=1))
    assert found["one/kernel"] == (None, "replica")
    assert found["one/bias"] == ("replica",)
    assert found["two/kernel"] == ("replica",)
    assert found["two/bias"] == ()
    assert found["norm/moving_mean"] == ("replica",)
    (seed,) = [name for name in found if "seed" in name]
    assert found[seed] == ()
    assert found["net_one_kernel_momentum"] == (None, "replica")
    assert found["iteration"] == ()


@pytest.mark.parametrize("dtype", ["int8", "bf16", 3, "", object(), np.int32])
def test_gradients_are_summed_in_a_float_dtype(dtype):
    text = "`reduce_dtype` must be a float dtype"
    mesh = functools.partial(ks.ReplicaMesh, devices=jax.devices())
    for kind in (FullySharded, ks.experimental.Replicated, mesh):
        with pytest.raises(ValueError, match=text):
            kind(reduce_dtype=dtype)


@pytest.mark.parametrize(
    "kind", [FullySharded, SlotsOnly, ks.experimental.Replicated]
)
def test_the_dtype_of_sums_is_a_name_or_none(kind):
    assert kind().reduce_dtype is kind(reduce_dtype=None).reduce_dtype is None
    for dtype in ("float16", jnp.float16, np.dtype("float16")):
        assert kind(reduce_dtype=dtype).reduce_dtype == "float16"
        assert kind(reduce_dtype=dtype) == kind(reduce_dtype="float16")


def test_small_variables_stay_whole():
    assert set(list_specs(FullySharded()).values()) == {()}
    found = list_specs(FullySharded(min_size=48))
    assert {k for k, spec in found.items() if spec} == {
        "one/kernel",
        "two/kernel",
        *(
            f"net_{layer}_kernel_{slot}"
            for layer in ("one", "two")
            for slot in ("momentum", "velocity")
        ),
    }


def test_slots_only():
    found = list_specs(SlotsOnly(min_size=1))
    divided = {name for name, spec in found.items() if spec}
    assert divided
    assert all(n.endswith(("_momentum", "_velocity")) for n in divided)


def test_slots_that_are_made_in_run():
    strategy = strategy_of(SlotsOnly(min_size=1))
    made = []

    def step():
        if not made:
            layer, optimizer = keras.layers.Dense(8), keras.optimizers.Adam()
            layer.build((None, 4))
            optimizer.build(layer.trainable_variables)
            made.extend((layer, optimizer))

    strategy.run(step)
    layer, optimizer = made
    assert layer.kernel.value.sharding.is_fully_replicated
    slots = optimizer._momentums
    assert len(slots) == 2
    for slot in slots:
        assert not slot.value.sharding.is_fully_replicated


def test_slots_of_a_whole_weight():
    def of_slots(path, shape, dtype):
        del shape, dtype
        return 1 if path.endswith("one_kernel_momentum") else None

    found = list_specs(of_slots)
    divided = {name for name, spec in found.items() if spec}
    assert divided == {"net_one_kernel_momentum"}


def test_functions():
    asked = []

    def by_path(path, shape, dtype):
        asked.append((path.partition("/")[2], shape, dtype))
        return 1 if path.endswith("one/kernel") else None

    found = list_specs(by_path)
    assert ("one/kernel", (6, 16), "float32") in asked
    divided = {name for name, spec in found.items() if spec}
    assert divided == {
        "one/kernel",
        "net_one_kernel_momentum",
        "net_one_kernel_velocity",
    }


def test_one_replica_divides_nothing():
    assert set(list_specs(FullySharded(min_size=1), 1).values()) == {()}


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (0, ValueError, "multiple of the number of shards"),
        (2, ValueError, "multiple of the number of shards"),
        (-1, ValueError, "multiple of the number of shards"),
        ([1, 4], TypeError, "dimension"),
        ("0", TypeError, "dimension"),
        (True, TypeError, "dimension"),
        (1.0, TypeError, "dimension"),
    ],
)
def test_wrong_answers(answer, error, text):
    def partitioner(path, shape, dtype):
        del dtype
        return answer if path.endswith("one/kernel") else None

    with pytest.raises(error, match=text) as caught:
        list_specs(partitioner)
    assert "one/kernel" in str(caught.value)


@pytest.mark.parametrize(
    ("partitioner", "error", "text"),
    [
        (3, TypeError, "FullySharded"),
        ("fsdp", TypeError, "FullySharded"),
        (FullySharded, TypeError, "FullySharded.*parentheses"),
        (SlotsOnly, TypeError, "SlotsOnly.*parentheses"),
        (ks.ReduceOp, TypeError, "ReduceOp.*parentheses"),
        (FullySharded(3), ValueError, "shards=3 with 4 replicas"),
        (FullySharded(8), ValueError, "shards=8 with 4 replicas"),
    ],
)
def test_wrong_partitioners(partitioner, error, text):
    with pytest.raises(error, match=text):
        strategy_of(partitioner)


@pytest.mark.parametrize(
    "arguments",
    [{"shards": 0}, {"shards": -2}, {"min_size": 0}, {"min_size": None}],
)
def test_wrong_numbers(arguments):
    with pytest.raises((TypeError, ValueError), match="must be"):
        FullySharded(**arguments)
    with pytest.raises(TypeError, match="shards"):
        FullySharded(shards="4")


def test_tfs_partitioners():
    def as_tf(shape, dtype):
        return [1]

    with pytest.raises(TypeError, match="positional arguments"):
        list_specs(as_tf)
    with pytest.raises(AttributeError, match="min_size"):
        ks.experimental.partitioners  # noqa: B018


LAYOUT_MAP = {
    ".*one/kernel": (None, "model"),
    ".*one/bias": ("model",),
    ".*two/kernel": ("model", None),
}


@pytest.mark.parametrize(
    ("kind", "weight", "slot"),
    [
        (FullySharded, ("replica", "model"), ("replica", "model")),
        (SlotsOnly, (None, "model"), ("replica", "model")),
    ],
)
def test_replicas_divide_what_cores_leave(kind, weight, slot):
    def compare_both(partitioner, count):
        return cores_strategy(count, 2, LAYOUT_MAP, partitioner)

    found = list_specs(kind(min_size=1), 2, units=16, make=compare_both)
    assert found["one/kernel"] == weight
    assert found["net_one_kernel_momentum"] == slot
    # Of one dimension, which the cores divide.
    assert found["one/bias"] == ("model",)
    assert found["net_one_bias_velocity"] == ("model",)
    # The second is not a multiple.
    assert found["two/kernel"] == ("model", None)
    is_sharded = kind is FullySharded
    assert found["norm/gamma"] == (("replica",) if is_sharded else ())
    assert found["net_norm_gamma_momentum"] == ("replica",)
    assert found["two/bias"] == ()


def test_a_function_may_not_name_a_dimension_of_the_cores():
    def last(path, shape, dtype):
        return 1 if path.endswith("one/kernel") else None

    with (
        cores_strategy(2, 2, LAYOUT_MAP, last).scope(),
        pytest.raises(
            ValueError, match="which no `layout_map` shards"
        ) as error,
    ):
        keras.layers.Dense(16, name="one").build((None, 6))
    assert "one/kernel" in str(error.value)
    assert "'model'" in str(error.value)


def test_a_groups_default_size():
    mesh = ks.ReplicaMesh(devices=jax.devices()[:6])
    assert Partitioner(FullySharded(), mesh).shards == 6
    assert Partitioner(FullySharded(2), mesh).shards == 2


def test_a_model_of_another_partitioner():
    first = strategy_of(FullySharded(min_size=1))
    with first.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
    other = strategy_of(None)
    kernel = model.layers[0].kernel
    with pytest.raises(RuntimeError, match="Mixing strategies"):
        other.run(lambda: kernel.assign_add(kernel))
    with first.scope():
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="another strategy"):
        other.attach(model)
    first.detach(model)
    assert kernel.value.sharding.is_fully_replicated
    other.attach(model)
    assert kernel.value.sharding.spec == jax.sharding.PartitionSpec()


@pytest.mark.parametrize("shards", [None, 2])
def test_each_replica_has_a_whole_copy(shards):
    strategy = strategy_of(FullySharded(shards, min_size=1))
    with strategy.scope():
        layer = keras.layers.Dense(8)
        layer.build((None, 8))
    copies = strategy.experimental_local_results(layer.kernel)
    assert len({device for c in copies for device in c.devices()}) == 4
    for copy in copies:
        np.testing.assert_array_equal(copy, np.asarray(layer.kernel))


# What a partitioner says, and of whose model.


def two_layers(units=6):
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(units)]
    )


def trained(model):
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.ones((8, 8), "float32")
    model.fit(x, np.ones((8, 1)), verbose=0)
    return model


def last_dimension(path, shape, dtype):
    """Right for a layer of 8 units, and wrong for one of 6."""
    del path, dtype
    return len(shape) - 1


def failing(path, shape, dtype):
    if shape == (8, 6):
        raise LookupError("no rule")
    return last_dimension(path, shape, dtype)


@pytest.mark.parametrize(
    ("partitioner", "error", "text"),
    [
        (last_dimension, ValueError, "multiple of the number of shards"),
        (failing, LookupError, "no rule"),
    ],
)
def test_a_partitioner_fails_before_a_step_and_does_no_harm(
    partitioner, error, text
):
    strategy = strategy_of(partitioner)
    with strategy.scope(), pytest.raises(error, match=text) as caught:
        two_layers()
    told = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert "/kernel" in " ".join(told)
    assert "(8, 6)" in " ".join(told)
    model = trained(two_layers())
    before = model.get_weights()
    with pytest.raises(error, match=text):
        strategy.attach(model)
    with strategy.scope(), pytest.raises(error, match=text):
        model.compile("sgd", "mse")
    # It is as it was, and may be another strategy's.
    for variable in model.variables:
        assert type(variable) is keras.Variable
        assert len(variable.value.sharding.device_set) == 1
    for got, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)
    strategy_of(FullySharded(min_size=1)).attach(model)
    trained(model)


def test_a_partitioner_is_asked_once_about_a_variable():
    asked = []

    def changing(path, shape, dtype):
        asked.append(path)
        # First each kernel is divided, and the biases are not.
        return None if len(asked) % 2 == 0 else len(shape) - 1

    strategy = strategy_of(changing)
    with strategy.scope():
        model = two_layers(8)
        model.compile(keras.optimizers.SGD(0.1), "mse")
    first = [v.value.sharding for v in model.variables]
    for _ in range(2):
        trained(model)
        assert [v.value.sharding for v in model.variables] == first
    names = [path for path in asked if "kernel" in path or "bias" in path]
    assert len(names) == len(set(names)) == 4
    strategy.detach(model)
    strategy.attach(model)
    assert len(asked) > 4


@pytest.mark.parametrize(
    "partitioner",
    combine(
        [None, SlotsOnly(min_size=1), FullySharded(2, min_size=1)], every=2
    ),
)
def test_a_model_that_was_made_in_another_strategys_scope(partitioner):
    # On the same devices, and bound to none: it is taken over.
    with strategy_of(FullySharded(min_size=1)).scope():
        model = two_layers(8)
    before = [np.array(v) for v in model.variables]
    other = strategy_of(partitioner)
    other.attach(model)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
        shards = {s.data.shape for s in variable.value.addressable_shards}
        is_whole = getattr(partitioner, "shards", None) != 2
        assert (shards == {value.shape}) == is_whole
    kernel = model.layers[0].kernel
    other.run(lambda: kernel.assign(kernel * 2.0))
    np.testing.assert_array_equal(kernel, 2 * before[0])
    trained(model)


def test_a_variable_of_another_partitioner_is_not_written_in_run():
    with strategy_of(FullySharded(min_size=1)).scope():
        model = two_layers(8)
    kernel = model.layers[0].kernel
    before = np.array(kernel)
    other = strategy_of(FullySharded(2, min_size=1))
    with pytest.raises(RuntimeError, match="which shards it") as caught:
        other.run(lambda: kernel.assign(kernel * 2.0))
    assert "Call `run` of the variable's own strategy" in str(caught.value)
    np.testing.assert_array_equal(kernel, before)
    # Read it may be.
    total = other.run(lambda: keras.ops.sum(kernel))
    # The sum's terms cancel each other.
    np.testing.assert_allclose(total.values[3], before.sum(), atol=1e-5)


def test_checkpoints_of_another_strategys_model(tmp_path):
    models = []
    for partitioner in (FullySharded(min_size=1), SlotsOnly(min_size=1)):
        with strategy_of(partitioner).scope():
            models.append(trained(two_layers(8)))
    first, second = models
    checkpoint = ks.checkpoint.Checkpoint(model=first)
    path = checkpoint.save(tmp_path / "one")
    placed = [v.value.sharding for v in second.variables]
    ks.checkpoint.Checkpoint(model=second).restore(path)
    for got, want in zip(second.variables, first.variables, strict=True):
        np.testing.assert_array_equal(got, want)
    assert [v.value.sharding for v in second.variables] == placed
    trained(second)
