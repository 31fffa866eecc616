"""Blocks in one loop: the numbers of blocks one by one, and of one device."""

import jax
import keras
import numpy as np
import pytest
from keras import layers

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.support.combinations import combine, few
from tests.support.strategies import make_strategy

BLOCKS, WORDS, LENGTH, WIDTH = 5, 20, 6, 8
ROWS = 21
_random = np.random.default_rng(0)
TOKENS = _random.integers(1, WORDS, (ROWS, LENGTH)).astype("int32")
TOKENS[:, -1] *= TOKENS[:, 0] % 2
NEXT = np.roll(TOKENS, -1, 1)
IMAGES = _random.normal(size=(ROWS, LENGTH, WIDTH)).astype("float32")
LABELS = _random.integers(0, WORDS, ROWS).astype("int32")


def attend(x, seed, *, rate=0.0, **call):
    y = layers.LayerNormalization()(x)
    y = layers.MultiHeadAttention(2, 4, dropout=rate, seed=seed)(y, y, **call)
    return layers.Add()([x, layers.Dropout(rate, seed=seed)(y)])


def feed_forward(x, *, normalization):
    y = normalization()(x)
    y = layers.Dense(12, "gelu")(y)
    return layers.Add()([x, layers.Dense(WIDTH)(y)])


