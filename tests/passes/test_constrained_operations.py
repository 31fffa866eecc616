"""Operations under any sharding of what surrounds them."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_strategies.passes import stages
from keras_strategies.passes.constrained_operations import (
    constrain_function,
    constrain_operations,
)
from tests.support.combinations import cover

AXES = ("a", "b", "c")
COUNT, BY_DEFAULT = 300, 12


def make_mesh(devices):
    """A mesh whose axes are as many as there are factors of two, or one."""
    sizes = {2: (2,), 3: (3,), 4: (2, 2), 8: (2, 2, 2)}[devices]
    places = np.array(jax.devices()[:devices]).reshape(sizes)
    return Mesh(places, AXES[: len(sizes)])


def constrain_over(mesh, array, spec):
    sharding = NamedSharding(mesh, spec)
    return jax.lax.with_sharding_constraint(array, sharding)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convolution:
    """A convolution of Keras's layouts."""

    rows: int
    spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    inputs: int
    outputs: int
    groups: int = 1
    strides: int = 1
    dilation: int = 1
    base_dilation: int = 1

    def __call__(self, x, kernel):
        rank = len(self.spatial)
        places = "DHW"[:rank]
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            [self.strides] * rank,
            [(1, 1)] * rank,
            lhs_dilation=[self.base_dilation] * rank,
            rhs_dilation=[self.dilation] * rank,
            dimension_numbers=(f"N{places}C", f"{places}IO", f"N{places}C"),
            feature_group_count=self.groups,
        )

    @property
    def shapes(self):
        inputs = self.inputs // self.groups
        return (
            (self.rows, *self.spatial, self.inputs),
            (*self.kernel, inputs, self.outputs),
        )

    def make_operation(self, name):
        """Returns the convolution or one of its gradients, and its arrays."""
        rng = np.random.default_rng(0)
        x, kernel = (rng.normal(size=s).astype("float32") for s in self.shapes)
        result = jax.eval_shape(self, x, kernel)
        gradient = rng.normal(size=result.shape).astype("float32")
        if name == "forward":
            return self, (x, kernel)
        if name == "inputs":
            transpose = jax.linear_transpose(lambda x: self(x, kernel), x)
            return lambda g, _: transpose(g)[0], (gradient, kernel)

        def kernel_gradient(x, gradient):
            transpose = jax.linear_transpose(lambda k: self(x, k), kernel)
            return transpose(gradient)[0]

        return kernel_gradient, (x, gradient)


def draw(seed):
    """Draws a convolution, an operation, devices, and three specs."""
    choice = random.Random(seed).choice
    rank = choice([1, 2, 2, 3])
    groups = choice([1, 1, 2, 4])
    inputs = groups * choice([1, 2, 3])
    convolution = Convolution(
        rows=choice([1, 2, 3, 5, 8]),
        spatial=tuple(choice([5, 6, 8]) for _ in range(rank)),
        kernel=tuple(choice([1, 2, 3]) for _ in range(rank)),
        inputs=inputs,
        outputs=groups * choice([1, 2, 4]),
        groups=groups,
        strides=choice([1, 1, 2]),
        dilation=choice([1, 1, 2]),
        base_dilation=choice([1, 1, 1, 2]),
    )
    devices = choice([2, 3, 4, 4, 8])
    axes = make_mesh(devices).axis_names
    places = [[choice([*range(rank + 2), None]) for _ in axes] for _ in "xky"]
    specs = [
        PartitionSpec(
            *(
                tuple(a for a, p in zip(axes, each, strict=True) if p == dim)
                for dim in range(rank + 2)
            )
        )
        for each in places
    ]
    return convolution, choice(["forward", "inputs", "kernel"]), devices, specs


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(k, marks=() if k < BY_DEFAULT else pytest.mark.slow)
        for k in range(COUNT)
    ],
)
def test_equals_one_device_under_any_shardings(seed):
    convolution, name, devices, specs = draw(seed)
    operation, arrays = convolution.make_operation(name)
    mesh = make_mesh(devices)
    constrain = functools.partial(constrain_over, mesh)
    inner = constrain_function(operation, mesh.axis_names, mesh)

    def sharded(*arrays):
        arrays = map(constrain, arrays, specs[:2])
        return constrain(inner(*arrays), specs[2])

    replicated = NamedSharding(mesh, PartitionSpec())
    found = jax.jit(sharded, out_shardings=replicated)(*arrays)
    expected = jax.jit(operation)(*arrays)
    size = max(float(jnp.abs(expected).max()), 1e-3)
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5 * size)


def convolve(x):
    return jnp.convolve(x, np.ones(3, "float32"), mode="same")


@jax.custom_vjp
def with_own_gradient(x):
    return convolve(x)


with_own_gradient.defvjp(
    lambda x: (convolve(x), None), lambda _, g: (convolve(g),)
)


@pytest.mark.parametrize(
    "fn",
    [
        convolve,
        jax.jit(convolve),
        jax.checkpoint(convolve),
        lambda x: solve(x),
        with_own_gradient,
        lambda x: jax.lax.scan(lambda c, _: (convolve(c), None), x, None, 2)[0],
        lambda x: jax.lax.cond(x[0] > 0, convolve, lambda x: x, x),
        lambda x: jax.lax.while_loop(lambda x: x[7] < 4, convolve, x),
    ],
)
def test_constrains_convolutions_of_inner_programs(fn):
    mesh = make_mesh(2)
    traced = jax.make_jaxpr(fn)(np.ones(8, "float32"))
    changed = constrain_operations(traced, mesh.axis_names, mesh)
    names = [e.primitive.name for e in stages.all_equations(changed)]
    convolutions = names.count("conv_general_dilated")
    assert convolutions
    assert names.count("sharding_constraint") == 3 * convolutions
    x = np.arange(8, dtype="float32") - 4
    np.testing.assert_array_equal(
        jax.jit(jax.extend.core.jaxpr_as_fun(changed))(x)[0], fn(x)
    )


