"""The interpreted kernel of attention is compared with the formula."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keras_strategies.kernels import attention_mask, splash_attention
from keras_strategies.kernels.attention_mask import AttentionMask
from tests.support.splash import interpreted  # noqa: F401

pytestmark = pytest.mark.usefixtures("interpreted")
RNG = np.random.default_rng(0)
ROWS, LENGTH = 2, 256
# The first row's first keys are excluded, and all keys of the second row.
KEYS = RNG.random((ROWS, LENGTH)) > 0.4
KEYS[0, :7] = KEYS[1] = False
QUERIES = RNG.random((ROWS, LENGTH)) > 0.3
SCORES = RNG.random((ROWS, 2, LENGTH, LENGTH)) > 0.5
SCORES[0, :, :200] = False
SEGMENTS = np.sort(RNG.integers(-3, 4, (ROWS, LENGTH)), axis=1).astype("int32")


def by_formula(query, key, value, mask, scale, cap):
    query, key, value = (x.astype("float32") for x in (query, key, value))
    key, value = (
        jnp.repeat(x, query.shape[2] // x.shape[2], axis=2)
        for x in (key, value)
    )
    product = functools.partial(jnp.einsum, precision="highest")
    scores = scale * product("bthd,bshd->bhts", query, key)
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    distance = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])
    used = jnp.ones_like(scores, bool)
    if mask.left is not None:
        used &= distance <= mask.left
    if mask.right is not None:
        used &= -distance <= mask.right
    if mask.queries is not None:
        used &= mask.queries[:, None, :, None]
    if mask.keys is not None:
        used &= mask.keys[:, None, None, :]
    if mask.query_segments is not None:
        queries, keys = mask.query_segments, mask.key_segments
        used &= (queries[:, :, None] == keys[:, None])[:, None]
    if mask.scores is not None:
        used &= mask.scores
    scores = jnp.where(used, scores, 0.7 * jnp.finfo("float32").min)
    return product("bhts,bshd->bthd", jax.nn.softmax(scores), value)


CASES = {
    "all keys": {},
    "causal": {"right": 0},
    "window": {"left": 30, "right": 30},
    "causal window": {"left": 100, "right": 0},
    "window of one": {"left": 0, "right": 0},
    "keys": {"keys": KEYS},
    "causal, keys": {"keys": KEYS, "right": 0},
    "queries, keys": {"queries": QUERIES, "keys": KEYS, "left": 40, "right": 0},
    "queries": {"queries": QUERIES},
    "padded": {"queries_length": 200, "keys_length": 150},
    "padded, causal": {"queries_length": 200, "keys_length": 200, "right": 0},
    "padded, window": {
        "queries_length": 200,
        "keys_length": 200,
        "left": 30,
        "right": 30,
        "queries": QUERIES[:, :200],
        "keys": KEYS[:, :200],
    },
    "padded, scores": {
        "queries_length": 200,
        "keys_length": 150,
        "scores": SCORES[:, :1, :200, :150],
    },
    "segments": {"query_segments": SEGMENTS, "key_segments": SEGMENTS},
    "segments, causal, keys, queries": {
        "query_segments": SEGMENTS,
        "key_segments": SEGMENTS[:, ::-1],
        "keys": KEYS,
        "queries": QUERIES,
        "right": 0,
    },
    "scores": {"scores": SCORES[:, :1]},
    "scores of all rows": {"scores": SCORES[:1, :1]},
    "scores by head": {"scores": SCORES},
    "grouped": {"kv_heads": 2, "heads": 4, "right": 0},
    "grouped, keys": {"kv_heads": 1, "heads": 4, "keys": KEYS},
    "cap": {"cap": 0.5, "right": 0},
    "bfloat16": {"dtype": "bfloat16", "right": 0},
    "fewer queries": {"queries_length": 128},
    "fewer keys": {"keys_length": 128, "left": 20, "right": 0},
    "other depth of values": {"depth": 32, "value_depth": 96},
    "deep heads": {"depth": 256, "right": 0},
}


# Interpreted kernels are slow to compile.
QUICK = (
    "padded",
    "queries, keys",
    "segments, causal, keys, queries",
    "scores by head",
    "cap",
)
PARAMS = [
    pytest.param(case, id=name, marks=[] if name in QUICK else pytest.mark.slow)
    for name, case in CASES.items()
]


@pytest.mark.parametrize("case", PARAMS)
def test_it_is_attention(case):
    check(case)


@pytest.mark.parametrize(
    ("rows", "maximum", "heads"),
    # One more group than there are full ones, with a row that is no row.
    [(3, 2, 2), pytest.param(4, 2, 1, marks=pytest.mark.slow)],
)
def test_rows_of_a_mask_array_are_computed_in_groups(
    monkeypatch, rows, maximum, heads
):
    bytes_of_a_row = 2 * 8 * 128 * 6
    monkeypatch.setattr(
        splash_attention, "_TABLE_BYTES", maximum * bytes_of_a_row
    )
    assert splash_attention.count_rows_at_once(2, 128, 128) == maximum
    scores = RNG.random((rows, heads, 128, 128)) > 0.5
    scores[-1, 0, :50] = False
    lengths = {"queries_length": 128, "keys_length": 128}
    check({"scores": scores, "rows": rows, "kv_heads": 1} | lengths)


@pytest.mark.parametrize(
    ("heads", "queries", "keys", "rows"),
    [
        (12, 384, 384, 12),
        (16, 1024, 1024, 9),
        (16, 1920, 1920, 4),
        (16, 3968, 3968, 2),
        (16, 128, 16512, 4),
        (16, 16512, 16512, 0),
    ],
)
def test_rows_whose_tables_fit(heads, queries, keys, rows):
    found = splash_attention.count_rows_at_once(heads, queries, keys)
    assert found == rows


def check(case):
    case = {
        "rows": ROWS,
        "heads": 2,
        "kv_heads": 2,
        "depth": 64,
        "queries_length": LENGTH,
        "keys_length": LENGTH,
        "dtype": "float32",
        "cap": None,
    } | case
    fields = [f for f in AttentionMask.__dataclass_fields__ if f in case]
    mask = AttentionMask(
        **{
            f: case[f] if isinstance(case[f], int) else jnp.asarray(case[f])
            for f in fields
        }
    )
    depth, value_depth = case["depth"], case.get("value_depth", case["depth"])
    shapes = (
        (case["queries_length"], case["heads"], depth),
        (case["keys_length"], case["kv_heads"], depth),
        (case["keys_length"], case["kv_heads"], value_depth),
        (case["queries_length"], case["heads"], value_depth),
    )
    *arrays, gradient = (
        jnp.asarray(RNG.normal(size=(case["rows"], *shape)), case["dtype"])
        for shape in shapes
    )

    def attend(query, key, value):
        scaled = (query * 0.3).astype(query.dtype)
        return splash_attention.splash_attention(
            scaled, key, value, mask, soft_cap=case["cap"]
        )

    found, gradients = jax.vjp(jax.jit(attend), *arrays)
    wanted, formula_gradient = jax.vjp(
        lambda *arrays: by_formula(*arrays, mask, 0.3, case["cap"]), *arrays
    )
    assert found.dtype == case["dtype"]
    tolerance = 1e-5 if case["dtype"] == "float32" else 0.02
    pairs = zip(
        (found, *gradients(gradient)),
        (wanted, *formula_gradient(gradient.astype("float32"))),
        strict=True,
    )
    for one, other in pairs:
        one, other = (np.asarray(x, "float32") for x in (one, other))
        limit = tolerance * max(np.abs(other).max(), 1.0)
        np.testing.assert_allclose(one, other, rtol=0, atol=limit)


def test_pairs_are_counted_within_the_limits():
    count = attention_mask.count_pairs
    assert count(AttentionMask(), 4, 6) == 24
    assert count(AttentionMask(right=0), 4, 4) == 10
    assert count(AttentionMask(left=1, right=0), 4, 4) == 7
    assert count(AttentionMask(left=0, right=0), 4, 2) == 2
