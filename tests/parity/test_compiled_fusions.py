"""Compiled CPU programs sum nothing anew for each entry of a buffer."""

import json
import os
import pathlib

import pytest

from tests.support.commands import python
from tests.support.compiling import LLVM_FLAGS

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found():
    # XLA fuses as it does for users.
    environment = os.environ | {"XLA_FLAGS": LLVM_FLAGS}
    done = python(
        "-m", "tests.parity.compiled_fusions", cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "model",
    ["mlp", "mlp, indivisible", "resnet", "transformer", "normalized"],
)
def test_no_sum_is_fused_into_a_concatenation_or_a_pad(found, model):
    assert found["ours"][model]["fused"] == []


def test_one_flat_buffer_is_found_out(found):
    # The form that made steps 150 times as long: 10 biases of the last layer
    # are summed anew for each of all the weights.
    flat = found["flat"]
    assert max(flat["fused"]) * 4 == flat["weights"]


def test_gradients_are_held_twice_at_most(found):
    # A replica's own, and their sums. The rest are activations, which grow with
    # the rows.
    for model, maximum in {"mlp, few rows": 2.1, "mlp": 2.2}.items():
        memory = found["ours"][model]
        assert memory["temporaries"] <= maximum * memory["weights"]
