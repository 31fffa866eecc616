"""Plans for GPUs that are not there.

Each roofline is what a person would write down for the model and the GPU: the
times for operations, for bytes and for links, at the shares of the peak that
docs/planning.md names. A plan may differ from it by a factor 1.5.
"""

import jax
import keras
import pytest
from keras import layers

import keras_strategies as ks
from keras_strategies.planning.compile.candidates import list_default_layouts
from keras_strategies.strategy.compile_only import make_devices
from tests.support.plain_keras import mirrored

pytestmark = pytest.mark.gpu

QUIET = {"progress": False}
# An H100, in operations and bytes a second.
HALF, TF32, MEMORY, NVLINK = 989e12, 495e12, 3350e9, 450e9
PRODUCTS, CONVOLUTIONS, BYTES = 0.65, 0.55, 0.75
LIMIT = 0.75 * 85_017_493_504


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def plan(maker, batch, topology, layout="replicated", **kwargs):
    (step,) = (
        mirrored(1).plan(maker, batch, topology, layout, **QUIET | kwargs).steps
    )
    assert step.error is None
    return step


def is_near(found, expected):
    return expected / 1.5 < found < expected * 1.5


WIDTH, ROWS = 4096, 1024


def perceptron():
    model = keras.Sequential(
        [
            keras.Input((WIDTH,)),
            layers.Dense(WIDTH, "relu"),
            layers.Dense(WIDTH),
        ]
    )
    model.compile("adam", "mse")
    return model


def test_a_perceptron():
    rows = array(ROWS, WIDTH)
    layout = "sharded"
    step = plan(perceptron, (rows, rows), "h100:2x2", layout)
    weights = 2 * WIDTH**2
    flops = 2 * ROWS * weights * 2.5
    # Both products, their kernels' gradients, and one of an input.
    assert step.estimate.compute_seconds == pytest.approx(flops / TF32, 0.01)
    # The update reads weights, slots and gradients, and writes all but these.
    update = 7 * 4 * weights / 2 / MEMORY
    # Weights are gathered within a host, and gradients are summed there.
    inside = 2 * 4 * weights / 2 / NVLINK
    # Each GPU sums its half with that of the other host.
    across = 4 * weights / 2 / 50e9
    assert is_near(step.estimate.link_seconds, inside + across)
    assert is_near(
        step.estimate.seconds, flops / TF32 / PRODUCTS + update / BYTES + across
    )
    strategy = ks.MirroredStrategy.for_topology(
        "h100:2x2", variable_partitioner=ks.experimental.FullySharded()
    )
    with strategy.scope():
        model = perceptron()
    whole = array(4 * ROWS, WIDTH)
    program = strategy.compile_step(model, (whole, whole))
    assert step.bytes_in_all == program.bytes_per_chip
    memory = step.memory
    standing = memory["weights"] + memory["slots"] + memory["other"]
    assert standing == program.argument_bytes + program.output_bytes
    # 32 MiB are left for cuBLAS.
    assert step.limit_bytes == int(LIMIT) - 2**25
    assert step.fits
    assert step.is_full_effort


