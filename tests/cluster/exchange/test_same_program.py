"""What two programs are told apart by, before processes compare them."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from keras_strategies.cluster.exchange import same_program
from keras_strategies.cluster.exchange.same_program import trace_program

pytestmark = pytest.mark.quick


def text_of(fn):
    found = trace_program(jax.jit(fn), (np.ones(3, "float32"),))
    assert found is not None
    return found.text


def scaled(by, x):
    return x * jnp.asarray(np.full(3, by, "float32"))


def in_jit(by, x):
    return jax.jit(functools.partial(scaled, by))(x)


def in_scan(by, x):
    return jax.lax.scan(lambda c, _: (scaled(by, c), None), x, None, 2)[0]


def in_branch(by, x):
    return jax.lax.cond(x.sum() > 0, functools.partial(scaled, by), jnp.sin, x)


def in_gradient_rule(by, x):
    @jax.custom_jvp
    def inner(x):
        return scaled(by, x)

    inner.defjvps(lambda tangent, _, x: tangent)
    return inner(x)


def by_number(by, x):
    return x * by


@pytest.mark.parametrize(
    "make", [scaled, in_jit, in_scan, in_branch, in_gradient_rule, by_number]
)
def test_constants_tell_programs_apart(make):
    one, same, other = (
        text_of(functools.partial(make, by)) for by in (1.5, 1.5, 2.5)
    )
    assert one == same
    assert one != other


def test_a_program_is_asked_for_until_it_was_compared():
    program = jax.jit(lambda x: x + 1)
    assert trace_program(program, (np.ones(3),)) is not None
    # Until the processes have agreed.
    assert trace_program(program, (np.ones(3),)) is not None
    assert trace_program(lambda x: x, (np.ones(3),)) is None


def test_addresses_do_not_tell_programs_apart():
    def with_callback():
        return text_of(
            lambda x: jax.pure_callback(lambda y: y, jax.typeof(x), x)
        )

    assert with_callback() == with_callback()


def test_a_line_is_shown_with_the_users_line():
    def loss(x):
        return jnp.sum(jax.nn.relu(x) * 2.0)

    line = loss.__code__.co_firstlineno + 1
    found = trace_program(jax.jit(loss), (np.ones(3, "float32"),))
    lines = found.text.splitlines()
    number = next(k for k, text in enumerate(lines) if " 2.0" in text)
    shown = same_program._show_line(found, number)
    assert lines[number].strip() in shown
    assert f" at test_same_program.py:{line} in " in shown
    assert shown.endswith("loss")
    assert same_program._show_line(found, len(lines)) == "nothing more"


def test_an_operation_of_keras_is_shown_with_the_users_line():
    def user(x):
        return keras.ops.softmax(keras.ops.relu(x))

    line = user.__code__.co_firstlineno + 1
    found = trace_program(jax.jit(user), (np.ones(3, "float32"),))
    lines = found.text.splitlines()
    number = next(k for k, text in enumerate(lines) if " exp " in text)
    shown = same_program._show_line(found, number)
    assert shown.endswith(f" at test_same_program.py:{line} in user")


def test_an_array_is_shown_by_its_first_values():
    found = trace_program(
        jax.jit(functools.partial(scaled, 1.5)), (np.ones(3, "float32"),)
    )
    shown = same_program._show_line(found, len(found.text.splitlines()) - 1)
    assert shown == "constant float32[3] of the first values 1.5, 1.5, 1.5"
