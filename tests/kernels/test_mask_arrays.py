"""Masks that a step computes as arrays, and the parts that are recognized."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import ops

from keras_strategies.kernels.kernels import patched
from keras_strategies.kernels.mask_arrays import recognize_mask
from keras_strategies.kernels.splash_attention import AttentionMask

ROWS, LENGTH, HEADS = 3, 12, 2
RNG = np.random.default_rng(0)
PADDING = RNG.random((ROWS, LENGTH)) > 0.3
SEGMENTS = np.sort(RNG.integers(0, 4, (ROWS, LENGTH)), axis=1)
IS_LATER = np.triu(np.ones((LENGTH, LENGTH), bool), 1)


def causal_of_hub(length=LENGTH, dtype="float32", start=0):
    """As `compute_causal_mask` of keras-hub computes it."""
    i = ops.arange(length, dtype=dtype)
    i = ops.expand_dims(i + ops.cast(start, dtype), axis=1)
    mask = ops.expand_dims(i >= ops.arange(length, dtype=dtype), axis=0)
    return ops.broadcast_to(mask, (ROWS, length, length))


def merged(padding, mask):
    """As `merge_padding_and_attention_mask` and decoders combine them."""
    padding = ops.cast(ops.expand_dims(padding, axis=1), "int32")
    return ops.cast(ops.minimum(padding, mask)[:, None], "bool")


def window_of_mistral(padding, segments):
    i = ops.arange(LENGTH)[:, None] + 0
    upper = ops.cast(i < ops.arange(LENGTH)[None, :] + 4, "int32")
    return merged(padding, ops.minimum(causal_of_hub(), upper))


def window_of_gemma(padding, segments):
    mask = ops.minimum(
        ops.cast(padding[:, None], "int32"), ops.cast(causal_of_hub(), "int32")
    )
    ones = ops.ones((LENGTH, LENGTH), "bool")
    window = ops.triu(ones, -3) * ops.tril(ones, 3)
    window = ops.slice(window, (0, 0), (LENGTH, LENGTH))[None]
    mask = ops.logical_and(mask, ops.cast(window, "bool"))
    return ops.cast(mask[:, None], "bool")


def by_layer(**options):
    def make(padding, segments):
        layer = keras.layers.MultiHeadAttention(
            HEADS, 4, sliding_window=options.get("sliding_window")
        )
        x = jnp.zeros((ROWS, LENGTH, 8))
        mask = layer._compute_attention_mask(
            x,
            x,
            query_mask=padding if "queries" in options else None,
            value_mask=padding if "keys" in options else None,
            use_causal_mask=options.get("is_causal", False),
        )
        return mask[:, None]

    return make


def packed(padding, segments):
    return (segments[:, :, None] == segments[:, None, :])[:, None]


def packed_causal(padding, segments):
    return packed(padding, segments) & causal_of_hub()[:, None]


def halves(axis):
    return jnp.cumsum(jnp.full((LENGTH, LENGTH), 0.5), axis)


def places():
    return jnp.arange(LENGTH)


def ones(dtype="float32", length=LENGTH):
    return ops.ones((1, 1, length, length), dtype)


def tri():
    return jnp.tri(LENGTH, dtype=bool)


def expand(mask):
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


QUERY, KEY = np.arange(LENGTH)[:, None], np.arange(LENGTH)
IS_NEAR = (QUERY - KEY < 3) & (KEY - QUERY < 2)
RECOGNIZED = {
    "keras-hub, causal": (lambda p, s: causal_of_hub()[:, None], (None, 0)),
    "keras-hub, padding": (lambda p, s: merged(p, causal_of_hub()), (None, 0)),
    "numbers": (
        lambda p, s: merged(p.astype("int32"), causal_of_hub()),
        (None, 0),
    ),
    "Mistral": (window_of_mistral, (3, 0)),
    "Gemma": (window_of_gemma, (3, 0)),
    "layer, causal": (by_layer(is_causal=True), (None, 0)),
    "layer, window": (by_layer(sliding_window=3), (2, 2)),
    "layer, all": (
        by_layer(is_causal=True, sliding_window=3, queries=1, keys=1),
        (2, 0),
    ),
    "layer, padding": (by_layer(queries=1, keys=1), (None, None)),
    "tril": (lambda p, s: ops.tril(ones("bool")), (None, 0)),
    "tril of numbers": (lambda p, s: ops.tril(ones()) > 0, (None, 0)),
    "halves": (lambda p, s: halves(0) >= halves(1), (None, 0)),
    "first part of a larger one": (
        lambda p, s: ops.tril(ones(length=50))[:, :, :LENGTH, :LENGTH] == 1,
        (None, 0),
    ),
    "constant": (lambda p, s: jnp.asarray(~IS_LATER), (None, 0)),
    "constant window": (lambda p, s: jnp.asarray(IS_NEAR), (2, 1)),
    "not later": (lambda p, s: ~(places() > places()[:, None]), (None, 0)),
    "where": (
        lambda p, s: jnp.where(tri() & p[:, None, None], 1.0, 0.0).astype(bool),
        (None, 0),
    ),
    "where not": (
        lambda p, s: jnp.where(~tri(), 0, p[:, None, None]) != 0,
        (None, 0),
    ),
    "not (later or padding)": (
        lambda p, s: ~(jnp.asarray(IS_LATER) | ~p[:, None, None]),
        (None, 0),
    ),
    "later keys": (lambda p, s: 2 * places() >= 2 * QUERY, (0, None)),
    "own key": (lambda p, s: places() == places()[:, None], (0, 0)),
    "one length": (
        lambda p, s: jnp.broadcast_to(places() < 9, (1, 1, LENGTH, LENGTH)),
        (None, None),
    ),
    "lengths": (
        lambda p, s: (
            causal_of_hub()[:, None]
            & (places() < p.sum(1)[:, None])[:, None, None]
        ),
        (None, 0),
    ),
    "packed": (packed, (None, None)),
    "packed, causal": (packed_causal, (None, 0)),
    "packed, causal, padding": (
        lambda p, s: packed(p, s) & merged(p, causal_of_hub()),
        (None, 0),
    ),
    "sums": (
        lambda p, s: (
            (causal_of_hub()[:, None].astype("int32") + p[:, None, None]) > 1
        ),
        (None, 0),
    ),
    "cross": (
        lambda p, s: jnp.broadcast_to(
            p[:, None, None], (ROWS, HEADS, LENGTH, LENGTH)
        ),
        (None, None),
    ),
}


def to_array(mask):
    """The array of a mask's parts, by their definition."""
    used = np.ones((ROWS, LENGTH, LENGTH), bool)
    used &= (LENGTH if mask.left is None else mask.left) >= QUERY - KEY
    used &= (LENGTH if mask.right is None else mask.right) >= KEY - QUERY
    used = jnp.asarray(used)
    if mask.queries is not None:
        used &= mask.queries[:, :, None]
    if mask.keys is not None:
        used &= mask.keys[:, None]
    if mask.query_segments is not None:
        used &= mask.query_segments[:, :, None] == mask.key_segments[:, None]
    return used[:, None]


