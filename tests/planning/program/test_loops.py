"""Iterations of loops, in programs that XLA compiles for CPUs and in texts."""

import jax
import jax.numpy as jnp
import pytest

from keras_strategies.passes.hlo import parse
from keras_strategies.planning.program.walk import count_iterations

pytestmark = pytest.mark.quick

LOOP = """HloModule f

%cond (p: (s32[], s32[], f32[8])) -> pred[] {{
  %p = (s32[], s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %last = s32[] {last}
  ROOT %less = pred[] compare(%i, %last), direction={direction}
}}

%body (q: (s32[], s32[], f32[8])) -> (s32[], s32[], f32[8]) {{
  %q = (s32[], s32[], f32[8]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %end = s32[] get-tuple-element(%q), index=1
  %x = f32[8] get-tuple-element(%q), index=2
  %each = s32[] constant({each})
  %next = s32[] add(%j, %each)
  ROOT %r = (s32[], s32[], f32[8]) tuple(%next, %{kept}, %x)
}}

ENTRY %main (x.1: f32[8]) -> f32[8] {{
  %x.1 = f32[8] parameter(0)
  %first = s32[] constant({first})
  %copy = s32[] copy(%first)
  %ten = s32[] constant(10)
  %state = (s32[], s32[], f32[8]) tuple(%copy, %ten, %x.1)
  %loop = (s32[], s32[], f32[8]) while(%state), condition=%cond, \
body=%body{known}
  ROOT %y = f32[8] get-tuple-element(%loop), index=2
}}
"""
DEFAULTS = {
    "last": "constant(10)",
    "direction": "LT",
    "each": "1",
    "first": "0",
    "kept": "end",
    "known": "",
}
CARRIED = "get-tuple-element(%p), index=1"


def iterations(**changes):
    program = parse(LOOP.format(**DEFAULTS | changes))
    loop = program.entry.by_name["loop"]
    return count_iterations(program, program.entry, loop)


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({}, 10),
        ({"first": "4"}, 6),
        ({"first": "12"}, 0),
        ({"direction": "LE"}, 11),
        ({"each": "3"}, 4),
        ({"last": CARRIED}, 10),
        ({"known": ', backend_config={"known_trip_count":{"n":"7"}}'}, 7),
        # The limit changes in each iteration.
        ({"last": CARRIED, "kept": "next"}, None),
        # It counts down, or to another end.
        ({"each": "-1"}, None),
        ({"direction": "NE"}, None),
    ],
)
def test_iterations_of_a_loop_that_counts(changes, number):
    assert iterations(**changes) == number


def loops_of(function, *shapes):
    given = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    program = parse(jax.jit(function).lower(*given).compile().as_text())
    return [
        count_iterations(program, computation, loop)
        for computation in program.computations.values()
        for loop in computation.instructions
        if loop.opcode == "while"
    ]


def test_loops_of_jax():
    def scanned(x):
        return jax.lax.scan(lambda h, y: (jnp.sin(h) @ y, h), x[0], x)

    assert loops_of(scanned, (6, 16, 16)) == [6]

    def unknown(x):
        return jax.lax.while_loop(lambda h: h.sum() < 9, lambda h: h + h, x)

    assert loops_of(unknown, (4,)) == [None]
