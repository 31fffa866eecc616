"""Which operations are shown to compute each row by itself, from traces alone.

Each rule has its counterexamples: the same operation where a row depends on
other rows, or on its position.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.scipy import linalg

from keras_strategies.passes.row_kinds import marks
from keras_strategies.passes.row_kinds.losses import Verdict, losses_in

pytestmark = pytest.mark.quick

ROWS, SIZE = 6, 4
UNEQUAL = jnp.arange(1.0, 1 + SIZE * SIZE)


def analyze(fn):
    """Returns what traces show of a mean of `fn(rows)` and of its gradient.

    The rows are of shape (rows, 16).
    """

    def step(weights, x):
        def loss(weights):
            return marks.mark(jnp.mean(fn(x * weights) ** 2), marks.LOSS)

        value, gradient = jax.value_and_grad(loss)(weights)
        return value, marks.mark(gradient, marks.GRADIENT)

    small, large = (
        jax.make_jaxpr(step)(UNEQUAL, jnp.ones((rows, SIZE * SIZE)))
        for rows in (ROWS, 2 * ROWS)
    )
    return losses_in(small, [1], ROWS, large)


def matrices(x):
    return 3 * jnp.eye(SIZE) + 0.1 * x.reshape(-1, SIZE, SIZE)


ENTRYWISE = {
    **{
        name: getattr(jnp, name)
        for name in (
            *("tanh", "sinh", "cosh", "sin", "cos", "tan", "arctan", "arcsinh"),
            *("exp", "exp2", "expm1", "square", "cbrt", "abs", "sinc", "sign"),
            *("positive", "reciprocal", "nan_to_num", "deg2rad", "i0"),
        )
    },
    **{
        name: getattr(jax.nn, name)
        for name in (
            *("sigmoid", "softplus", "gelu", "silu", "elu", "selu", "celu"),
            *("relu", "relu6", "leaky_relu", "hard_tanh", "hard_swish", "mish"),
            *("log_sigmoid", "soft_sign", "softmax", "log_softmax", "glu"),
            *("standardize", "squareplus", "sparse_plus"),
        )
    },
    **{
        name: getattr(jax.scipy.special, name)
        for name in ("erf", "erfc", "i0e", "i1e", "ndtr")
    },
    **{
        f"{name} of positive": lambda x, fn=fn: fn(x**2 + 0.5)
        for name, fn in {
            "log": jnp.log,
            "log2": jnp.log2,
            "log10": jnp.log10,
            "log1p": jnp.log1p,
            "sqrt": jnp.sqrt,
            "rsqrt": lax.rsqrt,
            "power": lambda x: x**1.7,
            "gammaln": jax.scipy.special.gammaln,
            "digamma": jax.scipy.special.digamma,
            "gammainc": lambda x: jax.scipy.special.gammainc(2.0, x),
        }.items()
    },
    "logsumexp": lambda x: jax.nn.logsumexp(x, axis=-1),
    "arctan2": lambda x: jnp.arctan2(x, 1 + x**2),
    "hypot": lambda x: jnp.hypot(x, 1.0 + x),
    "logaddexp": lambda x: jnp.logaddexp(x, 2 * x),
    "erf_inv": lambda x: jax.scipy.special.erfinv(jnp.tanh(x) * 0.9),
    "polyval": lambda x: jnp.polyval(jnp.array([1.0, 2.0, 3.0]), x),
    "gelu exactly": lambda x: jax.nn.gelu(x, approximate=False),
}


@pytest.mark.parametrize("name", ENTRYWISE)
def test_a_function_of_each_entry_is_separate(name):
    """Its derivatives' primitives have rules, in each version of JAX."""
    finding = analyze(ENTRYWISE[name])
    assert finding.verdict is Verdict.MEAN
    assert not finding.unshown
    assert not finding.counting


def number(x):
    return jnp.arange(len(x))


def largest(x):
    return jnp.argmax(x, axis=-1)


def convolve(image, kernels, groups, channels=1):
    return lax.conv_general_dilated(
        image,
        jnp.repeat(kernels.T[:, None], channels, axis=1),
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=groups,
    )[0].T


def one_kernel_a_row(x, kernels, *, transpose=True):
    """A convolution of the first 8 entries of each row by its own kernel."""
    images = x[:, :8]
    image = images.T[None] if transpose else images.reshape(1, 8, len(x))
    return convolve(image, kernels, len(x))