def image_classifier():
    model = keras.Sequential(
        [
            keras.Input((64, 64, 128)),
            layers.Conv2D(256, 3, padding="same", activation="relu"),
            layers.Conv2D(256, 3, padding="same", activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    return model


def test_a_convolutional_model():
    rows = 128
    batch = array(rows, 64, 64, 128), array(rows, dtype="int32")
    found = mirrored(1).plan(
        image_classifier, batch, "h100:8", "replicated", **QUIET
    )
    (step,) = found.steps
    points = rows * 64 * 64
    # The first has no gradient of its input.
    flops = 2 * points * 9 * 256 * (2 * 128 + 3 * 256)
    assert is_near(step.estimate.compute_seconds, flops / TF32)
    # Each result is written, and read by the next layer and by two gradients;
    # its gradient is written and read twice.
    moved = 4 * points * 256 * 2 * 6 / MEMORY
    expected = flops / TF32 / CONVOLUTIONS + moved / BYTES
    assert is_near(step.estimate.seconds, expected)
    assert "the memory that cuDNN uses is not counted" in str(found).replace(
        "\n", " "
    )


class Block(layers.Layer):
    """A decoder's block, with 12 x width^2 weights in its products."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.norms = [layers.RMSNormalization() for _ in range(2)]
        heads = width // 128
        self.attention = layers.GroupQueryAttention(128, heads, heads)
        self.up = layers.Dense(4 * width, "relu")
        self.down = layers.Dense(width)

    def build(self, shape):
        for norm in self.norms:
            norm.build(shape)
        self.attention.build(shape, shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * shape[-1]))

    def call(self, x):
        y = self.norms[0](x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.down(self.up(self.norms[1](x)))


@pytest.fixture
def bfloat16():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy(before)


def test_a_sharded_decoder(bfloat16):
    length, width, words, gpus, rows = 512, 2048, 4096, 8, 32

    def decoder():
        inputs = keras.Input((length,), dtype="int32")
        x = Block(width)(layers.Embedding(words, width)(inputs))
        model = keras.Model(inputs, layers.Dense(words)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adamw", loss)
        return model

    tokens = array(rows, length, dtype="int32")
    step = plan(decoder, (tokens, tokens), f"h100:{gpus}", "sharded")
    number = rows * length
    block_parameters, head_parameters = 12 * width**2, words * width
    scores = rows * width // 128 * length**2
    products = number * (block_parameters + head_parameters) + 2 * scores * 128
    flops = 2 * 3 * products
    assert is_near(step.estimate.compute_seconds, flops / HALF)
    # Scores, in float32 and in bfloat16, and logits are written and read.
    moved = scores * (4 + 2) * 2 * 2 + number * words * (4 + 2) * 2 * 2
    # Activations of the block, and the update.
    moved += (
        number * width * 2 * 40
        + 7 * 4 * (block_parameters + 2 * head_parameters) / gpus
    )
    assert is_near(
        step.estimate.seconds, flops / HALF / PRODUCTS + moved / MEMORY / BYTES
    )
    weights = block_parameters + 2 * head_parameters
    # Gathered in bfloat16, summed in float32.
    sent = (2 + 4) * weights * (1 - 1 / gpus)
    assert is_near(step.estimate.link_seconds, sent / NVLINK)
    assert step.tokens == length


def deep():
    model = keras.Sequential(
        [keras.Input((8192,)), *(layers.Dense(8192, "tanh") for _ in range(2))]
    )
    model.compile("sgd", "mse")
    return model


def test_the_rows_that_fit_are_those_of_the_gpu_s_memory():
    # XLA computes values again in programs that need 76 percent of the memory,
    # so their bytes would not grow with the rows.
    few, many = (
        plan(deep, (array(n, 8192), array(n, 8192)), "h100:1")
        for n in (2**14, 2**19)
    )
    assert few.fits
    assert many.bytes_in_all > 0.7 * LIMIT
    assert many.max_rows == pytest.approx(few.max_rows, rel=0.02)


def test_more_gpus_than_rows_are_reported():
    rows = array(4, WIDTH)
    found = mirrored(1).plan(
        perceptron,
        (rows, rows),
        "a100:2x4",
        "replicated",
        scale="global",
        **QUIET,
    )
    assert "4 rows are not a multiple of 8 replicas" in str(found)
    assert "network of NVIDIA's machines" in str(found)


def test_replicas_of_several_gpus_are_in_one_host():
    rows = array(8, WIDTH)
    kwargs = {"scale": "global", **QUIET}
    (step,) = (
        mirrored(1)
        .plan(perceptron, (rows, rows), "h100:2x4", "model:8", **kwargs)
        .steps
    )
    assert "in one host. Received: the layout 'model:8' for 4" in step.error


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("h100:1", ["replicated"]),
        ("h100:8", ["replicated", "slots", "sharded"]),
        (
            "h100:2x8",
            [
                *("replicated", "slots", "sharded", "sharded:16"),
                "sharded+model:4",
            ],
        ),
    ],
)
def test_layouts_of_gpus(name, layouts):
    found = list_default_layouts(make_devices(name))
    assert list(map(str, found)) == layouts