@keras.saving.register_keras_serializable("tests")
class Decoder(layers.Layer):
    """A block that is one layer, rematerialized."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = layers.RMSNormalization()
        self.attention = layers.GroupQueryAttention(4, 2, 1)
        self.out = layers.Dense(WIDTH, "silu")

    def build(self, shape):
        self.norm.build(shape)
        self.attention.build(shape, shape)
        self.out.build(shape)
        super().build(shape)

    def call(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.out(x)


def decoder():
    x = tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(x)
    names = [f"decoder{number}" for number in range(BLOCKS)]
    with keras.RematScope(mode="list_of_layers", layer_names=names):
        for name in names:
            x = Decoder(name=name)(x)
    return keras.Model(tokens, layers.Dense(WORDS)(x))


def encoder():
    """Masks travel between the blocks, and Dropout draws in each."""
    x = tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, mask_zero=True)(x)
    for seed in range(BLOCKS):
        x = attend(x, seed, rate=0.2)
        x = feed_forward(x, normalization=layers.LayerNormalization)
    return keras.Model(tokens, layers.Dense(WORDS)(x))


def vit():
    x = patches = keras.Input((LENGTH, WIDTH))
    for seed in range(BLOCKS):
        x = attend(x, seed)
        x = feed_forward(x, normalization=layers.BatchNormalization)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(patches, layers.Dense(WORDS)(x))


MODELS = {
    "decoder": (decoder, TOKENS, NEXT),
    "encoder": (encoder, TOKENS, NEXT),
    "vit": (vit, IMAGES, LABELS),
}


def strategy_of(replicas, *, is_sharded=False):
    kind = "sharded" if is_sharded else "mirrored"
    return make_strategy(f"{kind}{replicas}")


def compiled(name, *, is_scanned):
    keras.utils.set_random_seed(1)
    model = MODELS[name][0]()
    if is_scanned:
        ((*ends,),) = ks.experimental.scan_blocks(model)
        assert len(ends) == BLOCKS
    model.compile(
        # A small gradient makes no large step, whatever its rounding.
        keras.optimizers.Adam(0.003, epsilon=1e-2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def fitted(name, *, is_scanned):
    _, x, y = MODELS[name]
    model = compiled(name, is_scanned=is_scanned)
    given = {"batch_size": 8, "verbose": 0}
    history = model.fit(x, y, **given, epochs=2, shuffle=False).history
    found = {
        "history": history,
        "evaluated": model.evaluate(x, y, **given),
        "predicted": model.predict(x, **given),
        # Also those of seeds.
        "variables": [np.asarray(v) for v in model.variables],
    }
    return model, found


def assert_close(found, wanted, tolerance=3e-5):
    """Of each array as a whole: blocks enlarge rounding of single numbers."""
    for ours, theirs in zip(
        jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True
    ):
        ours, theirs = (np.asarray(a, "float64") for a in (ours, theirs))
        error = np.linalg.norm(ours - theirs)
        assert error <= tolerance * max(np.linalg.norm(theirs), 1)


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_fit_has_the_numbers_of_unrolled_blocks(name, replicas, is_sharded):
    found = []
    for is_scanned in (True, False):
        with strategy_of(replicas, is_sharded=is_sharded).scope():
            model, results = fitted(name, is_scanned=is_scanned)
        assert_replicated(model)
        found.append(results)
    assert_close(*found)
    if name == "decoder" or replicas == 1:
        # Else each replica draws its own Dropout, and normalizes its own rows.
        assert_close(found[0], fitted(name, is_scanned=False)[1])


def own_loop(strategy, *, is_scanned):
    _, x, y = MODELS["decoder"]
    with strategy.scope():
        model = compiled("decoder", is_scanned=is_scanned)
    dataset = strategy.experimental_make_numpy_dataset((x, y)).batch(8)
    loss_of = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )

    def step(x, y):
        def loss_fn():
            losses = loss_of(y, model(x, training=True))
            return ks.compute_average_loss(losses)

        variables = model.trainable_variables
        loss, gradients = ks.value_and_grad(loss_fn, variables)()
        model.optimizer.apply(gradients, variables)
        return loss

    losses = [
        float(strategy.reduce("sum", strategy.run(step, args=batch), None))
        for batch in strategy.experimental_distribute_dataset(dataset)
    ]
    return losses, [np.asarray(v) for v in model.variables]


@pytest.mark.parametrize(
    ("replicas", "is_sharded"),
    [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [(2, False), (2, True), (3, False), (4, True), (8, True)]
    ],
)
def test_a_custom_loop_has_the_numbers_of_unrolled_blocks(replicas, is_sharded):
    strategy = strategy_of(replicas, is_sharded=is_sharded)
    scanned = own_loop(strategy, is_scanned=True)
    assert_close(scanned, own_loop(strategy, is_scanned=False))


@pytest.mark.slow
@pytest.mark.parametrize("is_first_scanned", [True, False])
def test_a_run_resumes_with_and_without_the_loop(is_first_scanned, tmp_path):
    _, x, y = MODELS["encoder"]
    given = {"batch_size": 8, "verbose": 0, "shuffle": False}

    def run(epochs, directory, *, is_scanned):
        with strategy_of(2, is_sharded=True).scope():
            model = compiled("encoder", is_scanned=is_scanned)
        kept = ks.callbacks.Checkpoint(tmp_path / directory)
        model.fit(x, y, **given, epochs=epochs, callbacks=[kept])
        return [np.asarray(v) for v in model.variables]

    run(1, "resumed", is_scanned=is_first_scanned)
    found = run(2, "resumed", is_scanned=not is_first_scanned)
    assert_close(found, run(2, "whole", is_scanned=False))


class Counted(layers.Dense):
    rows = ()

    def call(self, inputs, training=None):
        Counted.rows = *Counted.rows, inputs.shape[0]
        return super().call(inputs, training)


def chain(make_layer, count=BLOCKS):
    x = inputs = keras.Input((WIDTH,))
    for number in range(count):
        x = make_layer(number)(x)
    return keras.Model(inputs, layers.Dense(1)(x))


def fit_chain(make_layer, *, is_scanned=True, replicas=2, **frozen):
    with strategy_of(replicas).scope():
        keras.utils.set_random_seed(1)
        model = chain(make_layer)
        if is_scanned:
            ks.experimental.scan_blocks(model)
        for layer in model.layers[1 : 1 + frozen.get("frozen", 0)]:
            layer.trainable = False
        model.compile("sgd", "mse")
    x = IMAGES[:16, 0]
    history = model.fit(x, x[:, :1], batch_size=8, verbose=0).history
    return model, [history, [np.asarray(v) for v in model.variables]]


def test_each_block_is_traced_once():
    def layer(number):
        return Counted(WIDTH, "tanh")

    counts = {}
    for is_scanned in (True, False):
        Counted.rows = ()
        model, _ = fit_chain(layer, is_scanned=is_scanned)
        counts[is_scanned] = Counted.rows.count(4)
    # Each once to compare them; the first one's trace is the loop's body.
    assert counts == {True: BLOCKS, False: BLOCKS}
    # Outside of a strategy's steps all blocks are computed.
    Counted.rows = ()
    model(IMAGES[:2, 0])
    assert Counted.rows == (2,) * BLOCKS


def test_sharded_weights_are_gathered_and_gradients_scattered_in_the_loop():
    counts = []
    for depth in (4, 8):
        strategy = strategy_of(2, is_sharded=True)
        with strategy.scope():
            x = inputs = keras.Input((WIDTH,))
            for _ in range(depth):
                x = layers.Dense(WIDTH, "tanh")(x)
            model = keras.Model(inputs, x)
            ks.experimental.scan_blocks(model)
            model.compile("adam", "mse")
        shape = jax.ShapeDtypeStruct((8, WIDTH), "float32")
        program = strategy.compile_step(model, (shape, shape))
        counts.append(program.collectives)
    assert counts[0] == counts[1]
    # The kernel and the bias of one block.
    assert counts[0]["reduce-scatter"] == 2


def test_blocks_are_compared_in_the_first_trace_alone():
    class Doubled(Counted):
        def call(self, inputs, training=None):
            return super().call(inputs * 2, training)

    Counted.rows = ()
    fit_chain(lambda _: Doubled(WIDTH, "tanh"))
    # A user's operations are traced again, with the rows of all replicas.
    first = Counted.rows.index(4)
    assert Counted.rows[first:] == (4,) * BLOCKS + (8,)


@pytest.mark.parametrize("is_sharded", combine([False, True], every=2))
def test_masks_and_dropout_are_those_of_unrolled_blocks(is_sharded):
    found = []
    for is_scanned in (True, False):
        with strategy_of(2, is_sharded=is_sharded).scope():
            keras.utils.set_random_seed(1)
            x = tokens = keras.Input((LENGTH,), dtype="int32")
            x = layers.Embedding(WORDS, WIDTH, mask_zero=True)(x)
            for seed in range(BLOCKS):
                y = layers.Dense(WIDTH, "relu")(x)
                x = layers.Add()([x, layers.Dropout(0.2, seed=seed)(y)])
            model = keras.Model(tokens, layers.Dense(WORDS)(x))
            if is_scanned:
                ks.experimental.scan_blocks(model)
            model.compile(
                "adam",
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
        given = {"batch_size": 8, "verbose": 0}
        history = model.fit(TOKENS, NEXT, **given, shuffle=False).history
        variables = [np.asarray(v) for v in model.variables]
        found.append([history, model.predict(TOKENS, **given), variables])
    assert_close(*found)


class Penalized(layers.Dense):
    def call(self, inputs, training=None):
        outputs = super().call(inputs, training)
        self.add_loss(keras.ops.mean(outputs**2))
        return outputs


class Counting(layers.Dense):
    def build(self, shape):
        super().build(shape)
        self.count = keras.Variable(0.0, aggregation="sum", trainable=False)

    def call(self, inputs, training=None):
        self.count.assign_add(1.0)
        return super().call(inputs, training)


SHARED = keras.random.SeedGenerator(3)


class Noisy(layers.Dense):
    def call(self, inputs, training=None):
        noise = keras.random.normal((WIDTH,), seed=SHARED)
        return super().call(inputs, training) + 0 * noise


class Printing(layers.Dense):
    printed = []

    def call(self, inputs, training=None):
        jax.debug.callback(lambda: self.printed.append(self.name))
        return super().call(inputs, training)


class Keeping(layers.Dense):
    def call(self, inputs, training=None):
        self.last = super().call(inputs, training)
        return self.last


@pytest.mark.parametrize(
    ("kind", "reason"),
    few(
        [
            (Printing, "a block prints, or calls back into Python"),
            (Keeping, "a layer of a block keeps an array"),
            (Penalized, "a block adds a loss"),
            (Counting, "a block writes a shared or user-defined variable"),
            (Noisy, "a block writes a shared or user-defined variable"),
        ],
        every=3,
    ),
)
def test_what_a_loop_cannot_compute_is_unrolled_with_a_word(kind, reason):
    def layer(number):
        return kind(WIDTH, "tanh")

    with pytest.warns(UserWarning, match=f"one by one.*{reason}"):
        _, found = fit_chain(layer)
    _, wanted = fit_chain(layer, is_scanned=False)
    assert_close(found, wanted)
    jax.effects_barrier()
    names = set(Printing.printed)
    assert kind is not Printing or len(names) == 2 * BLOCKS


class Scaled(layers.Dense):
    """A layer whose constant its config does not contain."""

    def __init__(self, constant, **kwargs):
        super().__init__(WIDTH, "tanh", **kwargs)
        self.constant = constant

    def call(self, inputs, training=None):
        return super().call(inputs * self.constant, training)


def _by_closure(number):
    def scale(x):
        return x * (1 + number)

    return layers.Dense(WIDTH, activation=scale)


def _by_gradient(number):
    @jax.custom_vjp
    def scale(x):
        return keras.ops.tanh(x)

    scale.defvjp(lambda x: (scale(x), x), lambda x, g: (g * (1 + number),))
    return layers.Dense(WIDTH, activation=scale)


UNEQUAL = {
    "operation": lambda n: lambda x: layers.Dense(WIDTH)(x) * (1.0 + n),
    "closure": _by_closure,
    "gradient": _by_gradient,
    "array": lambda n: Scaled(np.full(WIDTH, 1 + n, "float32")),
    "number": lambda n: Scaled(np.float32(1 + n)),
    "variable": lambda n: (
        lambda x: keras.ops.add(
            layers.Dense(WIDTH, "tanh")(x), keras.Variable(np.ones(WIDTH) * n)
        )
    ),
}


@pytest.mark.parametrize("name", combine(UNEQUAL, every=4))
def test_blocks_of_other_constants_are_unrolled_with_a_word(name):
    with pytest.warns(UserWarning, match="blocks differ in their operations"):
        _, found = fit_chain(UNEQUAL[name])
    _, wanted = fit_chain(UNEQUAL[name], is_scanned=False)
    assert_close(found, wanted)


def test_equal_arrays_of_blocks_are_no_difference():
    def layer(number):
        return Scaled(np.linspace(0, 1, WIDTH).astype("float32"))

    _, found = fit_chain(layer)
    _, wanted = fit_chain(layer, is_scanned=False)
    assert_close(found, wanted)


def test_masks_that_blocks_take_off_a_tensor_are_as_unrolled():
    """Keras's attention removes the masks of its keys: for the next blocks."""
    x = IMAGES[:8].copy()
    x[:, -2:] = 0
    found = []
    for is_scanned in (True, False):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((LENGTH, WIDTH))
        memory = layers.Masking()(inputs)
        y = layers.Dense(WIDTH)(inputs)
        for _ in range(BLOCKS):
            y = layers.MultiHeadAttention(2, 4)(y, memory)
        with strategy_of(2).scope():
            model = keras.Model(inputs, y)
            model = keras.models.clone_model(model)
            model.set_weights(
                [np.full(w.shape, 0.1) for w in model.get_weights()]
            )
            if is_scanned:
                ks.experimental.scan_blocks(model)
        if not is_scanned:
            found.append(model.predict(x, batch_size=8, verbose=0))
            continue
        with pytest.warns(UserWarning, match="blocks differ"):
            found.append(model.predict(x, batch_size=8, verbose=0))
    assert_close(*found)