def kernels_in_pairs(x):
    """A group of a convolution for each two rows: a row reads its neighbor."""
    return convolve(x[:, :8].T[None], x[:, 8:11], len(x) // 2, channels=2)


def two_channels(x, order=(1, 0, 2)):
    image = x.reshape(-1, 8, 2).transpose(order).reshape(1, 8, -1)
    return convolve(image, x[:, :3], len(x), channels=2)


def channels_before_rows(x):
    """Two channels of a row are not neighbors, but groups are of neighbors."""
    return two_channels(x, (1, 2, 0))


def other_rank(x):
    """Entries of two dimensions for one number of rows, and else of three."""
    return x.reshape(len(x), 2, *((8,) if len(x) == ROWS else (2, 4)))


def scan(turn, first, *scanned):
    return lax.scan(turn, first, scanned if len(scanned) > 1 else scanned[0])


def set_at(x, rows, columns):
    return x.at[rows, columns].set(2 * x[:, 0])


def scattered_numbers(x):
    zeros = jnp.zeros(x.shape, "uint32")
    numbers = jnp.arange(len(x), dtype="uint32") + 1
    return zeros.at[number(x), largest(x)].set(numbers)


SEPARATE = {
    "set_own_entry": lambda x: set_at(x, number(x), largest(x)),
    "set_two_entries": lambda x: x.at[
        number(x)[:, None], jnp.argsort(x)[:, :2]
    ].set(3 * x[:, :2]),
    "add_own_entry": lambda x: x.at[number(x), largest(x)].add(x[:, 0]),
    "set_by_vmap": lambda x: jax.vmap(
        lambda row: row.at[jnp.argsort(row)[:2]].set(2 * row[:2])
    )(x),
    "solve": lambda x: jnp.linalg.solve(matrices(x), x[:, :SIZE, None]),
    "solve_constant": lambda x: jnp.linalg.solve(
        jnp.eye(SIZE) + 1, x[:, :SIZE, None]
    ),
    "inv": lambda x: jnp.linalg.inv(matrices(x)),
    "expm": lambda x: linalg.expm(matrices(x)),
    "cholesky_solve": lambda x: jax.vmap(
        lambda m, b: linalg.cho_solve(linalg.cho_factor(m @ m.T), b)
    )(matrices(x), x[:, :SIZE]),
    "kernel_of_row": lambda x: one_kernel_a_row(x, x[:, 8:11]),
    "kernel_of_row_by_vmap": lambda x: jax.vmap(
        lambda row: jnp.convolve(row[:8], row[8:11])
    )(x),
    "two_channels": two_channels,
    "map": lambda x: lax.map(jnp.tanh, x),
    "map_with_weights": lambda x: lax.map(lambda row: row * UNEQUAL, x),
    "scan": lambda x: scan(lambda c, row: (c, c * row), 2.0, x)[1],
    "scan_of_sum": lambda x: scan(
        lambda c, row: (c + row, row**2), 0 * UNEQUAL, x
    )[1],
    "map_of_loop": lambda x: lax.map(
        lambda row: lax.scan(lambda c, v: (0.5 * c + v, c), 0.0, row)[1], x
    ),
    "map_of_branch": lambda x: lax.map(
        lambda row: lax.cond(row[0] > 0, jnp.sin, jnp.cos, row), x
    ),
    "transposed_reshape": lambda x: lax.reshape(
        x.T, (x.shape[0], 2, 8), dimensions=(1, 0)
    ),
}


@pytest.mark.parametrize("name", SEPARATE)
def test_shows_that_rows_are_separate(name):
    finding = analyze(SEPARATE[name])
    assert finding.verdict is Verdict.MEAN
    assert not finding.unshown
    assert not finding.counting


MIXED = {
    "set_reversed": lambda x: set_at(x, number(x)[::-1], largest(x)),
    "set_by_data": lambda x: set_at(x, largest(x) % len(x), largest(x)),
    "set_next_row": lambda x: set_at(x, (number(x) + 1) % len(x), largest(x)),
    "set_of_next_row": lambda x: x.at[number(x), largest(x)].set(
        jnp.roll(x[:, 0], 1)
    ),
    "set_at_column_of_next_row": lambda x: x.at[
        number(x), jnp.roll(largest(x), 1)
    ].set(x[:, 0]),
    "set_number": lambda x: x.at[number(x), largest(x)].set(
        jnp.arange(len(x)) + 1.0
    ),
    "numbers": lambda x: scattered_numbers(x).astype("float32") * x,
    "numbers_above": lambda x: jnp.where(scattered_numbers(x) > 3, x, 0),
    "numbers_equal": lambda x: jnp.where(scattered_numbers(x) == 3, x, 0),
    "numbers_of_next_row": lambda x: jnp.where(
        scattered_numbers(x)[:, 0]
        == jnp.roll(jnp.arange(len(x), dtype="uint32") + 1, 1),
        x[:, 0],
        0,
    ),
    "other_numbers": lambda x: jnp.where(
        scattered_numbers(x)[:, 0]
        == 2 * (jnp.arange(len(x), dtype="uint32") + 1),
        x[:, 0],
        0,
    ),
    "solve_of_product": lambda x: (
        jnp.linalg.solve(x.T @ x + jnp.eye(16), x.T).T
    ),
    "inv_of_mean": lambda x: (
        x[:, :SIZE] @ jnp.linalg.inv(matrices(x).mean(axis=0))
    ),
    "solve_next_row": lambda x: jnp.linalg.solve(
        matrices(x), jnp.roll(x, 1, axis=0)[:, :SIZE, None]
    ),
    "expm_of_scaled": lambda x: linalg.expm(
        matrices(x) / jnp.linalg.norm(matrices(x))
    ),
    "expm_of_rows": lambda x: linalg.expm(x @ x.T),
    "kernel_of_next_row": lambda x: one_kernel_a_row(
        x, jnp.roll(x[:, 8:11], 1, axis=0)
    ),
    "kernel_of_last_row": lambda x: one_kernel_a_row(x, x[::-1, 8:11]),
    "kernel_by_place": lambda x: one_kernel_a_row(
        x, jnp.arange(3.0 * len(x)).reshape(-1, 3)
    ),
    "image_of_other_rows": lambda x: one_kernel_a_row(
        x, x[:, 8:11], transpose=False
    ),
    "kernels_in_pairs": kernels_in_pairs,
    "other_rank": other_rank,
    "channels_before_rows": channels_before_rows,
    "scan_sums": lambda x: scan(lambda c, v: (c + v, c), 0 * UNEQUAL, x)[1],
    "scan_last_sum": lambda x: (
        x * scan(lambda c, v: (c + v, v), 0 * UNEQUAL, x)[0]
    ),
    "scan_moving_mean": lambda x: scan(
        lambda c, v: (0.5 * c + v, c), 0 * UNEQUAL, x
    )[1],
    "scan_last_row": lambda x: scan(lambda c, v: (v, c), 0 * UNEQUAL, x)[1],
    "scan_counts": lambda x: scan(lambda c, v: (c + 1, c * v), 0.0, x)[1],
    "scan_largest": lambda x: scan(
        lambda c, v: (jnp.maximum(c, v), c), 0 * UNEQUAL, x
    )[1],
    "scan_doubles": lambda x: scan(lambda c, v: (c + c, c * v), UNEQUAL, x)[1],
    "scan_swaps": lambda x: scan(
        lambda c, v: ((c[1], c[0]), c[0] * v), (UNEQUAL, 2 * UNEQUAL), x
    )[1],
    "scan_with_place": lambda x: scan(
        lambda c, pair: (c, pair[0] * pair[1]), 0.0, x, jnp.arange(1.0 * len(x))
    )[1],
    "map_with_all": lambda x: lax.map(lambda row: x @ row, x),
    "map_with_mean": lambda x: lax.map(lambda row: row - x.mean(axis=0), x),
    "map_with_next": lambda x: lax.map(
        lambda pair: pair[0] * pair[1], (x, jnp.roll(x, 1, axis=0))
    ),
    "transposed_reshape": lambda x: lax.reshape(
        x, (x.shape[0], 16), dimensions=(1, 0)
    ),
    "scan_running_sum": lambda x: scan(
        lambda c, v: (c + v,) * 2, 0 * UNEQUAL, x
    )[1],
    "scan_of_running_sum": lambda x: scan(
        lambda c, v: (c + v, (c + v) * v), 0.0 * UNEQUAL, x
    )[1],
    "lu_of_rows": lambda x: lax.linalg.lu(x)[0],
    "qr_of_rows": lambda x: jnp.linalg.qr(x)[0],
    "triangular_of_rows": lambda x: linalg.solve_triangular(
        jnp.tril(jnp.ones((len(x), len(x)))), x, lower=True
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_does_not_show_what_mixes_rows(name):
    assert analyze(MIXED[name]).verdict is not Verdict.MEAN