X = jnp.zeros((ROWS, LENGTH, HEADS, 4))


def compare(make, limits, padding=PADDING, wrap=lambda f: f, enter=None):
    """Whether the parts are those of the array, and for which rows not.

    `enter` calls a function that the array enters as an argument.
    """
    found = []

    def call(padding, segments):
        array = expand(make(padding, segments))
        if enter is not None:
            return enter(read)(jnp.asarray(array))
        return read(array)

    def read(array):
        known = recognize_mask(array, X, X)
        assert known is not None
        mask, wrong = known
        found.append(mask)
        assert mask.scores is None
        wrong = jnp.zeros(ROWS, bool) if wrong is None else wrong
        shape = (ROWS, 1, LENGTH, LENGTH)
        return jnp.broadcast_to(array[:, :1], shape), to_array(mask), wrong

    array, again, wrong = jax.jit(wrap(call))(padding, SEGMENTS)
    assert (found[0].left, found[0].right) == limits
    np.testing.assert_array_equal(array[~wrong], again[~wrong])
    assert not np.asarray(array).all()
    return wrong


@pytest.mark.parametrize(
    ("make", "limits"), RECOGNIZED.values(), ids=RECOGNIZED
)
def test_parts_are_those_of_the_array(make, limits):
    assert not compare(make, limits).any()


