"""Layers and operations, in the scopes of instructions."""

import pytest

from keras_strategies.passes.hlo import Instruction
from keras_strategies.spmd.compiled import describe_source

pytestmark = pytest.mark.quick


def instruction(source):
    text = f'metadata={{op_name="{source}"}}' if source else ""
    return Instruction("x", "fusion", (), "", text, "f32[]")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "jit(train_step)/shard_map/jvp(random_rotation_1)/"
            "vmap(jit(_map_coordinates))/gather",
            "gather in random_rotation_1",
        ),
        (
            "jit(train_step)/shard_map/transpose(jvp(lstm))/while/body/"
            "closed_call/lstm_cell/dot_general",
            "dot_general in lstm/lstm_cell",
        ),
        (
            "jit(train_step)/checkpoint/rematted_computation/gate/mul",
            "mul in gate",
        ),
        ("jit(train_step)/adam/sub", "sub in adam"),
        ("jit(train_step)/shard_map/psum", "psum in the step"),
        ("", "fusion in the step"),
    ],
)
def test_what_an_instruction_was_compiled_from(source, text):
    assert describe_source(instruction(source)) == text
