"""Programs that are compiled and not run."""

import jax
import jax.numpy as jnp
import pytest

from keras_strategies.spmd import compiled

pytestmark = pytest.mark.quick
THREE = jax.ShapeDtypeStruct((3,), "float32")


def test_intermediate_values_of_another_trace_are_refused():
    kept = []

    @jax.jit
    def keep(x):
        kept.extend([x + 1, x + 2])
        return x

    keep(jnp.ones(3))
    program = jax.jit(lambda x: x + kept[0] + kept[1])
    with pytest.raises(RuntimeError, match=r"uses 2 of them.*RematScope"):
        compiled.lower(program, THREE)


def test_programs_may_have_constants_and_arguments_that_they_do_not_use():
    constant = jnp.arange(3.0)
    program = jax.jit(lambda pair, unused: pair[0] * constant)
    lowered = compiled.lower(program, (THREE, None), THREE)
    arguments, _ = lowered.compile().input_shardings
    assert arguments[0][0] is not None


def test_a_gather_is_named_by_the_first_reader_with_a_source():
    """Each instruction is followed once, however many ways lead to it."""
    shape = "f32[2,8,8]{2,1,0}"
    lines = [
        "HloModule step",
        "",
        f"ENTRY %main (p: f32[2,4,8]) -> {shape} {{",
        "  %p = f32[2,4,8]{2,1,0} parameter(0)",
        f"  %x0 = {shape} all-gather(%p), replica_groups={{{{0,1}}}}",
    ]
    for k in range(40):
        lines += [
            f"  %y{k} = {shape} negate(%x{k})",
            f"  %x{k + 1} = {shape} add(%x{k}, %y{k})",
        ]
    source = 'metadata={op_name="jit(step)/mixer/tanh"}'
    lines += [f"  ROOT %r = {shape} tanh(%x40), {source}", "}"]
    with pytest.warns(UserWarning, match=r"all cores for tanh in mixer \("):
        compiled._warn_of_gathered_tokens("\n".join(lines), cores=2)
