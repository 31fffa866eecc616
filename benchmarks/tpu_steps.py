"""Train steps of decoders for TPUs beside raw JAX programs.

    ./run bench tpu_steps
    ./run bench tpu_steps --layers 4 --length 8192
    ./run bench tpu_steps --size narrow --peers ours scanned
    ./run bench tpu_steps --layers 1 --full-effort

Compiled on a CPU machine, with libtpu, for a real TPU topology, one after the
other. Peers: `ours`; `scanned` (with `ks.experimental.scan_blocks`); `raw` and
`raw-scanned`: shard_map over groups of chips that divide weights, each block
under jax.checkpoint gathers its weights in bfloat16, gradients are scattered in
bfloat16, and attention is JAX's splash kernel.

Seconds are XLA's own estimate at low effort, which counts the body of a loop
once and no kernels: compare them between unrolled programs. Cycles are summed
over the final instructions, loops times their turns: compare them at full
effort.
"""

import sharded_tpu  # isort: skip  (sets the environment before jax starts)

import argparse
import dataclasses
import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import keras_strategies as ks
from keras_strategies.passes import hlo
from keras_strategies.planning.program.walk import count_iterations
from keras_strategies.spmd.compiled import measure_memory

PEERS = ("ours", "scanned", "raw", "raw-scanned")
ROWS = ("data", "fsdp")
BLOCK = 512


def weights_of(shapes):
    """Shapes of a block's weights, and the dimension that chips divide."""
    width, heads, depth = (
        shapes.width,
        shapes.heads,
        shapes.width // shapes.heads,
    )
    heads_in, heads_out = (width, heads, depth), (heads, depth, width)
    return {
        **{name: (heads_in, 0) for name in ("query", "key", "value")},
        "out": (heads_out, 2),
        "gate": ((width, shapes.hidden), 0),
        "up": ((width, shapes.hidden), 0),
        "down": ((shapes.hidden, width), 1),
        **{name: ((width,), None) for name in ("norm1", "norm2")},
    }


@functools.lru_cache
def kernel(heads, length):
    mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
    sizes = {
        f"block_{n}": min(BLOCK, length) for n in (*names, "q_dq", "kv_dq")
    }
    return kernels.make_splash_mha(
        mask,
        head_shards=1,
        q_seq_shards=1,
        block_sizes=kernels.BlockSizes(**sizes),
    )


def attend(query, key, value):
    """Causal attention of arrays of shape (batch, length, heads, depth)."""
    query = query * query.shape[-1] ** -0.5
    query, key, value = (jnp.swapaxes(a, 1, 2) for a in (query, key, value))
    with jax.ensure_compile_time_eval():
        attention = kernel(query.shape[1], query.shape[2])
    return jnp.swapaxes(jax.vmap(attention)(query, key, value), 1, 2)


def normalize(x, scale):
    y = x.astype(jnp.float32)
    mean = jnp.mean(y * y, -1, keepdims=True)
    return (y * jax.lax.rsqrt(mean + 1e-6) * scale).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather(weight, dim):
    whole = weight.astype(jnp.bfloat16)
    return jax.lax.all_gather(whole, "fsdp", axis=dim, tiled=True)


def _scatter(dim, _, gradient):
    total = jax.lax.psum_scatter(
        gradient, "fsdp", scatter_dimension=dim, tiled=True
    )
    return (total.astype(jnp.float32),)


gather.defvjp(lambda weight, dim: (gather(weight, dim), None), _scatter)


