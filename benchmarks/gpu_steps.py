"""Collectives and memory of train steps on GPUs, beside plain GSPMD.

Compiles on a machine without a GPU, with JAX's CUDA plugin. The peer is Keras's
stateless step in `jax.jit`, whose weights and slots are sharded by their first
divisible dimension (FSDP) or replicated, and XLA's partitioner does the rest.

    ./run bench gpu_steps                  # sharded: MLP and decoder
    ./run bench gpu_steps --replicated     # ResNet50
    ./run bench gpu_steps --models decoder --topology h100:8x8

"sent" are the bytes of the arrays that a GPU sends: twice those of all-reduces.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import keras
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import keras_strategies as ks
from keras_strategies.gpu.topology_devices import (
    complete_options,
    make_gpu_devices,
)
from keras_strategies.planning.program.costs import Costs

layers = keras.layers
MIN_SIZE = 2**14
SENT_TWICE = "all-reduce"
Shapes = tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]


def mlp(width: int = 4096) -> keras.Model:
    """Returns dense layers of 38 million weights."""
    dense = [layers.Dense(width, "relu") for _ in range(3)]
    return keras.Sequential([keras.Input((1024,)), *dense, layers.Dense(16)])


def decoder(
    width: int = 1024, blocks: int = 4, length: int = 1024, words: int = 32000
) -> keras.Model:
    """Returns a causal transformer of 116 million weights."""
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(words, width)(tokens)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(16, width // 16)(
            y, y, use_causal_mask=True
        )
        y = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x += layers.Dense(width)(y)
    x = layers.LayerNormalization()(x)
    return keras.Model(tokens, layers.Dense(words, dtype="float32")(x))


def resnet50() -> keras.Model:
    """Returns ResNet50, whose outputs are logits."""
    return keras.applications.ResNet50(weights=None, classifier_activation=None)


def make_batch(model: keras.Model, rows: int) -> Shapes:
    """Returns the shapes of a batch of inputs and of classes."""
    (tokens,) = model.inputs
    classes = model.outputs[0].shape[1:-1]
    return (
        jax.ShapeDtypeStruct((rows, *tokens.shape[1:]), tokens.dtype),
        jax.ShapeDtypeStruct((rows, *classes), "int32"),
    )


MODELS: dict[str, tuple[Callable[[], keras.Model], int]] = {
    "mlp": (mlp, 128),
    "decoder": (decoder, 4),
    "resnet50": (resnet50, 64),
}
"""Functions that make models, and the rows of each GPU."""


def compile_ours(
    make: Callable[[], keras.Model], rows: int, topology: str, partitioner: Any
) -> Costs:
    """Compiles the step of a strategy."""
    strategy = ks.MirroredStrategy.for_topology(
        topology, variable_partitioner=partitioner
    )
    with strategy.scope(), ks.abstract():
        model = make()
        model.compile(make_optimizer(), make_loss())
    batch = make_batch(model, rows * strategy.num_replicas_in_sync)
    program = strategy.compile_step(model, batch)
    return Costs.measure(program.executable, program.compile_seconds)


def compile_raw(
    make: Callable[[], keras.Model], rows: int, topology: str, is_sharded: bool
) -> Costs:
    """Compiles Keras's stateless step, partitioned by XLA."""
    devices = make_gpu_devices(topology)
    mesh = Mesh(devices, ("replica",))
    with ks.abstract():
        model, optimizer, loss = make(), make_optimizer(), make_loss()
        optimizer.build(model.trainable_variables)

    def shape(value: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)

    def place(variables: list[keras.Variable]) -> list[jax.ShapeDtypeStruct]:
        count = len(devices) if is_sharded else 0
        return [shape(v, choose_spec(tuple(v.shape), count)) for v in variables]

    state = [
        place(variables)
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
        )
    ]
    batch = make_batch(model, rows * len(devices))
    split = [shape(leaf, PartitionSpec("replica")) for leaf in batch]
    shardings = jax.tree.map(lambda s: s.sharding, state)
    jitted = jax.jit(
        make_raw_step(model, optimizer, loss),
        donate_argnums=(0, 1, 2),
        out_shardings=(NamedSharding(mesh, PartitionSpec()), *shardings),
    )
    lowered = jitted.lower(*state, *split)
    start = time.perf_counter()
    compiled = lowered.compile(compiler_options=complete_options(None, devices))
    return Costs.measure(compiled, time.perf_counter() - start)


