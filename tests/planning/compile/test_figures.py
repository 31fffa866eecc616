"""Figures combined, and the compiler's errors."""

import jax
import jax.numpy as jnp
import pytest

from keras_strategies.planning.compile import figures as lib
from tests.planning.made import GIB, figures

pytestmark = pytest.mark.quick

FEW = figures(
    argument_bytes=10.0,
    output_bytes=1.0,
    temporary_bytes=5.0,
    flops=100.0,
    counts={"all-reduce": 2},
    sent={"all-reduce": 8.0},
    compile_seconds=1.0,
)
MANY = figures(
    argument_bytes=16.0,
    output_bytes=1.0,
    temporary_bytes=4.0,
    flops=180.0,
    counts={"all-reduce": 2, "all-gather": 4},
    sent={"all-reduce": 8.0, "all-gather": 6.0},
    compile_seconds=2.0,
)


def test_bytes_in_all_are_of_arguments_outputs_and_temporaries():
    assert FEW.bytes_in_all == 16.0


def test_figures_are_combined_one_by_one():
    found = FEW.combined(-1.0, MANY, 2.0)
    assert found.argument_bytes == 22.0
    assert found.output_bytes == 1.0
    assert found.temporary_bytes == 3.0
    assert found.flops == 260.0
    assert found.counts == {"all-reduce": 2.0, "all-gather": 8.0}
    assert found.sent == {"all-reduce": 8.0, "all-gather": 12.0}
    assert found.compile_seconds == 3.0


def test_no_combined_figure_is_negative():
    found = FEW.combined(-9.0, MANY, 10.0)
    assert found.temporary_bytes == 0.0
    assert found.counts["all-reduce"] == 2.0
    assert MANY.combined(-1.0, FEW, 1.0).counts["all-gather"] == 0


def test_figures_grow_by_the_bytes_of_others_alone():
    found = MANY.grown_by(FEW, figures(argument_bytes=13.0, flops=1.0))
    assert found.argument_bytes == 19.0
    assert found.output_bytes == 0.0
    assert found.temporary_bytes == -1.0
    assert found.flops == MANY.flops
    assert found.counts == MANY.counts


REAL = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required "
    "for HLO temporaries (16.01G) exceeds available HBM (15.75G)."
)


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        (REAL, 16.01 * GIB),
        (f"{REAL}\n\nmore (1.00G)\n", 16.01 * GIB),
        (REAL.replace("16.01G", "2.5T"), 2.5 * 2**40),
        (REAL.replace("16.01G", "512.00M"), 512 * 2**20),
        (REAL.replace("16.01G", "100"), 100.0),
        ("RESOURCE_EXHAUSTED: Out of memory.", None),
        ("RESOURCE_EXHAUSTED", None),
    ],
)
def test_an_error_of_too_little_memory_is_a_misfit(message, needed):
    found = lib.as_misfit(jax.errors.JaxRuntimeError(message))
    assert isinstance(found, lib.DoesNotFit)
    assert found.needed == needed
    assert str(found) == message.splitlines()[0]


@pytest.mark.parametrize(
    "message",
    [
        "",
        "INTERNAL: Mosaic failed to compile",
        "INVALID_ARGUMENT: HLO temporaries (16.01G) RESOURCE_EXHAUSTED",
        "UNIMPLEMENTED: no such thing",
    ],
)
def test_another_error_is_none(message):
    assert lib.as_misfit(jax.errors.JaxRuntimeError(message)) is None


def test_figures_of_a_program():
    x = jnp.ones((64, 64))
    program = jax.jit(lambda x: x @ x).lower(x).compile()
    found = lib.figures_of(program, 1.5)
    assert found.argument_bytes == found.output_bytes == 4 * 64 * 64
    assert found.flops == pytest.approx(2 * 64**3, rel=0.01)
    assert found.counts == found.sent == {}
    assert found.compile_seconds == 1.5


def test_the_compilers_are_named_with_their_versions():
    assert f"jax {jax.__version__}" in lib.compilers()
