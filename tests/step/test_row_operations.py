"""Operations that compute each row by itself: mapped, and as on one device.

What is not shown to compute each row by itself runs over the global batch, with
a warning that names the primitive, unless it is marked with `ks.by_rows`.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas

import keras_strategies as ks
from tests.support.combinations import cover
from tests.support.plain_keras import mirrored

SIZE, FEATURES, ROWS = 4, 8, 24
_random = np.random.default_rng(0)
X = _random.normal(size=(ROWS, FEATURES)).astype("float32")
Y = _random.normal(size=(ROWS, 2)).astype("float32")


def matrices(x):
    return 3 * jnp.eye(SIZE) + 0.3 * jnp.reshape(x, (-1, SIZE, SIZE))


def flat(x):
    return jnp.reshape(x, (len(x), -1))


def numbers(x):
    return jnp.arange(len(x))


def largest(x):
    return jnp.argmax(x, axis=-1)


def each(fn):
    return lambda x: flat(jax.vmap(fn)(x))


def differentiable(fn):
    """Makes a function that computes a sine differentiable."""
    sine = jax.custom_jvp(fn)
    sine.defjvp(lambda x, t: (sine(*x), jnp.cos(*x) * t[0]))
    return sine


@differentiable
def callback(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda x: np.sin(np.asarray(x)), shape, x)


@differentiable
def kernel(x):
    def compute(read, write):
        write[...] = jnp.sin(read[...])

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(compute, out_shape=shape, interpret=True)(x)


def halve(row):
    """Halves a row until it is small: with its own number of iterations."""
    row = lax.stop_gradient(row)
    return lax.while_loop(
        lambda x: jnp.max(jnp.abs(x)) > 0.3, lambda x: 0.5 * x, row
    )


OPERATIONS = {
    "set": lambda x: x.at[numbers(x), largest(x)].set(2 * x[:, 0]),
    "solve": lambda x: flat(jnp.linalg.solve(matrices(x), x[:, :SIZE, None])),
    "inv": lambda x: flat(jnp.linalg.inv(matrices(x))),
    "expm": lambda x: flat(jax.scipy.linalg.expm(0.1 * matrices(x))),
    "kernel_of_row": each(lambda x: jnp.convolve(x[:8], x[8:11], mode="same")),
    "map": lambda x: lax.map(lambda row: jnp.tanh(row) * 2, x),
    "scan": lambda x: lax.scan(lambda c, row: (c, jnp.sin(c * row)), 2.0, x)[1],
    "callback": callback,
    "kernel": kernel,
    "softmax": jax.nn.softmax,
    "sort": lambda x: jnp.sort(x, axis=-1),
    "cumsum": lambda x: jnp.cumsum(x, axis=-1),
    "top_k": lambda x: lax.top_k(x, 5)[0],
    "take_along_axis": lambda x: jnp.take_along_axis(
        x, jnp.argsort(x, axis=-1), axis=-1
    ),
    "own_entry": lambda x: x[numbers(x), largest(x)][:, None],
    "add": lambda x: x.at[numbers(x), largest(x)].add(x[:, 1]),
    "einsum": lambda x: flat(
        jnp.einsum("bij,bjk->bik", matrices(x), matrices(x))
    ),
    "fft": lambda x: jnp.abs(jnp.fft.rfft(x)),
    "cholesky": each(
        lambda x: jnp.linalg.cholesky(jnp.outer(x, x) + jnp.eye(16))
    ),
    "qr": lambda x: flat(jnp.linalg.qr(matrices(x))[1]),
    "eigh": lambda x: jnp.linalg.eigh(matrices(x) @ matrices(x).mT)[0],
    "svd": lambda x: jnp.linalg.svd(matrices(x))[1],
    "triangular": lambda x: flat(
        jax.scipy.linalg.solve_triangular(matrices(x), matrices(x), lower=True)
    ),
    "branch": each(lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)),
    "interp": each(
        lambda x: jnp.interp(
            x, jnp.linspace(-2, 2, 9), jnp.linspace(0, 1, 9) ** 2
        )
    ),
}
OTHERS = {
    "map_in_pieces": lambda x: lax.map(jnp.tanh, x, batch_size=2),
    "halve": each(halve),
}
UNSHOWN = {
    "callback": "`pure_callback`",
    "kernel": "`pallas_call`",
    "halve": "`while`",
    "map_in_pieces": "its loss is not a mean",
}
"""What a warning names, for what is not shown without a mark."""

CASES = [(2, 12), (3, 12), (2, 11), (3, 11)]
"""Numbers of replicas, and rows of a batch, that they can share or not."""
OF_ISSUE = set(list(OPERATIONS)[:9])


class Operation(keras.layers.Layer):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def call(self, x):
        return self.fn(x)

    def compute_output_spec(self, x):
        # Keras traces with a size that is no number.
        shape = jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype)
        result = jax.eval_shape(self.fn, shape)
        return keras.KerasTensor((None, *result.shape[1:]), result.dtype)


def train(fn, strategy, batch):
    """Trains a model; its weights, and warnings of the global batch."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(SIZE * SIZE, "tanh"),
                Operation(fn),
                keras.layers.Dense(2),
            ]
        )
        model.compile(keras.optimizers.SGD(0.01), "mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, Y, batch_size=batch, shuffle=False, verbose=0)
    messages = [str(w.message) for w in caught]
    return model.get_weights(), [m for m in messages if "global batch" in m]


@functools.cache
def of_one_device(fn, batch):
    return train(fn, ks.OneDeviceStrategy("cpu:0"), batch)[0]


def check(fn, case, marked=None):
    """Checks for one device's numbers; returns the warnings."""
    replicas, batch = case
    expected = of_one_device(fn, batch)
    weights, messages = train(marked or fn, mirrored(replicas), batch)
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=3e-5, atol=3e-5)
    return messages


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, CASES[(k + j) % 4], marks=marks)
        for k, name in enumerate(OPERATIONS | OTHERS)
        for j in range(4)
        for marks in [() if name in OF_ISSUE and not j else pytest.mark.slow]
    ],
)
def test_an_operation_has_one_devices_numbers_and_is_mapped(name, case):
    messages = check((OPERATIONS | OTHERS)[name], case)
    # The last rows of a batch of 24 rows are two, which three replicas cannot
    # share.
    is_seen = case != (3, 11)
    assert len(messages) == (is_seen and name in UNSHOWN)
    assert all(UNSHOWN[name] in message for message in messages)


@pytest.mark.parametrize(("name", "case"), cover(list(UNSHOWN), CASES))
def test_a_marked_operation_is_mapped(name, case):
    fn = (OPERATIONS | OTHERS)[name]
    assert not check(fn, case, ks.by_rows(fn))


def test_the_table_has_25_operations():
    assert len(OPERATIONS) == 25
    assert len(OPERATIONS.keys() & UNSHOWN.keys()) == 2
