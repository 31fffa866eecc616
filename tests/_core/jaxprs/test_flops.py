"""Operations of traced programs, beside those that XLA counts."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from keras_strategies._core.jaxprs.flops import count_flops

pytestmark = pytest.mark.quick

X, W = jnp.ones((8, 64)), jnp.ones((64, 32))
IMAGES, KERNEL = jnp.ones((4, 15, 16, 8)), jnp.ones((3, 3, 8, 16))
OF_GROUPS = jnp.ones((3, 3, 2, 16))
HEADS = jnp.ones((2, 16, 4, 8))


def flops(fn, *args):
    return count_flops(jax.make_jaxpr(fn)(*args).jaxpr)


def convolution(padding="SAME", strides=(2, 1), **kwargs):
    def convolve(images, kernel):
        return lax.conv_general_dilated(
            images,
            kernel,
            strides,
            padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            **kwargs,
        )

    return convolve


def gradient(fn):
    return jax.grad(lambda a, b: (fn(a, b) ** 2).sum(), (0, 1))


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (jnp.matmul, (X, W)),
        (lambda a, b: jnp.einsum("bqhd,bkhd->bhqk", a, b), (HEADS, HEADS)),
        (gradient(jnp.matmul), (X, W)),
        (jax.checkpoint(jnp.matmul), (X, W)),
        (convolution("VALID", (1, 1)), (IMAGES, KERNEL)),
        (convolution(), (IMAGES, KERNEL)),
        (convolution("VALID", rhs_dilation=(2, 2)), (IMAGES, KERNEL)),
        (
            convolution([(2, 2)] * 2, (1, 1), lhs_dilation=(2, 2)),
            (IMAGES, KERNEL),
        ),
        (convolution(feature_group_count=4), (IMAGES, OF_GROUPS)),
        (gradient(convolution()), (IMAGES, KERNEL)),
        (gradient(convolution(feature_group_count=4)), (IMAGES, OF_GROUPS)),
    ],
    ids=[
        *("dense", "attention", "dense's gradient", "checkpoint", "valid"),
        *("same", "with holes", "transposed", "of groups"),
        *("convolution's gradient", "gradient of groups"),
    ],
)
def test_operations_are_those_that_xla_counts(fn, args):
    # XLA counts additions and products of single entries, too.
    cost = jax.jit(fn).lower(*args).cost_analysis()
    assert flops(fn, *args) == pytest.approx(cost["flops"], rel=0.03)


def test_a_loop_s_operations_are_those_of_all_turns():
    ws = jnp.ones((5, 64, 64))

    def fn(x, ws):
        return lax.scan(lambda x, w: (x @ w, None), x, ws)[0]

    assert flops(fn, X, ws) == 5 * 2 * 8 * 64 * 64


def test_of_a_loop_of_unknown_length_one_turn_is_counted():
    w = jnp.ones((64, 64))

    def fn(x):
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w, x)

    assert flops(fn, X) == 2 * 8 * 64 * 64


def test_of_branches_the_one_with_most_is_counted():
    def fn(is_left, x, w):
        return lax.cond(
            is_left, lambda: x @ w, lambda: x[:, :1] @ w[:1] + x[:, 1:2] @ w[:1]
        )

    assert flops(fn, True, X, W) == 2 * 8 * 64 * 32


def test_without_products_there_are_none():
    assert flops(lambda x: x + 1, X) == 0
    assert flops(jnp.matmul, X[:0], W) == 0