def run_block(shapes, x, weights):
    of = weights_of(shapes)
    p = {
        name: value if of[name][1] is None else gather(value, of[name][1])
        for name, value in weights.items()
    }
    y = normalize(x, p["norm1"])
    heads = [
        jnp.einsum("btd,dhe->bthe", y, p[name])
        for name in ("query", "key", "value")
    ]
    x = x + jnp.einsum("bthe,hed->btd", attend(*heads), p["out"])
    y = normalize(x, p["norm2"])
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def loss_of(shapes, is_scanned, weights, x, y):
    hidden = gather(weights["embed"], 1)[x]
    block = jax.checkpoint(
        functools.partial(run_block, shapes), prevent_cse=not is_scanned
    )
    if is_scanned:
        hidden, _ = jax.lax.scan(
            lambda h, p: (block(h, p), None), hidden, weights["blocks"]
        )
    else:
        for each in weights["blocks"]:
            hidden = block(hidden, each)
    hidden = normalize(hidden, weights["norm"])
    logits = (hidden @ gather(weights["head"], 0)).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, y[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def adam(weights, slots, gradients, count):
    def update(weight, first, second, gradient):
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient * gradient
        rate = 1e-4 * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        step = rate * first / (jnp.sqrt(second) + 1e-7)
        return weight - step, first, second

    found = jax.tree.map(update, weights, *slots, gradients)
    outer = jax.tree.structure(weights)
    return jax.tree.transpose(outer, jax.tree.structure((0, 0, 0)), found)


def compile_raw(shapes, topology, shards, is_scanned, options):
    """Compiles the raw step, for the same order of chips as ours."""
    strategy = ks.TPUStrategy.for_topology(
        topology, variable_partitioner=ks.experimental.FullySharded(shards)
    )
    devices = np.array(strategy._runtime.mesh.devices)
    shards = strategy._runtime.mesh.shards
    mesh = Mesh(devices.reshape(-1, shards), ROWS)

    def of(shape, dim, *leading):
        spec = [None] * len(shape)
        if dim is not None:
            spec[dim] = "fsdp"
        sharding = NamedSharding(
            mesh, PartitionSpec(*[None] * len(leading), *spec)
        )
        return jax.ShapeDtypeStruct(
            (*leading, *shape), jnp.float32, sharding=sharding
        )

    block = weights_of(shapes)
    if is_scanned:
        leading = shapes.num_layers
        blocks = {k: of(*each, leading) for k, each in block.items()}
    else:
        blocks = [
            {k: of(*each) for k, each in block.items()}
            for _ in range(shapes.num_layers)
        ]
    weights = {
        "embed": of((shapes.vocabulary, shapes.width), 1),
        "blocks": blocks,
        "norm": of((shapes.width,), None),
        "head": of((shapes.width, shapes.vocabulary), 0),
    }
    specs = jax.tree.map(lambda w: w.sharding.spec, weights)

    def local(weights, x, y):
        loss, gradients = jax.value_and_grad(
            lambda w: loss_of(shapes, is_scanned, w, x, y) / devices.size
        )(weights)
        gradients = jax.tree.map(
            lambda g, s: jax.lax.psum(g, "data" if "fsdp" in s else ROWS),
            gradients,
            specs,
        )
        return jax.lax.psum(loss, ROWS), gradients

    def step(state, x, y):
        weights, first, second, count = state
        loss, gradients = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, PartitionSpec(ROWS), PartitionSpec(ROWS)),
            out_specs=(PartitionSpec(), specs),
            check_vma=False,
        )(weights, x, y)
        count = count + 1
        new = adam(weights, (first, second), gradients, count)
        return (*new, count), loss

    whole = NamedSharding(mesh, PartitionSpec())
    count = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
    state = (weights, weights, weights, count)
    rows = jax.ShapeDtypeStruct(
        (devices.size, shapes.length),
        jnp.int32,
        sharding=NamedSharding(mesh, PartitionSpec(ROWS)),
    )
    shardings = jax.tree.map(lambda a: a.sharding, state)
    start = time.perf_counter()
    lowered = jax.jit(
        step, donate_argnums=0, out_shardings=(shardings, whole)
    ).lower(state, rows, rows)
    middle = time.perf_counter()
    executable = lowered.compile(compiler_options=options)
    return executable, middle - start, time.perf_counter() - middle


_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TOO_MANY = 10**12


def count_cycles(text):
    """The cycles of the final instructions, loops times their turns."""
    program = hlo.parse(text)

    @functools.cache
    def total(computation):
        count = 0
        for each in computation.instructions:
            found = _CYCLES.search(each.attributes)
            if found and int(found[1]) < _TOO_MANY:
                count += int(found[1])
            if each.opcode == "while":
                turns = count_iterations(program, computation, each)
                if turns is None:
                    raise ValueError(f"unknown turns: {each.name}")
                body = program.computations[each.get_called("body")]
                count += turns * total(body)
        return count

    return total(program.entry)


def facts(executable, trace_seconds, compile_seconds):
    memory = executable.memory_analysis()
    cost = executable.cost_analysis() or {}
    temporary = measure_memory(executable)
    return {
        "arguments, GB": memory.argument_size_in_bytes / 1e9,
        "temporaries, GB": temporary["temporary_bytes"] / 1e9,
        "code, MB": memory.generated_code_size_in_bytes / 1e6,
        "XLA's estimate, ms": max(cost.get("optimal_seconds", 0), 0) * 1e3,
        "Mcycles": count_cycles(executable.as_text()) / 1e6,
        "seconds to trace": trace_seconds,
        "seconds to compile": compile_seconds,
    }


def measure(peer, shapes, options, effort):
    if peer.startswith("raw"):
        is_scanned = peer == "raw-scanned"
        return facts(
            *compile_raw(
                shapes, options.topology, options.shards, is_scanned, effort
            )
        )
    _, program = sharded_tpu.compile_size(
        shapes,
        options.topology,
        options.shards,
        is_scanned=peer == "scanned",
        options=effort,
    )
    return facts(
        program.executable, program.trace_seconds, program.compile_seconds
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    gated = [name for name, s in sharded_tpu.SIZES.items() if s.is_gated]
    parser.add_argument("--size", default="llama-1.3b", choices=gated)
    parser.add_argument("--layers", type=int, help="others than the size's")
    parser.add_argument("--length", type=int, help="tokens of a sequence")
    parser.add_argument("--topology", default="v5e:16x16")
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--peers", nargs="+", default=PEERS, choices=PEERS)
    parser.add_argument("--full-effort", action="store_true")
    options = parser.parse_args()
    changed = {"num_layers": options.layers, "length": options.length}
    shapes = dataclasses.replace(
        sharded_tpu.SIZES[options.size],
        **{name: value for name, value in changed.items() if value},
    )
    effort = None if options.full_effort else sharded_tpu.LOW_EFFORT
    found = {}
    for peer in options.peers:
        found[peer] = measure(peer, shapes, options, effort)
        print(peer, found[peer], flush=True)
    table = Table(f"{options.size}, {shapes.num_layers} blocks", *found)
    for name in next(iter(found.values())):
        values = [f"{figures[name]:,.3f}" for figures in found.values()]
        table.add_row(name, *values)
    Console().print(table)


if __name__ == "__main__":
    main()
