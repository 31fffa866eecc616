"""Compiled programs, and errors of programs that do not fit."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from keras_strategies.planning.compile import compiler as compiling
from keras_strategies.planning.compile.compiler import Compiler, DoesNotFit
from keras_strategies.planning.program.costs import Costs
from keras_strategies.spmd.dispatch import without_jax_cache
from tests.planning.made import GIB

pytestmark = pytest.mark.quick

DEVICES = jax.devices()[:1]


class Lowered:
    """A lowered program, of which compiling may fail."""

    def __init__(self, fn, error=None):
        self._lowered = jax.jit(fn).lower(jnp.ones(8))
        self._error = error

    def compile(self, compiler_options=None):
        if self._error is not None:
            raise jax.errors.JaxRuntimeError(self._error)
        return self._lowered.compile(compiler_options=compiler_options)


def compiled(lowered):
    compiler = Compiler(num_threads=1)
    try:
        return compiler.submit(lowered, DEVICES, is_full=True).result()
    finally:
        compiler.close()


def double(x):
    return 2 * x


def test_a_program_that_does_not_fit_is_a_result():
    message = "RESOURCE_EXHAUSTED: for HLO temporaries (2.00G) exceeds\nmore"
    found = compiled(Lowered(double, message))
    assert isinstance(found, DoesNotFit)
    assert str(found) == message.splitlines()[0]
    assert found.bytes_in_all == 2 * 2**30


def test_another_error_is_raised():
    lowered = Lowered(double, "INTERNAL: a problem")
    with pytest.raises(jax.errors.JaxRuntimeError, match="a problem"):
        compiled(lowered)


def test_jax_s_own_cache_is_as_before_afterwards():
    def read():
        return jax.config.jax_persistent_cache_min_compile_time_secs

    before = read()
    with without_jax_cache(), ThreadPoolExecutor() as pool:
        assert read() == 1e9
        assert pool.submit(read).result() == before
    assert read() == before


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
    found = compiling.parse_misfit(jax.errors.JaxRuntimeError(message))
    assert isinstance(found, DoesNotFit)
    assert found.bytes_in_all == needed
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
    assert compiling.parse_misfit(jax.errors.JaxRuntimeError(message)) is None


def test_figures_of_a_program():
    x = jnp.ones((64, 64))
    program = jax.jit(lambda x: x @ x).lower(x).compile()
    found = Costs.measure(program, 1.5)
    assert found.argument_bytes == found.output_bytes == 4 * 64 * 64
    code = program.memory_analysis().generated_code_size_in_bytes
    assert found.code_bytes == code
    standing = found.argument_bytes + found.output_bytes
    assert found.bytes_in_all == standing + found.temporary_bytes + code
    # The speed of a CPU is unknown.
    assert found.flops == found.busy_seconds == 0
    assert found.counts == found.sent == {}
    assert found.compile_seconds == 1.5
