"""Decoders with divided variables, from the TPU compiler: bytes a chip.

    ./run bench sharded --tpu
    ./run bench sharded --tpu --size 7b --topology v5p:8x8x16 --shards 128
    ./run bench sharded --tpu --replicated
    ./run bench sharded --tpu --size dense --topology v5e:2x4 --full-effort

Compiles on a CPU machine, with libtpu, for a real TPU topology. The models have
no values (`ks.abstract`), so that the largest need little memory here.
"""

import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["KERAS_BACKEND"] = "jax"

import argparse
import dataclasses
import json
import math
import resource

import jax
import keras
from keras import layers

import keras_strategies as ks

LOW_EFFORT = {"exec_time_optimization_effort": -1.0}
BYTES_PER_GB = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """A decoder's shapes.

    Attributes:
      num_layers: Its blocks.
      width: Of a token.
      heads: Of attention.
      hidden: Width of the feed-forward part.
      vocabulary: Number of tokens.
      length: Tokens of a sequence.
      is_gated: Whether the feed-forward part is (Llama's).
    """

    num_layers: int = 24
    width: int = 2048
    heads: int = 16
    hidden: int = 8192
    vocabulary: int = 32768
    length: int = 2048
    is_gated: bool = False


SIZES = {
    "1.3b": Decoder(),
    # Llama 2's.
    "7b": Decoder(
        num_layers=32,
        width=4096,
        heads=32,
        hidden=11008,
        vocabulary=32000,
        length=4096,
        is_gated=True,
    ),
    "llama-1.3b": Decoder(hidden=5632, is_gated=True),
    "narrow": Decoder(
        num_layers=48, width=1024, heads=8, hidden=2816, is_gated=True
    ),
    "tiny": Decoder(
        num_layers=3, width=512, heads=4, hidden=2048, vocabulary=4096
    ),
}


class Block(layers.Layer):
    """Attention and a feed-forward part, before each a normalization."""

    def __init__(self, shapes, **kwargs):
        super().__init__(**kwargs)
        self.norm1 = layers.RMSNormalization(name="norm1")
        self.norm2 = layers.RMSNormalization(name="norm2")
        self.attention = layers.GroupQueryAttention(
            shapes.width // shapes.heads,
            shapes.heads,
            shapes.heads,
            use_bias=False,
            name="attention",
        )
        self.gate = None
        if shapes.is_gated:
            self.gate = _dense(shapes.hidden, "gate", "silu")
        self.up = _dense(shapes.hidden, "up", None if self.gate else "gelu")
        self.down = _dense(shapes.width, "down")

    def build(self, shape):
        self.norm1.build(shape)
        self.norm2.build(shape)
        self.attention.build(shape, shape)
        self.up.build(shape)
        if self.gate:
            self.gate.build(shape)
        self.down.build((*shape[:-1], self.up.units))
        super().build(shape)

    def call(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, use_causal_mask=True)
        y = self.norm2(x)
        hidden = self.up(y)
        if self.gate:
            hidden = hidden * self.gate(y)
        return x + self.down(hidden)


def _dense(units, name, activation=None):
    return layers.Dense(units, activation, use_bias=False, name=name)


def decoder(shapes, remat=True):
    """A decoder; each block is computed again in the backward pass."""
    names = [f"block{i}" for i in range(shapes.num_layers)]
    inputs = keras.Input((shapes.length,), dtype="int32")
    x = layers.Embedding(shapes.vocabulary, shapes.width, name="embed")(inputs)
    mode = "list_of_layers" if remat else None
    with keras.RematScope(mode=mode, layer_names=names):
        for name in names:
            x = Block(shapes, name=name)(x)
    x = layers.RMSNormalization(name="norm")(x)
    return keras.Model(inputs, _dense(shapes.vocabulary, "head")(x))


def dense_stack(remat=True):
    """200 MB of weights: that of tests/parity/test_sharded_memory.py."""
    names = [f"dense{i}" for i in range(12)]
    inputs = keras.Input((2048,))
    x = inputs
    mode = "list_of_layers" if remat else None
    with keras.RematScope(mode=mode, layer_names=names):
        for name in names:
            x = layers.Dense(2048, "tanh", name=name)(x)
    return keras.Model(inputs, x)


