"""Gradients of weights as XLA receives them in steps over the global batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from keras_strategies.passes import stages
from keras_strategies.passes.weight_gradients import rewrite_gradients

pytestmark = pytest.mark.quick

X = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")


def dense(w, x):
    return jnp.tanh(x @ w)


def heads(w, x):
    w = w.reshape(4, 2, 2)
    return jnp.einsum("bd,dhk->bhk", x, w)


def batched(w, x):
    return jnp.einsum("gbd,gde->gbe", x.reshape(2, 3, 4), jnp.stack([w, w]))


def scanned(w, x):
    def body(x, w):
        return jnp.tanh(x @ w), None

    return jax.lax.scan(body, x, jnp.stack([w, 2 * w]))[0]


PROGRAMS = {
    "dense": dense,
    "jitted": jax.jit(dense),
    "heads": heads,
    "batched": batched,
    "scanned": scanned,
    "rematerialized": jax.checkpoint(dense),
}


def make_gradient(fn):
    return jax.grad(lambda w: jnp.sum(fn(w, X) ** 2))


def transposes_of_products(traced):
    equations = list(stages.all_equations(traced))
    products = {
        e.outvars[0] for e in equations if e.primitive.name == "dot_general"
    }
    return [
        e
        for e in equations
        if e.primitive.name == "transpose" and e.invars[0] in products
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_no_transposed_products(name):
    gradient = make_gradient(PROGRAMS[name])
    w = X[:4]
    traced = jax.make_jaxpr(gradient)(w)
    changed = rewrite_gradients(traced)
    assert transposes_of_products(traced)
    assert not transposes_of_products(changed)
    np.testing.assert_allclose(
        *jaxpr_as_fun(changed)(w), gradient(w), rtol=1e-5, atol=1e-5
    )


def test_products_that_are_read_twice_keep_their_order():
    def both(x):
        product = x @ x.T
        return product, product.T

    traced = jax.make_jaxpr(both)(X)
    assert rewrite_gradients(traced) is traced


def half(w, x, b, table):
    x = x.astype("bfloat16") + table.astype("bfloat16")[jnp.arange(6) % 3]
    y = x @ w.astype("bfloat16") + b.astype("bfloat16")
    return jnp.tanh(y) @ w.astype("bfloat16").T


@pytest.mark.parametrize("is_jitted", [False, True])
def test_casts_to_float32_come_before_the_sums(is_jitted):
    fn = jax.jit(half) if is_jitted else half
    weights = X[:4], X[:4, 0], X[:3]

    def loss(w, b, table):
        return jnp.sum(fn(w, X, b, table).astype("float32") ** 2)

    gradient = jax.grad(loss, argnums=(0, 1, 2))
    changed = rewrite_gradients(jax.make_jaxpr(gradient)(*weights))
    sums = [
        e.outvars[0].aval
        for e in stages.all_equations(changed)
        if e.primitive.name in ("dot_general", "reduce_sum", "scatter-add")
    ]
    # Other products, and the loss in float32, are no weight's gradient.
    wide = [
        aval.shape for aval in sums if aval.dtype == jnp.float32 and aval.shape
    ]
    assert sorted(wide) == [(3, 4), (4,), (4,), (4, 4), (4, 4)]
    for one, other in zip(
        jaxpr_as_fun(changed)(*weights), gradient(*weights), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=0.02, atol=0.1)
