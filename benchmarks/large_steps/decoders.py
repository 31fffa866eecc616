"""Train steps of keras-hub's decoders: masks that are arrays, and many words.

Each block is rematerialized. Peers: `ours`, with `blocked_head`; `whole`, with
Keras's loss, which stores all logits; `raw`, a program without Keras that
gathers each weight in bfloat16 within a block, calls the kernel of attention
with a causal mask or a window, and computes the loss by blocks of words.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import keras_strategies as ks
from benchmarks.large_steps import measure
from keras_strategies.passes.hlo import KERNELS

HALF = jnp.bfloat16
SHARDS, DEPTH, BLOCKS = 32, 2, 16
LLAMA = {
    "vocabulary_size": 128256,
    "num_query_heads": 32,
    "num_key_value_heads": 8,
    "hidden_dim": 4096,
    "intermediate_dim": 14336,
}
GEMMA = {
    "vocabulary_size": 256000,
    "num_query_heads": 8,
    "num_key_value_heads": 1,
    "hidden_dim": 2048,
    "intermediate_dim": 32768,
    "head_dim": 256,
}
SHORT = LLAMA | {"vocabulary_size": 32000}
MISTRAL = SHORT | {"sliding_window": 4096}
NAMES = [
    f"{name}_{k}"
    for name in ("transformer_layer", "decoder_block")
    for k in range(DEPTH)
]


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A task of keras-hub with two blocks, and one sequence on each chip.

    Attributes:
      name: The prefix of its classes.
      sizes: The arguments of its backbone.
    """

    name: str
    sizes: dict
    peers: tuple[str, ...]
    length: int = 8192
    topology: str = "v5p:4x4x4"

    def measure(self, peer, is_low=True):
        """Compiles the step of a peer."""
        keras.config.set_dtype_policy("mixed_bfloat16")
        partitioner = ks.experimental.FullySharded(SHARDS)
        strategy = ks.TPUStrategy.for_topology(
            self.topology, variable_partitioner=partitioner
        )
        devices = np.array(strategy.mesh.devices).ravel()
        if peer == "raw":
            lowered = RawLlama(devices, self.sizes, self.length).lower()
            return measure.measure(lowered, devices, is_low)
        with strategy.scope(), ks.abstract():
            task = self._make_task()
            if peer == "ours":
                ks.experimental.blocked_head(task)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            accuracy = keras.metrics.SparseCategoricalAccuracy()
            optimizer = keras.optimizers.Adam(1e-4)
            task.compile(optimizer, loss, weighted_metrics=[accuracy])
        shape = devices.size, self.length
        tokens = jax.ShapeDtypeStruct(shape, "int32")
        padding = jax.ShapeDtypeStruct(shape, "bool")
        batch = {"token_ids": tokens, "padding_mask": padding}, tokens
        options = dict(measure.LOW_EFFORT) if is_low else None
        program = strategy.compile_step(task, batch, compiler_options=options)
        seconds = program.compile_seconds
        return measure.read(program.executable, devices, seconds)

    def _make_task(self):
        import keras_hub

        models = keras_hub.models
        with keras.RematScope("list_of_layers", layer_names=NAMES):
            backbone = getattr(models, f"{self.name}Backbone")
            made = backbone(num_layers=DEPTH, **self.sizes)
            return getattr(models, f"{self.name}CausalLM")(made)