@pytest.mark.parametrize("name", ["keras-hub, padding", "packed, causal"])
def test_arrays_that_enter_rematerialized_layers(name):
    def enter(layer):
        inner = keras.remat(lambda x, is_training: layer(x))
        return keras.remat(lambda x: inner(x, True))

    with patched():
        assert not compare(*RECOGNIZED[name], enter=enter).any()


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit])
def test_masks_within_functions(wrap):
    make, limits = RECOGNIZED["packed, causal, padding"]
    assert not compare(make, limits, wrap=wrap).any()


def test_a_mask_that_a_function_reads_from_outside():
    def make(padding, segments):
        mask = merged(padding, causal_of_hub())
        known = []

        def inner(x):
            known.append(recognize_mask(mask & packed(padding, segments), X, X))
            return x

        jax.checkpoint(inner)(0.0)
        assert known[0] is not None
        assert known[0][0].right == 0
        return mask

    assert not compare(make, (None, 0)).any()


def test_rows_with_negative_numbers_are_reported():
    numbers = PADDING.astype("int32")
    numbers[1, 3] = -1
    make, limits = RECOGNIZED["numbers"]
    wrong = compare(make, limits, numbers)
    np.testing.assert_array_equal(wrong, [False, True, False])


NOT_RECOGNIZED = {
    "input": lambda p, s: p[:, None, :, None] & p[:, None, None] | IS_LATER,
    "prefix": lambda p, s: causal_of_hub()[:, None] | (KEY < 3),
    "one position": lambda p, s: (
        jax.lax.broadcasted_iota("int32", (LENGTH, 1), 1) >= KEY
    ),
    "counts that overflow": lambda p, s: (
        jnp.cumsum(jnp.full((LENGTH, LENGTH), 2**30), 0) >= KEY
    ),
    "dilated": lambda p, s: jnp.asarray((QUERY - KEY) % 3 == 0),
    "earlier keys only": lambda p, s: places() < places()[:, None],
    "steps": lambda p, s: 2 * places() <= places()[:, None],
    "reversed": lambda p, s: places() + places()[:, None] < LENGTH,
    "positions of a row": lambda p, s: (s[:, None] <= s[:, :, None])[:, None],
    "other segments": lambda p, s: ~packed(p, s),
    "by heads": lambda p, s: jnp.broadcast_to(
        p[:1, :HEADS, None, None], (1, HEADS, LENGTH, LENGTH)
    ),
    "nothing": lambda p, s: tri() & False,
    "constants by heads": lambda p, s: jnp.asarray(
        np.stack([~IS_LATER, IS_NEAR])[None]
    ),
    "constants by rows": lambda p, s: jnp.asarray(
        np.stack([~IS_LATER, IS_NEAR, IS_NEAR])[:, None]
    ),
}


@pytest.mark.parametrize("make", NOT_RECOGNIZED.values(), ids=NOT_RECOGNIZED)
def test_other_arrays_stay_arrays(make):
    found = []

    def call(padding, segments):
        array = expand(make(padding, segments))
        found.append(recognize_mask(array, X, X))
        return array

    jax.jit(call)(PADDING, SEGMENTS)
    assert found == [None]


