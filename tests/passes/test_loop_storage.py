"""What the loops of a forward and a backward pass store."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from keras_strategies.passes.loop_storage import rewrite_loops
from keras_strategies.passes.stages import all_equations
from tests.support.combinations import few

ROWS, TURNS, UNITS = 2, 5, 16
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, TURNS, 7)).astype("float32")
MASK = np.arange(TURNS) < np.array([[3], [5]])


def count_products(traced):
    """The products in the bodies of loops, and outside of them."""

    def count(equations):
        return sum(e.primitive.name == "dot_general" for e in equations)

    loops = [
        e for e in all_equations(traced.jaxpr) if e.primitive.name == "scan"
    ]
    inside = sum(count(all_equations(e.params["jaxpr"])) for e in loops)
    return inside, count(all_equations(traced.jaxpr)) - inside


def gradients_of(layer, **options):
    layer.build(X.shape)
    for variable in layer.trainable_variables:
        variable.assign(RNG.normal(size=variable.shape, scale=0.3))
    state = [v.value for v in layer.trainable_variables]

    def loss(weights, x):
        others = [v.value for v in layer.non_trainable_variables]
        result, _ = layer.stateless_call(weights, others, x, **options)
        return sum(map(jnp.sum, map(jnp.sin, jax.tree.leaves(result))))

    return jax.make_jaxpr(jax.value_and_grad(loss))(state, X), state


def compare(traced, *args, rtol=2e-5):
    changed = rewrite_loops(traced)
    leaves = jax.tree.leaves(args)
    wanted = jax.jit(jaxpr_as_fun(traced))(*leaves)
    found = jax.jit(jaxpr_as_fun(changed))(*leaves)
    for one, other in zip(found, wanted, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        one, other = (np.asarray(x, "float32") for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol)
    return changed


BOTH = keras.layers.Bidirectional
# Products of the inputs, and of the gradients of two weights.
CELLS = {
    "LSTM": (lambda **o: keras.layers.LSTM(UNITS, **o), 3),
    "GRU": (lambda **o: keras.layers.GRU(UNITS, **o), 3),
    "SimpleRNN": (lambda **o: keras.layers.SimpleRNN(UNITS, **o), 3),
    "Bidirectional": (lambda **o: BOTH(keras.layers.LSTM(UNITS, **o)), 6),
    "backwards": (lambda **o: keras.layers.GRU(UNITS, **o), 3),
}
OPTIONS = [
    {},
    {"return_sequences": True, "return_state": True},
    {"stateful": True},
    {"dtype": "mixed_bfloat16"},
]


@pytest.mark.parametrize(
    ("name", "options", "has_mask"),
    few(
        [
            (name, options, has_mask)
            for name in CELLS
            for options in OPTIONS
            for has_mask in (False, True)
        ],
        every=5,
    ),
)
def test_products_leave_the_loop(name, options, has_mask):
    make, count = CELLS[name]
    options = {"go_backwards": name == "backwards"} | options
    layer = make(use_cudnn=False, **options) if "RNN" not in name else None
    layer = layer or make(**options)
    traced, state = gradients_of(
        layer, **({"mask": jnp.asarray(MASK)} if has_mask else {})
    )
    is_half = "dtype" in options
    changed = compare(traced, state, X, rtol=0.03 if is_half else 2e-5)
    before, after = count_products(traced), count_products(changed)
    assert after == (before[0] - count, before[1] + count)


def count_results(traced):
    """The results of each loop of a program."""
    equations = all_equations(traced.jaxpr)
    return [len(e.outvars) for e in equations if e.primitive.name == "scan"]


def test_values_that_follow_from_others_are_not_stored():
    traced, state = gradients_of(keras.layers.LSTM(UNITS, use_cudnn=False))
    forward = max(count_results(traced))
    changed = compare(traced, state, X)
    # Derivatives of sigmoids and of tanh: five, or three with JAX 0.12.
    assert max(count_results(changed)) <= forward - 3


def test_values_that_the_program_returns_are_stored():
    def gate(carry, x):
        carry = jax.nn.sigmoid(carry + x)
        return carry, (carry, carry * (1 - carry))

    def read(_, y):
        return 0.0, y[0] * y[1]

    def keep(x, reads_again):
        _, (y, slope) = jax.lax.scan(gate, x[0], x)
        result = jax.lax.scan(read, 0.0, (y, slope))[1]
        return (result, slope) if reads_again else result

    for reads_again in (False, True):
        traced = jax.make_jaxpr(lambda x, r=reads_again: keep(x, r))(
            drawn(4, 3)
        )
        changed = compare(traced, drawn(4, 3))
        dropped = sum(count_results(traced)) - sum(count_results(changed))
        assert dropped == (0 if reads_again else 1)


def trace(body, weight, carry, turns, is_reversed=False):
    def loss(weight, carry, turns):
        carry, results = jax.lax.scan(
            lambda c, x: body(weight, c, x), carry, turns, reverse=is_reversed
        )
        return jnp.sum(jnp.sin(carry)) + jnp.sum(results)

    make = jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    return make(weight, carry, turns), (weight, carry, turns)


def apply_bias(weight, carry, x):
    kernel, bias = weight
    carry = jnp.tanh(carry @ kernel + bias + x)
    return carry, carry**2


def drawn(*shape):
    return RNG.normal(size=shape).astype("float32") * 0.3


@pytest.mark.parametrize("is_reversed", [False, True])
def test_products_and_sums_of_rows(is_reversed):
    weight = drawn(UNITS, UNITS), drawn(UNITS)
    traced, args = trace(
        apply_bias, weight, drawn(3, UNITS), drawn(4, 3, UNITS), is_reversed
    )
    changed = compare(traced, *args)
    assert count_products(changed)[0] == count_products(traced)[0] - 1


def test_products_with_a_batch_of_matrices():
    def body(weight, carry, x):
        carry = jnp.tanh(jnp.einsum("bnd,nde->bne", carry, weight) + x)
        return carry, x

    weight, carry = drawn(2, UNITS, UNITS), drawn(3, 2, UNITS)
    traced, args = trace(body, weight, carry, drawn(4, 3, 2, UNITS))
    changed = compare(traced, *args)
    assert count_products(changed)[0] == count_products(traced)[0] - 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_products_with_a_weight_are_before_and_after_the_loop(dtype):
    def body(carry, x):
        x = 2 * x
        carry = jnp.maximum(carry, x @ weight)
        return carry, (carry @ wide, x @ wide, x)

    weight, wide, x, carry = (
        jnp.asarray(9 * drawn(*shape), dtype)
        for shape in ((UNITS, UNITS), (UNITS, 40), (5, 2, UNITS), (2, UNITS))
    )
    traced = jax.make_jaxpr(lambda c, x: jax.lax.scan(body, c, x))(carry, x)
    changed = compare(traced, carry, x, rtol=0.02 if dtype != "int32" else 0)
    assert (count_products(traced), count_products(changed)) == ((3, 0), (0, 3))


def test_what_is_stacked_is_no_larger_than_what_the_loop_reads():
    def body(total, words):
        scores = x @ words.T
        return total + jnp.sin(scores) @ words, scores.max()

    # A loop over blocks of words, for scores that are never all stored.
    x, words = drawn(64, 32), drawn(5, 16, 32)
    zeros = jnp.zeros((64, 32))
    traced = jax.make_jaxpr(lambda w: jax.lax.scan(body, zeros, w))(words)
    assert count_products(rewrite_loops(traced)) == (2, 0)


OTHERS = {
    # More rows than the weight has: the loop would write more.
    "rows": (apply_bias, (drawn(4, 4), drawn(4)), (64, 4)),
    # A gradient that is no sum of products.
    "power": (
        lambda w, c, x: (c * w[0] + x, c.sum() * w[1]),
        (drawn(UNITS), drawn(UNITS)),
        (2, UNITS),
    ),
}


@pytest.mark.parametrize(
    ("body", "weight", "shape"), OTHERS.values(), ids=OTHERS
)
def test_other_loops_stay(body, weight, shape):
    traced, _ = trace(body, weight, drawn(*shape), drawn(4, *shape))
    changed = rewrite_loops(traced)
    assert count_products(changed) == count_products(traced)


def test_a_carry_that_is_read_elsewhere_stays():
    def body(sums, x):
        sums = sums + x.T @ x
        return sums, sums[0, 0]

    def read_before(sums, x):
        return sums + x.T @ x, sums.sum()

    def twice(sums, x):
        return sums + sums * 0.5 + x.T @ x, 0.0

    for each in (body, read_before, twice):
        traced = jax.make_jaxpr(lambda c, x, f=each: jax.lax.scan(f, c, x))(
            drawn(UNITS, UNITS), drawn(4, 2, UNITS)
        )
        assert rewrite_loops(traced) is traced


def test_a_loop_with_effects_stays():
    def body(sums, x):
        jax.debug.print("{x}", x=x[0, 0])
        return sums + x.T @ x, 0.0

    traced = jax.make_jaxpr(lambda c, x: jax.lax.scan(body, c, x))(
        drawn(UNITS, UNITS), drawn(4, 2, UNITS)
    )
    assert rewrite_loops(traced) is traced


def test_sums_of_integers_stay_in_the_loop():
    def cut(total, x):
        rows = jnp.sum(3 * x).astype("int32")
        products = (x.T @ x).astype("int32")
        return (total[0] + rows, total[1] + products), None

    def add_up(x):
        zeros = jnp.int32(0), jnp.zeros((UNITS, UNITS), "int32")
        return jax.lax.scan(cut, zeros, x)[0]

    x = RNG.normal(size=(50, 8, UNITS)).astype("float32")
    traced = jax.make_jaxpr(add_up)(x)
    changed = compare(traced, x, rtol=0)
    assert count_products(changed) == count_products(traced) == (1, 0)


def test_products_are_summed_in_the_dtype_of_the_carry():
    def add_up(x):
        def add(total, x):
            return total + (x.T @ x).astype("float32"), None

        return jax.lax.scan(add, jnp.zeros((UNITS, UNITS)), x)[0]

    x = jnp.asarray(RNG.normal(size=(200, 2, UNITS)), "bfloat16")
    changed = rewrite_loops(jax.make_jaxpr(add_up)(x))
    assert count_products(changed) == (0, 1)
    exact = np.einsum("tri,trj->ij", *2 * [np.asarray(x, "float64")])
    (total,) = jaxpr_as_fun(changed)(x)
    np.testing.assert_allclose(total, exact, rtol=1e-4, atol=1e-3)


def test_results_that_are_one_array_or_an_operand():
    weight = jnp.asarray(RNG.normal(size=(7, 7)), "float32")

    def loop(weight, x):
        def body(carry, row):
            product = row @ weight
            return carry + row.T @ row, (row, product, product, carry)

        return jax.lax.scan(body, jnp.zeros((7, 7)), x)

    traced = jax.make_jaxpr(loop)(weight, X)
    assert compare(traced, weight, X) is not traced


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_random_loops(seed):
    random = np.random.default_rng(seed)
    units = int(random.choice([2, 4, 8, 16]))
    weights = random.normal(size=(2, units, units), scale=0.4).astype("float32")
    rows = random.normal(size=(TURNS, ROWS, units)).astype("float32")
    numbers = random.integers(100, size=(6, 3))
    places = random.integers(100, size=4)
    kinds = [
        lambda a, b, w: a @ w,
        lambda a, b, w: jnp.tanh(a),
        lambda a, b, w: jax.nn.sigmoid(a @ w + w[0]) * b,
        lambda a, b, w: a * b,
        lambda a, b, w: a - 0.5 * b,
        lambda a, b, w: jnp.where(a > 0, a, b),
    ]

    def body(weights, carry, row):
        state, total, whole = carry
        values = [state, row, row @ weights[1]]
        for kind, one, two in numbers:
            a, b = (values[k % len(values)] for k in (one, two))
            weight = weights[(one + two) % 2]
            values.append(kinds[kind % len(kinds)](a, b, weight))
        a, b, c, d = (values[k % len(values)] for k in places)
        new = total + a.T @ b
        whole += (a.T @ b).astype(whole.dtype)
        results = c, d, (new if seed % 2 else total)
        return (jnp.tanh(values[-1]), new, whole), results

    def loss(weights, rows):
        start = (
            jnp.zeros((ROWS, units)),
            jnp.zeros((units, units)),
            jnp.zeros((units, units), random.choice(["int32", "int8"])),
        )
        (state, total, whole), results = jax.lax.scan(
            lambda *args: body(weights, *args),
            start,
            rows,
            reverse=bool(seed % 3),
            unroll=1 + seed % 2,
        )
        terms = map(jnp.sin, (state, total, *results))
        return sum(map(jnp.sum, terms)), (total, whole, results)

    derive = jax.value_and_grad(loss, (0, 1), has_aux=True)
    function = derive if seed % 4 else loss
    traced = jax.make_jaxpr(function)(weights, rows)
    compare(traced, weights, rows, rtol=1e-4)