def test_blocks_that_are_frozen_afterwards_stay_frozen():
    def layer(number):
        return layers.BatchNormalization()

    with pytest.warns(UserWarning, match="not equal any more"):
        model, found = fit_chain(layer, frozen=3)
    _, wanted = fit_chain(layer, is_scanned=False, frozen=3)
    assert_close(found, wanted)
    assert not np.any(model.layers[1].moving_mean)


def test_each_run_of_equal_blocks_is_a_loop():
    def layer(number):
        return Counted(WIDTH, "tanh" if number < 4 else "relu")

    def make():
        keras.utils.set_random_seed(1)
        return chain(layer, count=9)

    found = []
    for is_scanned in (True, False):
        strategy = strategy_of(2, is_sharded=True)
        with strategy.scope():
            model = make()
            if is_scanned:
                runs = ks.experimental.scan_blocks(model)
                assert sorted(map(len, runs)) == [4, 5]
            model.compile("sgd", "mse")
        Counted.rows = ()
        x = IMAGES[:16, 0]
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
        assert Counted.rows.count(4) == 9
        program = strategy.compile_step(model, (x[:8], x[:8, :1]))
        # Two runs, forward and backward.
        loops = program.as_text().count(" while(")
        assert loops == (4 if is_scanned else 0)
        found.append([np.asarray(v) for v in model.variables])
    assert_close(*found)


