"""A recommender (DLRM) with eight tables of up to 10,000,000 rows.

Peers: `ours`, Keras's layers with `FullySharded`; `columns`, a program of raw
JAX in which each chip has the columns of all tables, looks up all chips' ids in
them, and sends the rows by an all-to-all. Both have Adagrad, in float32.

References:
  - Naumov et al., Deep Learning Recommendation Model (2019):
    https://arxiv.org/abs/1906.00091
"""

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from keras import layers, ops

import keras_strategies as ks
from benchmarks.large_steps import measure

SIZES = (1000, 10_000, 50_000, 100_000, 10**6, 10**6, 5 * 10**6, 10**7)
FEATURES, WIDTH, HIDDEN, ROWS = 13, 32, 512, 2048
"""Dense features, columns of a table, units of the head, rows of a chip."""


def make_model(sizes=SIZES, optimizer=None, width=WIDTH, hidden=HIDDEN):
    """Makes the model, compiled; ids are taken modulo the tables' sizes."""
    ids = keras.Input((len(sizes),), dtype="int32")
    features = keras.Input((FEATURES,))
    values = [layers.Dense(width, "relu")(features)]
    for k, words in enumerate(sizes):
        values.append(layers.Embedding(words, width)(ids[:, k] % words))
    stacked = ops.stack(values, axis=1)
    products = ops.matmul(stacked, ops.transpose(stacked, (0, 2, 1)))
    value = layers.Concatenate()([values[0], layers.Flatten()(products)])
    value = layers.Dense(1)(layers.Dense(hidden, "relu")(value))
    model = keras.Model([ids, features], value)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.Adagrad(), loss)
    return model


class Recommender:
    """The step on the chips of `v5e:4x4`, which share all tables."""

    peers = "ours", "columns"
    topology = "v5e:4x4"
    state_bytes = 8 * sum(SIZES) * WIDTH / 16
    """Bytes of a chip's part of the tables and their slots."""

    def measure(self, peer, is_low=True):
        """Compiles the step of a peer."""
        strategy = ks.TPUStrategy.for_topology(
            self.topology, variable_partitioner=ks.experimental.FullySharded()
        )
        devices = np.array(strategy.mesh.devices).ravel()
        if peer == "columns":
            return measure.measure(_lower(devices), devices, is_low)
        keras.config.set_dtype_policy("float32")
        with strategy.scope(), ks.abstract():
            model = make_model()
        count = ROWS * strategy.num_replicas_in_sync
        shapes = _shape_batch(count, None)
        options = dict(measure.LOW_EFFORT) if is_low else None
        program = strategy.compile_step(
            model, (list(shapes[:2]), shapes[2]), compiler_options=options
        )
        seconds = program.compile_seconds
        return measure.read(program.executable, devices, seconds)


def _shape_batch(count, sharding):
    sizes = (len(SIZES), "int32"), (FEATURES, "float32"), (1, "float32")
    return [
        jax.ShapeDtypeStruct((count, size), dtype, sharding=sharding)
        for size, dtype in sizes
    ]


def _lower(devices):
    mesh = Mesh(devices, ("chip",))
    columns, rows, whole = (
        NamedSharding(mesh, PartitionSpec(*spec))
        for spec in ((None, "chip"), ("chip",), ())
    )

    def look_up(table, ids):
        found = table[lax.all_gather(ids, "chip")]
        sent = lax.all_to_all(found, "chip", 0, 0)
        return jnp.moveaxis(sent, 0, 1).reshape(-1, WIDTH)

    def loss(weights, ids, features, wanted):
        tables, (first, hidden, last) = weights
        dense = jax.nn.relu(features @ first)
        found = [
            look_up(table, ids[:, k] % len(table))
            for k, table in enumerate(tables)
        ]
        stacked = jnp.stack([dense, *found], 1)
        products = jnp.einsum("nac,nbc->nab", stacked, stacked)
        value = jnp.concatenate([dense, products.reshape(len(ids), -1)], 1)
        score = jax.nn.relu(value @ hidden) @ last
        # The binary cross entropy, a mean over all chips' rows.
        each = jax.nn.softplus(score) - wanted * score
        return each.mean() / devices.size

    def step(weights, slots, *batch):
        value, grads = jax.value_and_grad(loss)(weights, *batch)
        tables, dense = grads
        grads = tables, lax.psum(dense, "chip")
        slots = jax.tree.map(lambda s, g: s + g * g, slots, grads)
        weights = jax.tree.map(
            lambda w, s, g: w - 0.001 * g / jnp.sqrt(s + 1e-7),
            *(weights, slots, grads),
        )
        return weights, slots, lax.psum(value, "chip")

    def shape(sizes, sharding):
        return jax.ShapeDtypeStruct(sizes, "float32", sharding=sharding)

    inputs = WIDTH + (len(SIZES) + 1) ** 2
    dense = (FEATURES, WIDTH), (inputs, HIDDEN), (HIDDEN, 1)
    weights = (
        [shape((words, WIDTH), columns) for words in SIZES],
        [shape(sizes, whole) for sizes in dense],
    )
    batch = _shape_batch(ROWS * devices.size, rows)
    specs = jax.tree.map(lambda a: a.sharding.spec, (weights, weights, *batch))
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=specs,
        out_specs=(*specs[:2], PartitionSpec()),
        check_vma=False,
    )
    jitted = jax.jit(mapped, donate_argnums=(0, 1))
    return jitted.lower(weights, weights, *batch)


CASES = {"dlrm": Recommender()}
