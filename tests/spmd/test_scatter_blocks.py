"""Matrices that are padded to blocks before a reduce-scatter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from keras_strategies.passes.specs import Sharded
from keras_strategies.spmd import scatter_blocks
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.replica_map import (
    replica_map,
    split_spec,
)
from keras_strategies.spmd.scatter_blocks import find_block, scatters_rows
from keras_strategies.spmd.shard_exchange import ShardExchange


@pytest.mark.parametrize(
    ("shape", "count", "block"),
    [
        ((4096, 4096), 64, (64, 4096)),
        ((262144, 4096), 32, (8192, 4096)),
        # Llama 3's table and head, and tables of 32,000 and 151,936 words.
        ((128256, 4096), 32, (4096, 4096)),
        ((4096, 128256), 32, (128, 131072)),
        ((32000, 4096), 32, (1024, 4096)),
        ((151936, 4096), 32, (4864, 4096)),
        # Small ones, and those of parts of tiles, stay as they are.
        ((4 * 504, 1024), 4, (504, 1024)),
        ((4096, 768), 4, None),
        ((8192, 11008), 32, None),
        # Much padding would be more than an all-reduce is worth.
        ((8192, 65 * 1024), 8, (1024, 66 * 1024)),
        ((8 * 3, 3 * 1024 * 1024), 8, None),
        ((0, 4096), 4, None),
        ((4096,), 4, None),
    ],
)
def test_blocks(shape, count, block):
    assert find_block(shape, 0, count) == block
    assert find_block(shape, 1, count) is None


@pytest.mark.parametrize(
    ("shape", "count", "is_by_rows"),
    [
        ((256000, 2304), 64, True),  # Gemma 2's table
        ((8192, 2304), 64, True),
        ((8064, 2304), 64, False),
        ((256000, 2048), 64, False),
        ((4096, 2304), 64, False),
        ((256001, 2304), 64, False),
    ],
)
def test_columns_that_are_scattered_by_rows(shape, count, is_by_rows):
    assert scatters_rows(shape, 1, count) == is_by_rows
    assert not scatters_rows(shape, 0, count)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((4 * 504, 1024), 0),
        ((32, 63 * 1024), 0),
        ((32, 40), 0),
        ((32, 12), 1),
        ((4 * 504, 3 * 1024), 1),
        ((30, 12), 1),
    ],
)
def test_padded_blocks_are_summed_like_others(monkeypatch, shape, dim):
    monkeypatch.setattr(scatter_blocks, "_LARGE", 1)
    monkeypatch.setattr(scatter_blocks, "_WIDE", 1)
    mesh = ReplicaMesh(devices=jax.devices()[:4])

    class ForTPUs:
        platform = "tpu"

        def __getattr__(self, name):
            return getattr(mesh, name)

    values = np.random.default_rng(0).integers(0, 9, (4, *shape))
    split = split_spec(mesh)
    out = PartitionSpec(*(None,) * dim, *split)
    spec = Sharded(NamedSharding(mesh.mesh, out), dim)

    def scatter(value):
        return ShardExchange(ForTPUs()).scatter(value[0], spec)

    mapped = replica_map(scatter, mesh, in_specs=split, out_specs=out)
    found = jax.jit(mapped)(jnp.asarray(values, "float32"))
    np.testing.assert_array_equal(found, values.sum(0))
