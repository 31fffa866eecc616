"""Operations of traced programs, beside those that XLA counts."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from keras_strategies.passes.flops import (
    count_flops,
    count_training_flops,
)

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


def shaped(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


WEIGHTS = [shaped(16, 16)] * 3
PRODUCT = 2 * 4 * 16 * 16


def chain(weights, x):
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return x


def test_gradients_are_counted_where_they_flow():
    x = shaped(4, 16)
    # Of the first layer, the gradient of its input is not needed.
    assert count_training_flops(chain, WEIGHTS, x) == (3 + 3 + 2) * PRODUCT

    def last_alone(weights, frozen, x):
        return chain([*frozen, *weights], x)

    given = WEIGHTS[:1], WEIGHTS[1:], x
    assert count_training_flops(last_alone, *given) == (3 + 1) * PRODUCT

    def first_alone(weights, frozen, x):
        return chain([*weights, *frozen], x)

    assert count_training_flops(first_alone, *given) == (3 + 1 + 2) * PRODUCT
    assert count_training_flops(last_alone, [], WEIGHTS, x) == 3 * PRODUCT


def test_rematerialized_operations_are_not_counted():
    x = shaped(4, 16)
    expected = count_training_flops(chain, WEIGHTS, x)
    saved = jax.checkpoint(chain)
    traced = jax.make_jaxpr(jax.grad(lambda w, x: saved(w, x).sum()))(
        WEIGHTS, x
    )
    assert count_flops(traced) > expected
    assert count_training_flops(saved, WEIGHTS, x) == expected

    def scanned(weights, x):
        step = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
        return jax.lax.scan(step, x, jnp.stack(weights))[0]

    # In a loop, the gradient of the first layer's input is computed, too.
    assert count_training_flops(scanned, WEIGHTS, x) == expected + PRODUCT


def test_results_without_gradients_are_left_out():
    def ranked(weights, x):
        return jnp.argmax(x @ weights[0]), (x @ weights[0]).sum()

    found = count_training_flops(ranked, WEIGHTS[:1], shaped(4, 16))
    assert found == (2 + 1) * PRODUCT
