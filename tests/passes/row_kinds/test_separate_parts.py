"""What is believed of parts that are marked as computing rows separately."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keras_strategies.passes.row_kinds import marks
from keras_strategies.passes.row_kinds.losses import Verdict, losses_in
from keras_strategies.passes.row_kinds.separate_parts import mark_part

pytestmark = pytest.mark.quick

ROWS, SIZE = 6, 4
START = jnp.arange(1.0, 1 + SIZE)


def call_python(fn, *arrays):
    """Computes a function of which the analysis shows nothing."""
    shape = jax.ShapeDtypeStruct(arrays[0].shape, "float32")
    return jax.pure_callback(fn, shape, *arrays)


@jax.custom_vjp
def hide(x, weights):
    """Returns `sin(x * weights)`, in Python."""
    return call_python(lambda x, w: np.sin(x * w), x, weights)


def hide_forward(x, weights):
    return hide(x, weights), (x, weights)


def hide_backward(kept, cotangent):
    x, weights = kept
    slope = cotangent * call_python(lambda x, w: np.cos(x * w), x, weights)
    total = call_python(lambda w, x: x.sum(axis=0), weights, slope * x)
    return slope * weights, total


hide.defvjp(hide_forward, hide_backward)


def part(*operands, fn=hide):
    return mark_part(lambda *values: [fn(*values)], operands, "part")[0]


def is_shown(fn, loss_of=lambda y: jnp.mean(y**2)):
    """Returns whether a loss and its gradient are shown to be means.

    Args:
      fn: A function of rows, of shape (rows, 4), and of weights.
      loss_of: A function of its result.
    """

    def step(weights, x):
        def loss(weights):
            return marks.mark(loss_of(fn(x, weights)), marks.LOSS)

        value, gradient = jax.value_and_grad(loss)(weights)
        return value, marks.mark(gradient, marks.GRADIENT)

    small, large = (
        jax.make_jaxpr(step)(START, jnp.ones((rows, SIZE)))
        for rows in (ROWS, 2 * ROWS)
    )
    finding = losses_in(small, [1], ROWS, large)
    is_mean = finding.verdict is Verdict.MEAN
    return is_mean and not finding.unshown and not finding.counting


BELIEVED = {
    "rows_and_weights": part,
    "rows": lambda x, w: part(x * w, jnp.ones(SIZE)),
    "in_turn": lambda x, w: part(part(x, w), w),
    "columns_as_rows": lambda x, w: part(x.reshape(-1, 2), w[:2]),
    "two_batches": lambda x, w: part(jnp.concatenate([x, x * w]), w),
    "minus_mean_of_row": lambda x, w: part(x, w) - x.mean(axis=1)[:, None],
    "other_code_for_more_rows": lambda x, w: part(
        x, w, fn=lambda x, w: hide(jnp.sin(x) if len(x) > ROWS else x, w)
    ),
}


@pytest.mark.parametrize("name", BELIEVED)
def test_rows_of_a_marked_part_are_separate(name):
    assert is_shown(BELIEVED[name])


def position(x):
    return jnp.arange(1.0 * len(x))[:, None] + 0 * START


@jax.custom_jvp
def sine(x):
    return call_python(np.sin, x)


@jax.custom_jvp
def cosine(x):
    return call_python(np.cos, x)


sine.defjvp(lambda x, t: (sine(*x), cosine(*x) * t[0]))
cosine.defjvp(lambda x, t: (cosine(*x), -sine(*x) * t[0]))


def differentiate(x, w):
    def compute(x):
        return jnp.sum(part(x, w, fn=lambda x, w: sine(x * w)) ** 2)

    return jax.grad(compute)(x)


MIXED = {
    "without_mark": hide,
    "mean_of_rows": lambda x, w: part(x, w + x.mean(axis=0)),
    "next_row": lambda x, w: part(x, w) + part(jnp.roll(x, 1, axis=0), w),
    "mean_after_part": lambda x, w: part(x, w) - part(x, w).mean(axis=0),
    "transposed": lambda x, w: part(x.T, jnp.ones((SIZE, 1))).T * w,
    "positions": lambda x, w: part(
        x, position(x), w, fn=lambda x, p, w: hide(x + p, w)
    ),
    "number_of_rows": lambda x, w: part(x, w / len(x)),
    "rows_over_number": lambda x, w: part(x / len(x), w),
    "array_of_number": lambda x, w: part(x, w * jnp.sqrt(jnp.full(4, len(x)))),
    "divided_in_part": lambda x, w: part(
        x, w, fn=lambda x, w: hide(x, w) / len(x)
    ),
    "other_batch": lambda x, w: part(
        x,
        jnp.concatenate([x, x]),
        w,
        fn=lambda x, y, w: hide(x + y[: len(x)], w),
    ),
    "one_result": lambda x, w: part(
        x, w, fn=lambda x, w: jnp.sum(hide(x, w), axis=0)
    ),
    "differentiated_twice": differentiate,
}


@pytest.mark.parametrize("name", MIXED)
def test_what_a_mark_does_not_say_is_not_believed(name):
    assert not is_shown(MIXED[name])


def test_a_gradient_of_a_sum_is_no_mean():
    assert is_shown(part)
    assert not is_shown(part, lambda y: jnp.sum(y**2))
    assert not is_shown(part, lambda y: jnp.sum(y**2) / ROWS)
    assert not is_shown(part, lambda y: jnp.mean(y**2) / len(y))
    assert not is_shown(part, lambda y: jnp.mean(y * position(y)))


def test_a_first_derivative_is_believed():
    assert is_shown(
        lambda x, w: jax.lax.stop_gradient(differentiate(x, START)) * w
    )


def test_one_trace_does_not_decide():
    def step(weights, x):
        return marks.mark(jnp.mean(part(x, weights) ** 2), marks.LOSS)

    traced = jax.make_jaxpr(step)(START, jnp.ones((ROWS, SIZE)))
    assert losses_in(traced, [1], ROWS).verdict is Verdict.UNSURE
