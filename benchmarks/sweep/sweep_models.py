"""Models and data of the sweep's points (sweep_points.py)."""

import math

import sweep_points

WORDS = 64
MANY_WORDS = 100_000
TOKENS = 32
IMAGE = (16, 16, 3)
CLASSES = 10
# Batches that differ; more of them are copies, made in no time.
BATCHES = 8


def data(point, steps):
    """Arrays for so many whole batches, the same for every peer."""
    return rows_of(point, sweep_points.batch_rows(point) * steps)


def rows_of(point, count):
    """Arrays of so many rows."""
    import numpy as np

    random = np.random.default_rng(0)
    made = min(count, sweep_points.batch_rows(point) * BATCHES)
    family = sweep_points.FAMILY[point["base"]]
    shape = (made, *input_shape(family))
    if point["layer"] == "Embedding":
        x = random.integers(0, MANY_WORDS, shape, dtype="int32")
    elif family == "transformer":
        x = random.integers(0, WORDS, shape, dtype="int32")
    else:
        x = random.standard_normal(shape, dtype="float32")
    if family == "transformer":
        y = random.integers(0, WORDS, shape, dtype="int32")
    else:
        y = random.integers(0, CLASSES, made, dtype="int32")
    copies = math.ceil(count / made)
    return tuple(np.concatenate([a] * copies)[:count] for a in (x, y))


def input_shape(family):
    return {"mlp": (32,), "cnn": IMAGE, "transformer": (TOKENS,)}[family]


def compiled(point, norm=None):
    """A model of the point, compiled; `norm`: see `network`."""
    import keras

    model = network(point, norm)
    accumulated = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    model.compile(
        optimizer=optimizer(point["optimizer"]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[accumulated],
        steps_per_execution=point["spe"],
    )
    return model


def optimizer(name):
    from keras import optimizers

    return {
        "SGD": lambda: optimizers.SGD(1e-2),
        "Adam": lambda: optimizers.Adam(1e-3),
        "AdamW_EMA": lambda: optimizers.AdamW(1e-3, use_ema=True),
        "Lamb": lambda: optimizers.Lamb(1e-3),
        "Adafactor": lambda: optimizers.Adafactor(1e-3),
        "Adam_accumulating": lambda: optimizers.Adam(
            1e-3, gradient_accumulation_steps=2
        ),
    }[name]()


def parts(point, norm=None):
    """What a loop of one's own needs."""
    import keras

    model = network(point, norm)
    made = optimizer(point["optimizer"])
    made.build(model.trainable_variables)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss_of = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )
    return model, made, accuracy, loss_of


def by_row(losses):
    """Losses of rows: those of a sequence's words are averaged."""
    import keras

    if len(losses.shape) == 1:
        return losses
    return keras.ops.mean(losses, axis=-1)


def network(point, norm=None):
    """A model of the point.

    Args:
      point: See sweep_points.py.
      norm: The class for a BatchNormalization over all replicas; None for
        Keras's, which is told so by its argument (in our scope).
    """
    import keras

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(point["dtype"])
    try:
        return make_network(point, norm)
    finally:
        keras.config.set_dtype_policy(before)


def make_network(point, norm):
    import keras
    from keras import layers

    base, width = point["base"], point["width"]
    family = sweep_points.FAMILY[base]
    is_embedded = point["layer"] == "Embedding"
    inputs = keras.Input(
        input_shape(family),
        dtype="int32" if is_embedded or family == "transformer" else "float32",
    )
    value = inputs
    if family == "transformer":
        words = MANY_WORDS if is_embedded else WORDS
        value = layers.Embedding(words, width)(value)
    elif is_embedded:
        size = 16 if family == "mlp" else 1
        value = layers.Embedding(MANY_WORDS, size)(value)
        flat = (-1,) if family == "mlp" else (16, 16, 3)
        value = layers.Reshape(flat)(value)
    hidden = {
        "mlp": lambda v: dense_layers(v, width, 3),
        "deep_mlp": lambda v: dense_layers(v, width, 16),
        "cnn": lambda v: convolutions(v, width),
        "resnet": lambda v: residual_blocks(v, width),
        "transformer": lambda v: attention_blocks(v, width, 2),
        "deep_transformer": lambda v: attention_blocks(v, width, 6),
    }[base]
    value = hidden(value)
    if point["layer"] and not is_embedded:
        value = with_layer(point["layer"], value, norm)
    if family == "cnn":
        value = layers.Flatten()(value)
    classes = WORDS if family == "transformer" else CLASSES
    return keras.Model(inputs, layers.Dense(classes, dtype="float32")(value))