def solve(x):
    """Passes the programs of its equation in a named tuple."""
    return jax.scipy.sparse.linalg.cg(lambda v: 4 * v + convolve(v), x)[0]


def test_programs_that_are_called_several_times_stay_shared():
    call = jax.jit(convolve)
    traced = jax.make_jaxpr(lambda x: call(call(x)))(np.ones(8, "float32"))
    mesh = make_mesh(2)
    changed = constrain_operations(traced, mesh.axis_names, mesh)
    programs = {id(e.params["jaxpr"]) for e in changed.jaxpr.eqns}
    assert len(changed.jaxpr.eqns) == 2
    assert len(programs) == 1


def test_what_scatters_add_to_is_hidden():
    def accumulate(table, ids):
        return jax.lax.scan(lambda t, i: (t.at[i].add(1), i), table, ids)[0]

    mesh, table = make_mesh(2), np.zeros(4, "float32")
    ids = np.array([[0, 2], [2, 3]])
    traced = jax.make_jaxpr(accumulate)(table, ids)
    changed = constrain_operations(traced, mesh.axis_names, mesh)
    (scan,) = (e for e in changed.eqns if e.primitive.name == "scan")
    made = {v: e for e in scan.params["jaxpr"].eqns for v in e.outvars}
    (scatter,) = (e for e in made.values() if e.primitive.name == "scatter-add")
    assert made[scatter.invars[0]].primitive.name == "optimization_barrier"
    found = jax.jit(jax.extend.core.jaxpr_as_fun(changed))(table, ids)[0]
    np.testing.assert_array_equal(found, [1, 0, 2, 1])


def test_programs_without_convolutions_stay():
    traced = jax.make_jaxpr(jax.jit(jnp.sin))(np.ones(8, "float32"))
    assert constrain_operations(traced, AXES) is traced


def test_mapped_programs_stay():
    mesh = make_mesh(2)
    mapped = jax.shard_map(
        jax.vmap(convolve),
        mesh=mesh,
        in_specs=PartitionSpec("a"),
        out_specs=PartitionSpec("a"),
    )
    traced = jax.make_jaxpr(mapped)(np.ones((2, 8), "float32"))
    assert constrain_operations(traced, AXES) is traced


def pool_rows(window, strides, padding="SAME"):
    def pool(x):
        return jax.lax.reduce_window(
            x, -jnp.inf, jax.lax.max, window, strides, padding
        )

    return pool


OVER_ROWS = {
    "pool": pool_rows((2, 1), (1, 1)),
    "pool_unpadded": pool_rows((2, 1), (1, 1), "VALID"),
    "pool_with_features": pool_rows((3, 2), (2, 1)),
    "tangent": lambda x: jax.jvp(pool_rows((2, 1), (1, 1)), (x,), (x**2,))[1],
    "transform": lambda x: jnp.abs(jnp.fft.fft(x.T) + 0.1),
    "transform_both": lambda x: jnp.abs(jnp.fft.fft2(x[None]) + 0.1),
    "real_transform": lambda x: jnp.abs(jnp.fft.rfft(x.T) + 0.1),
    "inverse_transform": lambda x: jnp.fft.irfft(x.T),
}


@pytest.mark.parametrize(
    ("name", "rows"), cover(OVER_ROWS, [7, 8]), ids=lambda value: str(value)
)
def test_operations_over_rows_are_exact_if_the_rows_are_sharded(name, rows):
    mesh = make_mesh(2)
    split = NamedSharding(mesh, PartitionSpec("a"))
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")

    def compute(x, is_sharded):
        x = x[:rows]
        if is_sharded:
            x = jax.lax.with_sharding_constraint(x, split)

        def loss(w):
            y = OVER_ROWS[name](jnp.tanh(x @ w))
            weights = jnp.cos(jnp.arange(y.size)).reshape(y.shape)
            return jnp.sum(y * weights), y

        return jax.grad(loss, has_aux=True)(jnp.eye(4))

    expected = compute(x, False)
    sharded = constrain_function(
        functools.partial(compute, is_sharded=True), ("a",), mesh
    )
    whole = NamedSharding(mesh, PartitionSpec())
    found = jax.jit(sharded, in_shardings=split, out_shardings=whole)(x)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_windows_of_one_row_leave_the_rows_open():
    def pool(x):
        return jax.lax.reduce_window(
            x, -jnp.inf, jax.lax.max, (1, 2, 1), (1, 1, 1), "SAME"
        )

    x = np.ones((4, 6, 3), "float32")
    traced = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(pool(x))))(x)
    constrained = constrain_operations(traced, ("a",), make_mesh(2))
    specs = [
        e.params["sharding"].spec
        for e in stages.all_equations(constrained)
        if e.primitive.name == "sharding_constraint"
    ]
    free = PartitionSpec.UNCONSTRAINED
    assert specs == [PartitionSpec(free, None, free)] * 3