class RawLlama:
    """A train step of Llama's blocks in JAX alone, with Adam."""

    def __init__(self, devices, sizes, length):
        self.mesh = Mesh(devices.reshape(-1, SHARDS), ("data", "shards"))
        self.length, self.count = length, devices.size
        width, hidden = sizes["hidden_dim"], sizes["intermediate_dim"]
        self.words, self.heads = sizes["vocabulary_size"], 32
        self.window = min(sizes.get("sliding_window", length), length)
        self.groups = sizes["num_key_value_heads"]
        self.depth = width // self.heads
        few = self.groups * self.depth
        shapes = {
            "query": (width, width),
            "key": (width, few),
            "value": (width, few),
            "output": (width, width),
            "gate": (width, hidden),
            "up": (width, hidden),
            "down": (hidden, width),
            "first": (width,),
            "second": (width,),
        }
        self.shapes = {
            "blocks": [shapes] * DEPTH,
            "norm": (width,),
            "table": (self.words, width),
            "head": (BLOCKS, width, self.words // BLOCKS),
        }
        self.specs = jax.tree.map(
            lambda shape: (
                P(*(None,) * (len(shape) == 3), "shards")
                if len(shape) > 1
                else P()
            ),
            self.shapes,
            is_leaf=lambda x: isinstance(x, tuple),
        )
        self.specs["table"] = P(None, "shards")

    def lower(self):
        """Lowers the step."""
        rows = P(("data", "shards"))
        weights = jax.tree.map(
            self._shape,
            self.shapes,
            self.specs,
            is_leaf=lambda x: isinstance(x, tuple),
        )
        tokens = self._shape((self.count, self.length), rows, "int32")
        mapped = jax.shard_map(
            self._step,
            mesh=self.mesh,
            in_specs=(self.specs,) * 3 + (rows, rows),
            out_specs=((self.specs,) * 3, P()),
            check_vma=False,
        )
        jitted = jax.jit(mapped, donate_argnums=(0, 1, 2))
        return jitted.lower(weights, weights, weights, tokens, tokens)

    def _shape(self, shape, spec, dtype="float32"):
        sharding = NamedSharding(self.mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def _step(self, weights, first, second, x, y):
        loss, grads = jax.value_and_grad(self._loss)(weights, x, y)
        # Gradients of matrices are summed over their shards already.
        grads = jax.tree.map(
            lambda g, spec: lax.psum(
                g, "data" if any(spec) else ("data", "shards")
            ),
            grads,
            self.specs,
        )
        each = jax.tree.map
        first = each(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
        second = each(lambda v, g: 0.999 * v + 1e-3 * g**2, second, grads)
        weights = each(
            lambda w, m, v: w - 1e-4 * m / (jnp.sqrt(v) + 1e-7),
            *(weights, first, second),
        )
        loss = lax.psum(loss, ("data", "shards"))
        return (weights, first, second), loss

    def _loss(self, weights, x, y):
        hidden = gather(weights["table"], 1)[x[0]]
        run = jax.checkpoint(self._run_block)
        for block in weights["blocks"]:
            hidden = run(hidden, block)
        hidden = normalize(hidden, weights["norm"])
        size = self.words // BLOCKS

        @jax.checkpoint
        def add_block(carry, block):
            largest, total, of_label = carry
            kernel, k = block
            logits = jnp.dot(
                hidden, gather(kernel, 0), preferred_element_type="float32"
            )
            new = jnp.maximum(largest, logits.max(-1))
            new = lax.stop_gradient(new)
            total = total * jnp.exp(largest - new)
            total += jnp.exp(logits - new[:, None]).sum(-1)
            is_label = jnp.arange(size) + k * size == y[0][:, None]
            of_label += jnp.where(is_label, logits, 0.0).sum(-1)
            return (new, total, of_label), None

        zeros = jnp.zeros(self.length)
        blocks = weights["head"], jnp.arange(BLOCKS)
        (largest, total, of_label), _ = lax.scan(
            add_block, (zeros - 1e30, zeros, zeros), blocks
        )
        losses = largest + jnp.log(total) - of_label
        return losses.mean() / self.count

    def _run_block(self, x, weights):
        weights = {
            k: gather(w, 0) if w.ndim > 1 else w for k, w in weights.items()
        }
        y = normalize(x, weights["first"])
        query, key, value = (
            (y @ weights[k]).reshape(self.length, -1, self.depth)
            for k in ("query", "key", "value")
        )
        query, key = rotate(query) * self.depth**-0.5, rotate(key)
        arrays = (jnp.swapaxes(a, 0, 1) for a in (query, key, value))
        pairs = self.window * (2 * self.length + 1 - self.window) // 2
        flops = self.heads * self.depth * pairs
        with jax.named_scope(f"{KERNELS}{flops}"):
            kernel = make_kernel(self.heads, self.length, self.window)
            y = kernel(*arrays)
        y = jnp.swapaxes(y, 0, 1).reshape(x.shape)
        x += y @ weights["output"]
        y = normalize(x, weights["second"])
        gate = jax.nn.silu(y @ weights["gate"])
        return x + (gate * (y @ weights["up"])) @ weights["down"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather(shard, dim):
    """Returns a weight in bfloat16; its gradient is summed in float32."""
    shard = shard.astype(HALF)
    return lax.all_gather(shard, "shards", axis=dim, tiled=True)


def scatter(dim, _, grad):
    grad = grad.astype("float32")
    options = {"scatter_dimension": dim, "tiled": True}
    return (lax.psum_scatter(grad, "shards", **options),)


gather.defvjp(lambda shard, dim: (gather(shard, dim), None), scatter)


def normalize(x, scale):
    y = x.astype("float32")
    y *= lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
    return (y * scale).astype(HALF)


def rotate(x):
    """Rotates pairs of features of (tokens, heads, features) by positions."""
    half = x.shape[-1] // 2
    speeds = 500000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[0])[:, None, None] * speeds
    cos, sin = jnp.cos(angles).astype(HALF), jnp.sin(angles).astype(HALF)
    one, two = jnp.split(x, 2, -1)
    turned = one * cos - two * sin, two * cos + one * sin
    return jnp.concatenate(turned, -1)


@functools.cache
def make_kernel(heads, length, window):
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    block = min(512, length)
    names = (
        "block_q block_kv block_kv_compute block_q_dkv block_kv_dkv "
        "block_kv_dkv_compute block_q_dq block_kv_dq"
    )
    sizes = splash.BlockSizes(**dict.fromkeys(names.split(), block))
    mask = splash.LocalMask((length, length), (window - 1, 0), 0)
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha(
            splash.MultiHeadMask([mask] * heads),
            head_shards=1,
            q_seq_shards=1,
            block_sizes=sizes,
        )
    return jax.tree.map(np.asarray, kernel)


CASES = {
    "words-llama": Decoder("Llama3", LLAMA, ("ours", "whole", "raw")),
    "words-gemma": Decoder("Gemma", GEMMA, ("ours", "whole")),
    "masks-llama": Decoder("Llama3", SHORT, ("ours", "raw"), length=32768),
    "masks-mistral": Decoder("Mistral", MISTRAL, ("ours", "raw"), length=32768),
}