def _decoder_step(strategy, shapes, rows, remat, is_scanned):
    with strategy.scope(), ks.abstract():
        model = decoder(shapes, remat)
        ks.experimental.scan_blocks(model, is_scanned)
        model.compile(
            keras.optimizers.AdamW(1e-4),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    rows *= strategy.num_replicas_in_sync
    tokens = jax.ShapeDtypeStruct((rows, shapes.length), "int32")
    return model, (tokens, tokens)


def _dense_step(strategy, rows, remat, is_scanned):
    with strategy.scope(), ks.abstract():
        model = dense_stack(remat)
        ks.experimental.scan_blocks(model, is_scanned)
        model.compile("adam", "mse")
    rows *= strategy.num_replicas_in_sync
    x = jax.ShapeDtypeStruct((rows, 2048), "float32")
    return model, (x, x)


def compile_size(
    size,
    topology,
    shards=None,
    *,
    rows=1,
    remat=True,
    is_divided=True,
    is_scanned=False,
    options=None,
):
    """Compiles the train step of one of SIZES, or of a `Decoder`.

    Args:
      size: One of SIZES, "dense", or a `Decoder`.
      topology: The slice.
      shards: Chips of a group that divides variables; None: by the slice.
      rows: Of a batch, on each chip.
      remat: Whether blocks are computed again in the backward pass.
      is_divided: Whether the chips divide variables at all.
      is_scanned: Whether equal blocks are computed in a loop.
      options: XLA's.

    Returns:
      The number of trainable entries, and the program.
    """
    partitioner = ks.experimental.FullySharded(shards=shards)
    strategy = ks.TPUStrategy.for_topology(
        topology, variable_partitioner=partitioner if is_divided else None
    )
    if size == "dense":
        model, batch = _dense_step(strategy, rows, remat, is_scanned)
    else:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            shapes = SIZES.get(size, size)
            model, batch = _decoder_step(
                strategy, shapes, rows, remat, is_scanned
            )
        finally:
            keras.config.set_dtype_policy(before)
    count = sum(math.prod(v.shape) for v in model.trainable_variables)
    program = strategy.compile_step(model, batch, compiler_options=options)
    return count, program


def facts(count, program):
    """What a program needs, in GB of a chip and of whole arrays."""
    sent = program.collective_bytes
    return {
        "parameters": count,
        "arguments": program.argument_bytes / BYTES_PER_GB,
        "temporaries": program.temporary_bytes / BYTES_PER_GB,
        "outputs": program.output_bytes / BYTES_PER_GB,
        "in all": program.bytes_per_chip / BYTES_PER_GB,
        "collectives": {
            kind: [n, sent[kind] / BYTES_PER_GB]
            for kind, n in program.collectives.items()
            if n
        },
        "seconds to trace": program.trace_seconds,
        "seconds to compile": program.compile_seconds,
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * 1024
        / BYTES_PER_GB,
    }


def print_facts(found):
    from rich.console import Console
    from rich.table import Table

    table = Table("of the train step", "")
    table.add_row("parameters", f"{found['parameters']:,}")
    for name in ("arguments", "temporaries", "outputs", "in all"):
        table.add_row(f"GB a chip: {name}", f"{found[name]:.3f}")
    for kind, (n, gigabytes) in found["collectives"].items():
        table.add_row(kind, f"{n}, {gigabytes:.3f} GB")
    for name in ("seconds to trace", "seconds to compile"):
        table.add_row(name, f"{found[name]:.1f}")
    table.add_row("GB of this machine, at most", f"{found['host']:.2f}")
    Console().print(table)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tpu", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--size", default="1.3b", choices=[*SIZES, "dense"])
    parser.add_argument("--layers", type=int, help="others than the size's")
    parser.add_argument("--topology", default="v5e:16x16")
    parser.add_argument("--shards", type=int, help="chips of a group")
    parser.add_argument("--rows", type=int, default=1, help="on each chip")
    parser.add_argument("--replicated", action="store_true")
    parser.add_argument("--no-remat", action="store_true")
    parser.add_argument(
        "--scan", action="store_true", help="compute blocks in a loop"
    )
    parser.add_argument(
        "--full-effort", action="store_true", help="compile as for running"
    )
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--text", help="write the program to this file")
    options = parser.parse_args(arguments)
    size = options.size
    if options.layers:
        size = dataclasses.replace(SIZES[size], num_layers=options.layers)
    count, program = compile_size(
        size,
        options.topology,
        options.shards,
        rows=options.rows,
        remat=not options.no_remat,
        is_divided=not options.replicated,
        is_scanned=options.scan,
        options=None if options.full_effort else LOW_EFFORT,
    )
    found = facts(count, program)
    print_facts(found)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)
    if options.text:
        with open(options.text, "w") as file:
            file.write(program.as_text())


if __name__ == "__main__":
    main()