def dense_layers(value, width, depth):
    from keras import layers

    for _ in range(depth):
        value = layers.Dense(width, activation="relu")(value)
    return value


def convolutions(value, width):
    from keras import layers

    for filters in (width, 2 * width):
        value = layers.Conv2D(
            filters, 3, strides=2, padding="same", activation="relu"
        )(value)
    return value


def residual_blocks(value, width):
    """Two stages of two blocks, each with two BatchNormalizations."""
    from keras import layers

    def convolved(value, filters, size, strides=1):
        value = layers.Conv2D(
            filters, size, strides=strides, padding="same", use_bias=False
        )(value)
        return layers.BatchNormalization()(value)

    value = layers.ReLU()(convolved(value, width, 3, 2))
    for filters, strides in ((width, 1), (width, 1), (2 * width, 2)) + (
        (2 * width, 1),
    ):
        hidden = layers.ReLU()(convolved(value, filters, 3, strides))
        hidden = convolved(hidden, filters, 3)
        if strides == 2:
            value = convolved(value, filters, 1, strides)
        value = layers.ReLU()(value + hidden)
    return value


def attention_blocks(value, width, depth):
    from keras import layers

    for _ in range(depth):
        attended = layers.MultiHeadAttention(4, width // 4)(
            value, value, use_causal_mask=True
        )
        value = layers.LayerNormalization()(value + attended)
        hidden = layers.Dense(2 * width, activation="relu")(value)
        value = layers.LayerNormalization()(value + layers.Dense(width)(hidden))
    return value


def with_layer(name, value, norm):
    """The layer put in; the value keeps its shape.

    What is not of the rank that the layer wants is reshaped for it.
    """
    from keras import layers

    shape = value.shape[1:]
    if name in ("Conv1D", "LSTM", "GRU", "MultiHeadAttention"):
        value = layers.Reshape(sequence_shape(shape))(value)
    elif name in ("Conv2D", "DepthwiseConv2D"):
        value = layers.Reshape(image_shape(shape))(value)
    size = value.shape[-1]
    if name == "MultiHeadAttention":
        value = layers.MultiHeadAttention(4, max(size // 4, 1))(value, value)
        return layers.Reshape(shape)(value)
    synchronized = norm or (
        lambda: layers.BatchNormalization(synchronized=True)
    )
    layer = {
        "Dense": lambda: layers.Dense(size, activation="relu"),
        "Conv1D": lambda: layers.Conv1D(size, 3, padding="same"),
        "Conv2D": lambda: layers.Conv2D(size, 3, padding="same"),
        "DepthwiseConv2D": lambda: layers.DepthwiseConv2D(3, padding="same"),
        "LSTM": lambda: layers.LSTM(size, return_sequences=True),
        "GRU": lambda: layers.GRU(size, return_sequences=True),
        "BatchNormalization": layers.BatchNormalization,
        "SyncBatchNormalization": synchronized,
        "LayerNormalization": layers.LayerNormalization,
        "Dropout": lambda: layers.Dropout(0.3),
    }[name]()
    return layers.Reshape(shape)(layer(value))


def sequence_shape(shape):
    """The shape as a sequence: 8 steps of a vector, pixels of an image."""
    if len(shape) == 1:
        return (8, shape[0] // 8)
    return (-1, shape[-1])


def image_shape(shape):
    """The shape as an image: 4 by 4 of a vector, 4 columns of a sequence."""
    if len(shape) == 1:
        return (4, 4, shape[0] // 16)
    if len(shape) == 2:
        return (shape[0] // 4, 4, shape[1])
    return shape


def has_convolutions(point):
    return sweep_points.FAMILY[point["base"]] == "cnn" or "Conv" in (
        point["layer"] or ""
    )