def test_other_dtypes_and_nested_models():
    def layer(number):
        inner = keras.Sequential(
            [keras.Input((WIDTH,)), layers.Dense(WIDTH, "tanh")]
        )
        inner.build((None, WIDTH))
        return inner

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        _, found = fit_chain(layer)
        _, wanted = fit_chain(layer, is_scanned=False)
    finally:
        keras.config.set_dtype_policy(before)
    assert_close(found, wanted, 2e-2)


def test_shapes_are_asked_for_in_a_step():
    """Without a warning: only calls with values are computed in a loop."""
    strategy = strategy_of(2)
    with strategy.scope():
        model = chain(lambda number: layers.Dense(WIDTH))
        ks.experimental.scan_blocks(model)

    def step():
        x = keras.KerasTensor((3, WIDTH))
        return model(np.ones((3, WIDTH), "float32")) * len(
            model.compute_output_spec(x).shape
        )

    found = strategy.experimental_local_results(strategy.run(step))
    wanted = 2 * np.asarray(model(np.ones((3, WIDTH), "float32")))
    for value in found:
        np.testing.assert_allclose(value, wanted, rtol=1e-5)


def test_models_without_equal_blocks_are_refused():
    class Own(keras.Model):
        pass

    for model in (
        chain(lambda n: layers.Dense(WIDTH), count=3),
        chain(lambda n: layers.Dense(WIDTH + n)),
        Own(),
    ):
        with pytest.raises(ValueError, match="at least 4 equal blocks"):
            ks.experimental.scan_blocks(model)