@pytest.mark.parametrize("length", [256, 1024])
def test_positions_that_are_rounded_are_no_positions(length):
    """bfloat16 has the integers up to 256."""
    x = jnp.zeros((ROWS, length, HEADS, 4))
    found = []

    def call():
        mask = causal_of_hub(length, "bfloat16")[:, None]
        found.append(recognize_mask(mask, x, x))
        return mask

    mask = np.asarray(jax.jit(call)())[0, 0]
    is_causal = (mask == np.tri(length, dtype=bool)).all()
    assert is_causal == (length == 256) == (found[0] is not None)


def test_an_unfinished_trace_is_left_as_it_is():
    """Only what the mask needs is added to a trace."""

    def call(padding):
        mask = merged(padding, causal_of_hub())
        known = recognize_mask(mask, X, X)
        assert isinstance(known[0], AttentionMask)
        return padding

    before = jax.make_jaxpr(lambda p: merged(p, causal_of_hub()))(PADDING)
    after = jax.make_jaxpr(call)(PADDING)
    assert len(after.eqns) <= len(before.eqns) + 6


def make_leaf(random, padding, segments):
    """A random part of a mask."""
    offset = int(random.integers(-2, 4))
    dtype = random.choice(["int32", "float32", "bfloat16", "int8"])
    place = jnp.arange(LENGTH, dtype=dtype)
    ones = np.ones((LENGTH, LENGTH), bool)
    counts = jnp.cumsum(jnp.ones(LENGTH, "int32"))
    of_rows = [np.tril(ones, k) for k in random.integers(-1, 3, ROWS)]
    parts = [
        lambda: place[:, None] + jnp.asarray(offset, dtype) >= place,
        lambda: jnp.abs(place[:, None] - place) <= abs(offset),
        lambda: padding[:, None, None],
        lambda: padding[:, None, :, None],
        lambda: segments[:, None, :, None] == segments[:, None, None],
        lambda: padding[:1, :HEADS, None, None],
        lambda: jnp.asarray(np.stack(of_rows[:HEADS])[None]),
        lambda: jnp.asarray(np.stack(of_rows)[:, None]),
        lambda: jnp.asarray(np.tril(ones, offset)),
        lambda: jnp.asarray(random.random(ones.shape) < 0.5),
        lambda: place < offset + 3,
        lambda: place < segments.sum(1)[:, None, None, None],
        lambda: counts[:, None] >= counts,
        lambda: jnp.tril(jnp.ones((ROWS, 1, LENGTH, LENGTH), bool), offset),
    ]
    return expand(parts[random.integers(len(parts))]())


COMBINED = [
    *[jnp.logical_and] * 4,
    jnp.logical_or,
    jnp.logical_xor,
    lambda a, b: ~(a | b),
    lambda a, b: jnp.minimum(a.astype(int), b.astype(int)).astype(bool),
    lambda a, b: a.astype("float32") * b.astype("float32") > 0.5,
    lambda a, b: jnp.where(a, b, False),
    lambda a, b: a.astype(int) + b.astype(int) > 1,
    lambda a, b: jnp.where(a, b.astype(int) * 3, 0) != 0,
]


def make_tree(random, depth, *given):
    if depth == 0 or random.random() < 0.2:
        return make_leaf(random, *given)
    parts = [make_tree(random, depth - 1, *given) for _ in range(2)]
    return COMBINED[random.integers(len(COMBINED))](*parts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300))
def test_what_is_recognized_of_random_masks_is_right(seed):
    random = np.random.default_rng(seed)

    def call(padding, segments):
        array = make_tree(random, seed % 4, padding, segments)
        known = recognize_mask(array, X, X)
        mask, wrong = known or (None, None)
        again = array if mask is None else to_array(mask)
        return array, again, jnp.zeros(ROWS, bool) if wrong is None else wrong

    array, again, wrong = jax.jit(call)(PADDING, SEGMENTS)
    shape = (ROWS, HEADS, LENGTH, LENGTH)
    array, again = (np.broadcast_to(a, shape) for a in (array, again))
    np.testing.assert_array_equal(array[~wrong], again[~wrong])
