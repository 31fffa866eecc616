"""Lookups in a table that a group of chips shares, with Adam's update.

Peers: `ours`, Keras's `Embedding` with `FullySharded`, and `ours-half`, with
`reduce_dtype="bfloat16"`; `columns-half`, in which each chip looks up its
columns of all ids, an all-to-all sends rows, and their gradients are added up
in bfloat16, and `columns`, which adds them up in float32; `rows-half`, in which
each chip looks up the ids that it has, and rows are summed; `whole`, in which
chips gather the table and scatter its gradient. The loss is a product with a
fixed array.
"""

import dataclasses

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import keras_strategies as ks
from benchmarks.large_steps import measure

ROWS = ("data", "fsdp")
HALF, FULL = jnp.bfloat16, jnp.float32


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A table, and the chips that share it.

    Attributes:
      words: Its rows.
      width: Its columns.
      ids: Those that a chip looks up.
      topology: The slice.
      shards: The number of chips that share it.
    """

    words: int
    width: int
    ids: int
    topology: str
    shards: int
    peers: tuple[str, ...] = ("ours", "columns", "ours-half", "columns-half")

    def measure(self, peer, is_low=True):
        """Compiles the step of a peer."""
        strategy = ks.TPUStrategy.for_topology(
            self.topology,
            variable_partitioner=ks.experimental.FullySharded(
                self.shards,
                reduce_dtype="bfloat16" if peer == "ours-half" else None,
            ),
        )
        devices = np.array(strategy.mesh.devices).ravel()
        if peer.startswith("ours"):
            program = self._compile_ours(strategy, is_low)
            seconds = program.compile_seconds
            return measure.read(program.executable, devices, seconds)
        return measure.measure(self._lower_raw(devices, peer), devices, is_low)

    def _compile_ours(self, strategy, is_low):
        keras.config.set_dtype_policy("mixed_bfloat16")
        with strategy.scope(), ks.abstract():
            model = self._make_model()
        count = strategy.num_replicas_in_sync * self.ids
        ids = jax.ShapeDtypeStruct((count,), "int32")
        factors = jax.ShapeDtypeStruct((count, self.width), "bfloat16")
        batch = [ids, factors], jax.ShapeDtypeStruct((count,), "float32")
        options = dict(measure.LOW_EFFORT) if is_low else None
        return strategy.compile_step(model, batch, compiler_options=options)

    def _make_model(self):
        ids = keras.Input((), dtype="int32")
        factors = keras.Input((self.width,), dtype="bfloat16")
        rows = keras.layers.Embedding(self.words, self.width)(ids)
        products = keras.ops.cast(rows * factors, "float32")
        model = keras.Model([ids, factors], keras.ops.sum(products, axis=-1))
        model.compile(keras.optimizers.Adam(1e-4), multiply)
        return model

    def _lower_raw(self, devices, how):
        mesh = Mesh(devices.reshape(-1, self.shards), ROWS)
        is_columns = how.startswith("columns")
        spec = (
            PartitionSpec(None, "fsdp") if is_columns else PartitionSpec("fsdp")
        )
        look_up = {
            "columns": self._exchange_rows_in_full,
            "columns-half": self._exchange_rows,
            "rows-half": self._sum_rows,
            "whole": self._gather_table,
        }[how]

        def step(table, first, second, ids, factors):
            def loss(table):
                rows = look_up(table, ids)
                return jnp.sum((rows * factors).astype(FULL)) / devices.size

            value, grad = jax.value_and_grad(loss)(table)
            if mesh.shape["data"] > 1:
                grad = lax.psum(grad, "data")
            first = 0.9 * first + 0.1 * grad
            second = 0.999 * second + 0.001 * grad * grad
            table -= 1e-4 * first / (jnp.sqrt(second) + 1e-7)
            return table, first, second, lax.psum(value, ROWS)

        rows = PartitionSpec(ROWS)
        mapped = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(spec, spec, spec, rows, rows),
            out_specs=(spec, spec, spec, PartitionSpec()),
            check_vma=False,
        )

        def shape(sizes, spec, dtype):
            sharding = NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

        count = self.ids * devices.size
        state = [shape((self.words, self.width), spec, FULL)] * 3
        ids = shape((count,), rows, jnp.int32)
        factors = shape((count, self.width), rows, HALF)
        jitted = jax.jit(mapped, donate_argnums=(0, 1, 2))
        return jitted.lower(*state, ids, factors)

    def _exchange_rows(self, table, ids):
        columns = table.astype(HALF)[lax.all_gather(ids, "fsdp")]
        rows = jnp.moveaxis(lax.all_to_all(columns, "fsdp", 0, 0), 0, 1)
        return rows.reshape(-1, self.width)

    def _exchange_rows_in_full(self, table, ids):
        @jax.custom_vjp
        def exchange(table):
            return self._exchange_rows(table, ids)

        def add_up(_, grad):
            parts = grad.reshape(-1, self.shards, self.width // self.shards)
            columns = lax.all_to_all(parts, "fsdp", 1, 0).astype(FULL)
            zeros = jnp.zeros((self.words, columns.shape[-1]))
            return (zeros.at[lax.all_gather(ids, "fsdp")].add(columns),)

        exchange.defvjp(lambda table: (exchange(table), None), add_up)
        return exchange(table)

    def _sum_rows(self, table, ids):
        size = self.words // self.shards
        places = lax.all_gather(ids, "fsdp") - lax.axis_index("fsdp") * size
        is_here = (places >= 0) & (places < size)
        rows = table.astype(HALF)[jnp.clip(places, 0, size - 1)]
        rows = jnp.where(is_here[..., None], rows, 0)
        return lax.psum_scatter(rows, "fsdp", scatter_dimension=0)

    def _gather_table(self, table, ids):
        @jax.custom_vjp
        def gather(table):
            return lax.all_gather(table.astype(HALF), "fsdp", tiled=True)

        def scatter(_, grad):
            wide = grad.astype(FULL)
            return (lax.psum_scatter(wide, "fsdp", tiled=True),)

        gather.defvjp(lambda table: (gather(table), None), scatter)
        return gather(table)[ids]


def multiply(factors, values):
    """A loss: a product with a fixed array."""
    return factors * values


CASES = {
    "recommender": Lookup(10_000_000, 32, 2048, "v5e:4x4", 16),
    "gemma": Lookup(262_144, 2048, 2048, "v5e:16x16", 64),
    "llama": Lookup(128_256, 4096, 8192, "v5p:4x4x4", 32),
}