def make_raw_step(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    loss: keras.losses.Loss,
) -> Callable[..., Any]:
    """Returns a step of state and batch, by Keras's stateless functions."""

    def step(weights: Any, others: Any, slots: Any, x: Any, y: Any) -> Any:
        def compute_loss(weights: Any) -> Any:
            outputs, new = model.stateless_call(
                weights, others, x, training=True
            )
            return loss(y, outputs), new

        compute = jax.value_and_grad(compute_loss, has_aux=True)
        (value, new), grads = compute(weights)
        weights, slots = optimizer.stateless_apply(slots, grads, weights)
        return value, weights, new, slots

    return step


def choose_spec(shape: tuple[int, ...], count: int) -> PartitionSpec:
    """Returns how FSDP over `count` GPUs shards a variable; 0: replicated."""
    if count and math.prod(shape) >= MIN_SIZE:
        for dim, size in enumerate(shape):
            if size % count == 0:
                return PartitionSpec(*[None] * dim, "replica")
    return PartitionSpec()


def make_optimizer() -> keras.optimizers.Optimizer:
    """Returns a new optimizer."""
    return keras.optimizers.AdamW(1e-3)


def make_loss() -> keras.losses.Loss:
    """Returns the loss of logits and classes."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def count_sent(figures: Costs) -> float:
    """Returns the bytes that a GPU sends."""
    return sum(
        size * (2 if kind == SENT_TWICE else 1)
        for kind, size in figures.sent.items()
    )


def compare(
    make: Callable[[], keras.Model],
    rows: int,
    topology: str = "h100:8",
    *,
    is_sharded: bool = True,
    policy: str = "mixed_bfloat16",
) -> dict[str, Costs]:
    """Compiles a step of each kind, and returns their figures by name."""
    kind = ks.experimental.Replicated
    default = None
    if is_sharded:
        kind = ks.experimental.FullySharded
        default = ks.experimental.FullySharded()
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        return {
            "raw": compile_raw(make, rows, topology, is_sharded),
            "ours": compile_ours(make, rows, topology, default),
            "ours, sums in bfloat16": compile_ours(
                make, rows, topology, kind(reduce_dtype="bfloat16")
            ),
        }
    finally:
        keras.config.set_dtype_policy(before)


def show(name: str, found: dict[str, Costs]) -> Table:
    """Returns a table of the figures of a model's steps."""
    table = Table(title=name)
    for title in ("step", "collectives", "MB sent", "temporary MB", "seconds"):
        table.add_column(title)
    raw = found["raw"]
    for kind, figures in found.items():
        collectives = ", ".join(
            f"{n} {of} ({figures.sent[of] / 1e6:.1f} MB)"
            for of, n in figures.counts.items()
        )
        table.add_row(
            kind,
            collectives,
            format_ratio(count_sent(figures), count_sent(raw)),
            format_ratio(figures.temporary_bytes, raw.temporary_bytes),
            f"{figures.compile_seconds:.0f}",
        )
    return table


def format_ratio(size: float, other: float) -> str:
    """Formats bytes in MB, and their ratio to those of the peer."""
    return f"{size / 1e6:.1f} ({size / other:.2f}x)"


def main() -> None:
    """Compiles the steps, and prints a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--topology", default="h100:8")
    parser.add_argument("--policy", default="mixed_bfloat16")
    parser.add_argument("--replicated", action="store_true")
    options = parser.parse_args()
    # Plain Keras chooses kernels for this machine's devices, steps of a
    # strategy for the strategy's. So that both have the same: none.
    keras.config.disable_flash_attention()
    default = ["resnet50"] if options.replicated else ["mlp", "decoder"]
    console = Console(width=150)
    for name in options.models or default:
        make, rows = MODELS[name]
        found = compare(
            make,
            rows,
            options.topology,
            is_sharded=not options.replicated,
            policy=options.policy,
        )
        title = f"{name}, {options.topology}, {options.policy}"
        console.print(show(title, found))


if __name__ == "__main__":
    main()
