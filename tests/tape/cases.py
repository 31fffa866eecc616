"""Functions with tapes that run with TensorFlow and with this package.

Each is a function of a library and of three arrays: `x` of shape (4, 3), `y` of
shape (4, 2) and `w` of shape (3, 2). Values must not be at kinks.
"""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Library:
    """What the cases use of a library.

    Attributes:
      np: Functions with numpy's names.
      tape: The class of tapes.
      variable: Makes a variable from an array, perhaps not trainable.
      stop: Stops gradients.
      loop: `loop(n, body, start)` applies a body n times.
      branch: `branch(condition, one, two)` calls one of two functions.
      jit: Compiles a function.
      cast: Casts an array to a dtype.
    """

    np: Any
    tape: Any
    variable: Callable[..., Any]
    stop: Callable[[Any], Any]
    loop: Callable[..., Any]
    branch: Callable[..., Any]
    jit: Callable[..., Any]
    cast: Callable[..., Any]


CASES: dict[str, Callable[..., Any]] = {}


def case(fn):
    CASES[fn.__name__] = fn
    return fn


def loss_of(lib, x, y, w):
    return lib.np.mean((lib.np.tanh(lib.np.matmul(x, w)) - y) ** 2)


@case
def one_variable(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        loss = loss_of(lib, x, y, v)
    return tape.gradient(loss, v)


@case
def a_watched_array(lib, x, y, w):
    with lib.tape() as tape:
        tape.watch(w)
        loss = loss_of(lib, x, y, w)
    return tape.gradient(loss, w)


@case
def an_array_that_is_not_watched(lib, x, y, w):
    with lib.tape() as tape:
        loss = loss_of(lib, x, y, w)
    return [tape.gradient(loss, w)]


@case
def persistent(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape(persistent=True) as tape:
        h = lib.np.tanh(lib.np.matmul(x, v))
        one, two = lib.np.sum(h**2), lib.np.mean(h * y)
    return tape.gradient(one, v), tape.gradient(two, [v])


@case
def persistent_within(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape(persistent=True) as tape:
        h = lib.np.sum(v**3)
        first = tape.gradient(h, v)
        second = tape.gradient(lib.np.sum(first**2), v)
    return first, second


@case
def several_targets(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        h = lib.np.matmul(x, v)
        targets = [h, {"a": h**2, "b": lib.np.sum(h)}]
    return tape.gradient(targets, v)


@case
def nests_of_sources(lib, x, y, w):
    v, u = lib.variable(w), lib.variable(y)
    with lib.tape() as tape:
        loss = loss_of(lib, x, u, v)
    return tape.gradient(loss, {"v": v, "more": [u, (v,)]})


@case
def a_target_of_any_shape(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        h = lib.np.sin(lib.np.matmul(x, v))
    return tape.gradient(h, v)


@case
def second_order(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as outer:
        with lib.tape() as inner:
            loss = loss_of(lib, x, y, v)
        first = inner.gradient(loss, v)
    return first, outer.gradient(first, v)


@case
def third_order(lib, x, y, w):
    with lib.tape() as a:
        a.watch(w)
        with lib.tape() as b:
            b.watch(w)
            with lib.tape() as c:
                c.watch(w)
                value = lib.np.sum(lib.np.sin(w) * w)
            first = c.gradient(value, w)
        second = b.gradient(first, w)
    return first, second, a.gradient(second, w)


@case
def unconnected(lib, x, y, w):
    v, u = lib.variable(w), lib.variable(y)
    with lib.tape() as tape:
        loss = lib.np.sum(v * 2.0)
    return tape.gradient(loss, [v, u])


@case
def unconnected_zero(lib, x, y, w):
    v, u = lib.variable(w), lib.variable(y)
    with lib.tape() as tape:
        loss = lib.np.sum(v * 2.0)
    return tape.gradient(loss, [v, u], unconnected_gradients="zero")


@case
def an_intermediate_source(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        h = lib.np.matmul(x, v)
        loss = lib.np.sum(lib.np.tanh(h) ** 2)
    return tape.gradient(loss, [h, v])


@case
def an_intermediate_source_of_nothing(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        h = x * 2.0
        loss = lib.np.sum(lib.np.matmul(h, v))
    return tape.gradient(loss, [h, v])


@case
def a_watched_intermediate(lib, x, y, w):
    with lib.tape() as tape:
        h = x * 2.0
        tape.watch(h)
        loss = lib.np.sum(lib.np.tanh(lib.np.matmul(h, w)))
    return tape.gradient(loss, h)


@case
def sources_from_sources(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        tape.watch(x)
        a = lib.np.matmul(x, v)
        b = lib.np.sin(a)
        loss = lib.np.sum(a * b)
    return tape.gradient(loss, [x, v, a, b])


@case
def read_before_the_tape(lib, x, y, w):
    v = lib.variable(w)
    value = v * 1.0
    with lib.tape() as tape:
        loss = lib.np.sum(value**2)
    return [tape.gradient(loss, v)]


@case
def computed_after_the_tape(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        h = lib.np.matmul(x, v)
    return [tape.gradient(lib.np.sum(h**2), v)]


@case
def stopped_recording(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        h = lib.np.matmul(x, v)
        with tape.stop_recording():
            scale = lib.np.sum(h)
        loss = lib.np.sum(h * scale)
    return tape.gradient(loss, v)


@case
def read_while_stopped(lib, x, y, w):
    v, u = lib.variable(w), lib.variable(y)
    with lib.tape() as tape:
        with tape.stop_recording():
            h = lib.np.matmul(x, v)
        loss = lib.np.sum(h * u)
    return tape.gradient(loss, [v, u])


@case
def reset(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        h = lib.np.matmul(x, v)
        tape.reset()
        loss = lib.np.sum(h * 2.0) + lib.np.sum(v * 3.0)
    return tape.gradient(loss, v)


@case
def stopped_gradients(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        h = lib.stop(lib.np.matmul(x, v))
        loss = lib.np.sum(h**2)
    return [tape.gradient(loss, v)]


@case
def stopped_in_one_branch(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        h = lib.np.matmul(x, v)
        loss = lib.np.sum(h * lib.stop(lib.np.tanh(h)))
    return tape.gradient(loss, v)


@case
def output_gradients(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        h = lib.np.matmul(x, v) ** 2
    return tape.gradient(h, v, output_gradients=y)


@case
def several_output_gradients(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        h = lib.np.matmul(x, v)
        a, b = h**2, lib.np.sin(h)
    return tape.gradient([a, b], v, output_gradients=[y, y * 2.0])


@case
def assigned_in_the_tape(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        one = lib.np.sum(v**2)
        v.assign(v * 2.0)
        two = lib.np.sum(v**3)
        loss = one + two
    return tape.gradient(loss, v)


@case
def assigned_between_tapes(lib, x, y, w):
    """Sharpness-aware minimization."""
    v = lib.variable(w)
    with lib.tape() as tape:
        loss = loss_of(lib, x, y, v)
    first = tape.gradient(loss, v)
    v.assign_add(0.1 * first)
    with lib.tape() as tape:
        loss = loss_of(lib, x, y, v)
    second = tape.gradient(loss, v)
    v.assign_sub(0.1 * first)
    return first, second, v * 1.0


@case
def one_variable_twice(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        loss = loss_of(lib, x, y, v)
    return tape.gradient(loss, [v, v])


@case
def two_variables_of_one_array(lib, x, y, w):
    v, u = lib.variable(w), lib.variable(w)
    with lib.tape() as tape:
        loss = lib.np.sum(v**2) + lib.np.sum(u**3)
    return tape.gradient(loss, [v, u])


@case
def one_array_twice(lib, x, y, w):
    with lib.tape() as tape:
        tape.watch([w, w])
        loss = lib.np.sum(w**2)
    return tape.gradient(loss, [w, w])


@case
def tied_weights(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        code = lib.np.tanh(lib.np.matmul(x, v))
        back = lib.np.matmul(code, lib.np.transpose(v))
        loss = lib.np.mean((back - x) ** 2)
    return tape.gradient(loss, v)


@case
def target_network(lib, x, y, w):
    v, target = lib.variable(w), lib.variable(w, trainable=False)
    target.assign(v * 1.0)
    with lib.tape() as tape:
        aim = lib.np.tanh(lib.np.matmul(x, target))
        loss = lib.np.mean((lib.np.matmul(x, v) - aim) ** 2)
    return tape.gradient(loss, [v, target])


@case
def not_trainable_but_watched(lib, x, y, w):
    v = lib.variable(w, trainable=False)
    with lib.tape() as tape:
        tape.watch(v)
        loss = loss_of(lib, x, y, v)
    return tape.gradient(loss, v)


@case
def without_watching_reads(lib, x, y, w):
    v, u = lib.variable(w), lib.variable(y)
    with lib.tape(watch_accessed_variables=False) as tape:
        tape.watch(v)
        loss = loss_of(lib, x, u, v)
    return tape.gradient(loss, [v, u])


@case
def an_integer_target(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        count = lib.cast(lib.np.sum(v), "int32")
    return [tape.gradient(count, v)]


@case
def an_integer_in_between(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        count = lib.cast(lib.cast(lib.np.sum(v), "int32"), "float32")
        loss = count * 2.0
    return [tape.gradient(loss, v)]


@case
def through_floor(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        loss = lib.np.sum(lib.np.floor(v * 3.0))
    return [tape.gradient(loss, v)]


@case
def through_sign(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        loss = lib.np.sum(lib.np.sign(v))
    return tape.gradient(loss, v)


@case
def through_where(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        loss = lib.np.sum(lib.np.where(v > 0.1, v**2, v * 3.0))
    return tape.gradient(loss, v)


@case
def through_take_and_concatenate(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        rows = lib.np.take(v, lib.np.array([0, 2, 0]), axis=0)
        both = lib.np.concatenate([rows, v * 2.0], axis=0)
        loss = lib.np.sum(both**2)
    return tape.gradient(loss, v)


@case
def through_sort_and_cumsum(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        loss = lib.np.sum(lib.np.cumsum(lib.np.sort(v, axis=0), axis=0) ** 2)
    return tape.gradient(loss, v)


@case
def through_half_precision(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        h = lib.cast(v, "bfloat16") * 2.0
        loss = lib.np.sum(lib.cast(h, "float32"))
    return tape.gradient(loss, v)


@case
def through_a_loop(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        value = v * 1.0
        end = lib.loop(3, lambda h: lib.np.sin(h) * value, value)
        loss = lib.np.sum(end)
    return tape.gradient(loss, v)


@case
def through_a_branch(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        value = v * 1.0
        h = lib.branch(
            lib.np.sum(value) > 0, lambda: value**2, lambda: value * 3.0
        )
        loss = lib.np.sum(h)
    return tape.gradient(loss, v)


@case
def through_a_compiled_function(lib, x, y, w):
    v = lib.variable(w)
    compiled = lib.jit(lambda a, b: lib.np.tanh(lib.np.matmul(a, b)))
    with lib.tape() as tape:
        loss = lib.np.sum(compiled(x, v * 1.0) ** 2)
    return tape.gradient(loss, v)


@case
def within_a_compiled_function(lib, x, y, w):
    def compute(w):
        with lib.tape() as tape:
            tape.watch(w)
            loss = loss_of(lib, x, y, w)
        return tape.gradient(loss, w)

    return lib.jit(compute)(w * 1.0)


@case
def within_a_loop(lib, x, y, w):
    def descend(w):
        with lib.tape() as tape:
            tape.watch(w)
            loss = loss_of(lib, x, y, w)
        return w - 0.5 * tape.gradient(loss, w)

    return lib.loop(3, descend, w * 1.0)


@case
def maml(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as outer:
        value = v * 1.0
        with lib.tape() as inner:
            inner.watch(value)
            loss = loss_of(lib, x, y, value)
        adapted = value - 0.5 * inner.gradient(loss, value)
        loss = loss_of(lib, x * 0.5, y, adapted)
    return outer.gradient(loss, v)


@case
def first_order_maml(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as inner:
        loss = loss_of(lib, x, y, v)
    step = inner.gradient(loss, v)
    with lib.tape() as outer:
        adapted = v - 0.5 * step
        loss = loss_of(lib, x * 0.5, y, adapted)
    return outer.gradient(loss, v)


@case
def gradient_penalty(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as outer:
        mixed = x * 0.7
        with lib.tape() as inner:
            inner.watch(mixed)
            score = lib.np.sum(lib.np.tanh(lib.np.matmul(mixed, v)))
        slope = inner.gradient(score, mixed)
        norm = lib.np.sqrt(lib.np.sum(slope**2, axis=1))
        loss = lib.np.mean((norm - 1.0) ** 2)
    return outer.gradient(loss, v)


@case
def a_penalty_on_what_is_computed(lib, x, y, w):
    """The inner source comes before what depends on the outer one."""
    v = lib.variable(w)
    with lib.tape() as outer:
        with lib.tape() as inner:
            inner.watch(x)
            score = lib.np.sum(lib.np.matmul(lib.np.sin(x) * 3.0, v) ** 2)
        slope = inner.gradient(score, x)
        loss = lib.np.sum(slope**2)
    return outer.gradient(loss, v)


@case
def an_outer_source_within_an_inner_path(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as outer:
        outer.watch(x)
        with lib.tape() as inner:
            inner.watch(x)
            h = lib.np.sin(x)
            score = lib.np.sum(lib.np.matmul(h**2, v))
        slope = inner.gradient(score, x)
        loss = lib.np.sum(slope**2) + lib.np.sum(h)
    return outer.gradient(loss, [x, v, h])


@case
def two_tapes_over_one_pass(lib, x, y, w):
    """The steps of a generator and a discriminator."""
    g, d = lib.variable(w), lib.variable(w[:2] * 0.5)
    with lib.tape() as tape_g, lib.tape() as tape_d:
        fake = lib.np.tanh(lib.np.matmul(x, g))
        score, real = lib.np.matmul(fake, d), lib.np.matmul(y, d)
        loss_g = lib.np.mean((score - 1.0) ** 2)
        loss_d = lib.np.mean(score**2) + lib.np.mean((real - 1.0) ** 2)
    return tape_g.gradient(loss_g, g), tape_d.gradient(loss_d, d)


@case
def tapes_one_after_another(lib, x, y, w):
    v = lib.variable(w)
    found = []
    for _ in range(3):
        with lib.tape() as tape:
            loss = loss_of(lib, x, y, v)
        found.append(tape.gradient(loss, v))
        v.assign_sub(0.3 * found[-1])
    return found


@case
def class_activations(lib, x, y, w):
    """Grad-CAM."""
    v = lib.variable(w)
    with lib.tape() as tape:
        maps = lib.np.tanh(lib.np.matmul(x, v))
        tape.watch(maps)
        score = lib.np.sum(maps[:, 0] ** 3)
    slope = tape.gradient(score, maps)
    return lib.np.mean(slope, axis=0) * maps


@case
def constants_in_between(lib, x, y, w):
    """What is computed outside of the tape from what it recorded."""
    v = lib.variable(w)
    with lib.tape() as tape:
        h = lib.np.matmul(x, v)
        with tape.stop_recording():
            weight = lib.np.exp(h)
        more = lib.np.sin(h) * weight
        loss = lib.np.sum(more)
    return tape.gradient(loss, v)


@case
def a_target_that_is_a_source(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        h = v * 2.0
    return tape.gradient(h, [h, v])


@case
def no_sources(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        loss = lib.np.sum(v * 1.0)
    return tape.gradient(loss, [])


@case
def learned_scale(lib, x, y, w):
    """A scalar variable that is read several times."""
    v, scale = lib.variable(w), lib.variable(w[0, 0])
    with lib.tape() as tape:
        h = lib.np.matmul(x, v) * scale
        loss = lib.np.sum(h) * scale + lib.np.sum(v) * scale**2
    return tape.gradient(loss, [v, scale])


@case
def losses_that_are_added(lib, x, y, w):
    v, u = lib.variable(w), lib.variable(y)
    losses = []
    with lib.tape() as tape:
        losses.append(loss_of(lib, x, y, v))
        losses.append(0.01 * lib.np.sum(v**2))
        losses.append(lib.np.mean(u**2))
        total = losses[0] + losses[1] + losses[2]
    return total, tape.gradient(total, [v, u])


@case
def clipped(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        loss = loss_of(lib, x, y, v)
    gradient = tape.gradient(loss, v)
    norm = lib.np.sqrt(lib.np.sum(gradient**2))
    return gradient * 0.1 / lib.np.maximum(norm, 0.1)


@case
def gradients_within_their_tapes(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as one, lib.tape() as two:
        h = lib.np.matmul(x, v)
        first = one.gradient(lib.np.sum(h**2), v)
        second = two.gradient(lib.np.sum(lib.np.sin(h)), v)
    return first, second


@case
def a_penalty_on_a_gradient_within_its_tape(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as outer:
        with lib.tape() as inner:
            slope = inner.gradient(loss_of(lib, x, y, v), v)
            penalty = lib.np.sum(slope**2)
        loss = lib.np.sum(v**3) + penalty
    return outer.gradient(loss, v)


@case
def complex_sources(lib, x, y, w):
    z = lib.cast(w, "complex64") * (1.0 + 2.0j)
    with lib.tape(persistent=True) as tape:
        tape.watch(z)
        cube = z**3
        loss = lib.np.sum(lib.np.real(cube))
    return tape.gradient(loss, z), tape.gradient(cube, z, output_gradients=z)


@case
def second_order_of_complex_sources(lib, x, y, w):
    z = lib.cast(w, "complex64") * (1.0 + 2.0j)
    with lib.tape() as outer:
        outer.watch(z)
        with lib.tape() as inner:
            inner.watch(z)
            loss = lib.np.sum(lib.np.real(z**3))
        slope = inner.gradient(loss, z)
        penalty = lib.np.sum(lib.np.abs(slope) ** 2)
    return outer.gradient(penalty, z)


@case
def a_variable_as_target(lib, x, y, w):
    v, u = lib.variable(w), lib.variable(w, trainable=False)
    with lib.tape(persistent=True) as tape:
        h = v * v
    return tape.gradient(v, v), tape.gradient([v, h, u], v)


@case
def a_variable_as_target_within(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        tape.reset()
        return tape.gradient(v, v, output_gradients=v * 3.0)


@case
def a_variable_as_target_after_an_assignment(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape() as tape:
        h = lib.np.sum(v**3)
    v.assign(v * 2.0)
    return tape.gradient([h, v], v)


@case
def gradients_while_stopped(lib, x, y, w):
    v = lib.variable(w)
    with lib.tape(persistent=True) as tape:
        first = lib.np.sum(v**2)
        with tape.stop_recording():
            slope = tape.gradient(first, v)
        second = lib.np.sum(slope * v)
    return slope, tape.gradient(second, v)
