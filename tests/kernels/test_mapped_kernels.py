"""Attention that a replica's cores share, with any number of heads of keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keras_strategies.kernels.mapped_kernels import Trace, map_attention
from keras_strategies.spmd.mesh import ReplicaMesh

CORES, LENGTH = 4, 8


def attend(query, key, value, is_key, mask):
    """Causal attention with padding, and a mask that differs by heads."""
    is_used = is_key[:, None, None] & mask
    return jax.nn.dot_product_attention(
        query, key, value, mask=is_used, is_causal=True
    )


@pytest.mark.parametrize("context_parallel", [False, True])
@pytest.mark.parametrize("rows", [4, 3])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_each_core_has_the_keys_of_its_heads(kv_heads, rows, context_parallel):
    mesh = ReplicaMesh(
        devices=jax.devices()[: 2 * CORES],
        cores_per_replica=CORES,
        context_parallel=context_parallel,
    )
    trace = Trace(mesh=mesh, is_global=True)
    rng = np.random.default_rng(1)
    draw = rng.standard_normal
    query = draw((rows, LENGTH, 8, 4), "float32")
    key, value = draw((2, rows, LENGTH, kv_heads, 4), "float32")
    is_key = np.arange(LENGTH) < rng.integers(1, LENGTH, (rows, 1))
    mask = rng.uniform(size=(1, 8, LENGTH, LENGTH)) < 0.9
    mask[..., 0] = is_key[:, 0] = True

    def compute(fn):
        def loss(*arrays):
            return jnp.sum(jnp.sin(fn(*arrays, is_key, mask)))

        grad = jax.value_and_grad(loss, argnums=(0, 1, 2))
        return jax.jit(grad)(query, key, value)

    def shared(*arrays):
        return map_attention(trace, attend, arrays, num_padding=1)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5),
        compute(shared),
        compute(attend),
    )
