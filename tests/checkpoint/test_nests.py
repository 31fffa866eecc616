"""What a checkpoint's state is written as, and read from."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

from keras_strategies.checkpoint import nests

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "value",
    [
        np.float32(1.1),
        np.float16(np.nan),
        np.float64(0.1),
        np.int64(-3),
        np.uint8(20),
        np.bool_(True),
        jnp.bfloat16.dtype.type(1.1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numpy_s_numbers_keep_their_types(value):
    # What is computed with them is rounded as before.
    state, arrays = nests.split({"nest": [(value, 1.5)]})
    ours = nests.join(json.loads(json.dumps(state)), arrays)
    (one, other) = ours["nest"][0]
    np.testing.assert_array_equal(one, value)
    assert (value * 3).dtype == np.asarray(one * 3).dtype
    assert other == 1.5
    assert type(other) is float


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.array([None]), "ndarray with dtype object"),
        (np.array(["text"]), "ndarray with dtype <U4"),
        (np.array(["2020-01-01"], "datetime64[D]"), "datetime64[D]"),
        (np.timedelta64(3, "D"), "timedelta64[D]"),
        (b"bytes", "type bytes"),
    ],
    ids=str,
)
def test_what_no_checkpoint_holds_is_refused_before_it_is_written(value, said):
    with pytest.raises(TypeError, match=re.escape(said)) as raised:
        nests.split({"a": {"b": value}})
    assert "['a']['b']" in str(raised.value)


@pytest.mark.parametrize(
    "mark",
    ["__array__", "__empty_array__", "__tuple__", "__scalar__", "__dict__"],
)
def test_dicts_of_users_may_have_our_keys(mark):
    state = {"a": {mark: [{mark: (1, {mark: None})}]}, mark: {mark: {}}}
    kept, arrays = nests.split([state, {mark: 2}])
    text = json.dumps(kept)
    assert nests.join(json.loads(text), arrays) == [state, {mark: 2}]


def test_other_processes_read_arrays_too():
    state = {
        "rows": np.arange(6.0).reshape(2, 3)[:, ::2],
        "none": np.zeros((0, 2)),
        "half": [jnp.bfloat16.dtype.type(1.5), (np.float32(0.1), "a")],
        "array": jnp.ones(2, "bfloat16"),
    }
    ours = nests.unpack(nests.pack(state))
    assert ours["half"] == state["half"]
    for name in ("rows", "none", "array"):
        np.testing.assert_array_equal(ours[name], state[name])
        assert ours[name].dtype == state[name].dtype
