"""What XLA's CPU compiler fuses in steps of ordinary models; as a script.

Run without the flags of XLA by which the other tests compile quickly; LLVM's,
which comes later, change nothing of it. Prints JSON:
for each way that gradients travel and each model, the entries of every
`concatenate` and every `pad` that is fused with a `reduce`, and the bytes of
temporaries and of the weights.
"""

import json
import math
import os
import re
import sys

os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

import keras_strategies as ks
from keras_strategies.spmd import buffers

import keras  # isort: skip
from keras import layers  # isort: skip


def mlp():
    hidden = [layers.Dense(256, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10)])


def resnet():
    def convolved(value):
        value = layers.Conv2D(32, 3, padding="same", use_bias=False)(value)
        return layers.BatchNormalization()(value)

    inputs = keras.Input((8, 8, 32))
    hidden = layers.ReLU()(convolved(inputs))
    value = layers.ReLU()(inputs + convolved(hidden))
    value = layers.GlobalAveragePooling2D()(value)
    return keras.Model(inputs, layers.Dense(10)(value))


def transformer():
    inputs = keras.Input((32,), dtype="int32")
    value = layers.Embedding(64, 64)(inputs)
    attended = layers.MultiHeadAttention(4, 16)(
        value, value, use_causal_mask=True
    )
    value = layers.LayerNormalization()(value + attended)
    hidden = layers.Dense(128, activation="relu")(value)
    value = layers.LayerNormalization()(value + layers.Dense(64)(hidden))
    value = layers.GlobalAveragePooling1D()(value)
    return keras.Model(inputs, layers.Dense(10)(value))


def normalized():
    """A model whose first gradient is a sum over rows."""
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.BatchNormalization(),
            layers.Dense(32, activation="relu"),
            layers.Dense(10),
        ]
    )


def look(make, rows):
    strategy = ks.MirroredStrategy()
    with strategy.scope():
        model = make()
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    x = jax.ShapeDtypeStruct((rows, *model.inputs[0].shape[1:]), "float32")
    y = jax.ShapeDtypeStruct((rows,), "int32")
    program = strategy.compile_step(model, (x, y))
    memory = program.executable.memory_analysis()
    return {
        "fused": fused_copies(program.as_text()),
        "temporaries": memory.temp_size_in_bytes,
        "weights": sum(v.value.nbytes for v in model.trainable_variables),
    }


def fused_copies(text):
    """Entries of each `concatenate` or `pad` that is fused with a `reduce`."""
    found = []
    for computation in text.split("\n\n"):
        shapes = re.findall(
            r"= \w+\[([\d,]*)\]\S* (?:concatenate|pad)\(", computation
        )
        is_entry = computation.lstrip().startswith("ENTRY")
        if " reduce(" in computation and not is_entry:
            found += [math.prod(shape_of(shape)) for shape in shapes]
    return found


def shape_of(text):
    return tuple(int(size) for size in text.split(",") if size)


class OneGroup(buffers.Buffering):
    """All gradients, without the losses and metrics, share a buffer."""

    def groups(self, arrays):
        group = [i for i, array in enumerate(arrays) if array.shape]
        return [group] if group else []


def one_flat_buffer():
    """Lets gradients travel as they once did: concatenated."""
    buffers.IN_PROCESS = OneGroup(max_entries=0, max_shapes=None)
    buffers.pack = lambda arrays, axis: jnp.concatenate(
        [array.ravel() for array in arrays]
    )


def main():
    found = {
        "ours": {
            "mlp": look(mlp, 64),
            "mlp, indivisible": look(mlp, 63),
            "mlp, few rows": look(mlp, 16),
            "resnet": look(resnet, 32),
            "transformer": look(transformer, 16),
            "normalized": look(normalized, 64),
        }
    }
    one_flat_buffer()
    found["flat"] = look(mlp, 64)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
