"""A function mapped over replicas that divide values: that of whole values."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Var, jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec

from keras_strategies.passes.marked_updates import (
    MAX,
    is_collecting,
    mark_update,
)
from keras_strategies.passes.specs import Sharded, stack_values
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.replica_map import (
    all_max,
    all_sum,
    replica_map,
    replicated_spec,
    split_spec,
)
from keras_strategies.spmd.sharded_map import sharded_map
from tests.support.combinations import combine, few

WHOLE = replicated_spec()


def make_mesh(count, shards=None):
    return ReplicaMesh(devices=jax.devices()[:count], shards=shards)


def divided(mesh, dim=0):
    spec = PartitionSpec(*[None] * dim, mesh.axis)
    return Sharded(NamedSharding(mesh.mesh, spec), dim)


def cut(step, mesh, specs, out=None):
    """A step of weights and rows, jitted, with the weights' specs."""
    return jax.jit(
        sharded_map(
            step,
            mesh,
            in_specs=(specs, split_spec(mesh)),
            out_specs=specs if out is None else out,
        )
    )


def draw(*shapes, scale=1.0):
    random = np.random.default_rng(0)
    return [(random.normal(size=s) * scale).astype("float32") for s in shapes]


def sgd(mesh, weights, x, update, specs, reductions):
    """A step: gradients of a sum, and an update of reduced ones."""

    def loss(weights):
        return jnp.sum(jnp.tanh(x @ weights[0]) @ weights[1])

    value, grads = jax.value_and_grad(loss)(list(weights))
    axis = mesh.all_replicas

    def reduce(grads):
        return [
            all_max(g, axis) if how == MAX else all_sum([g], axis)[0]
            for g, how in zip(grads, reductions, strict=True)
        ]

    if not is_collecting():
        return value, update(reduce(grads), list(weights))
    new = mark_update(
        update,
        reduce,
        grads,
        list(weights),
        reductions=reductions,
        specs=specs,
        divisor=1,
        key=[],
    )
    return value, new


def data(rows=8):
    *weights, x = draw((6, 8), (8,), (rows, 6))
    return weights, x


def clipped(grads, weights):
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads))
    return [w - 0.1 * g / norm for w, g in zip(weights, grads, strict=True)]


def assert_close(found, wanted, atol=1e-6):
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=atol)
    jax.tree.map(close, found, wanted)


@pytest.mark.parametrize(
    ("count", "shards"),
    few([(2, None), (8, None), (8, 2), (8, 4), (3, None)], every=2),
)
def test_an_update_of_all_entries(count, shards):
    mesh = make_mesh(count, shards)
    weights, x = data(24)
    size = shards or count
    specs = [
        divided(mesh, 1) if 8 % size == 0 else divided(mesh, 0),
        divided(mesh) if 8 % size == 0 else WHOLE,
    ]

    def step(weights, x):
        value, new = sgd(mesh, weights, x, clipped, specs, specs)
        return all_sum([value], mesh.all_replicas)[0], new

    ours = cut(step, mesh, specs, (WHOLE, specs))
    plain = replica_map(
        step, mesh, in_specs=(WHOLE, split_spec(mesh)), out_specs=WHOLE
    )
    wanted = jax.jit(plain)(weights, x)
    found = ours(weights, x)
    assert_close(found, wanted)
    assert not found[1][0].sharding.is_fully_replicated
    text = ours.lower(weights, x).as_text()
    assert "all_gather" in text
    assert "reduce_scatter" in text


def test_values_alive_across_an_update():
    mesh = make_mesh(4)
    weights, x = data()
    specs = [divided(mesh, 1), divided(mesh)]

    def step(weights, x):
        value, new = sgd(mesh, weights, x, clipped, specs, specs)
        # Each replica's own, of before, with whole weights of after it.
        own = value + jax.lax.axis_index(mesh.axis)
        again, last = sgd(mesh, new, x, clipped, specs, specs)
        return (own * jnp.sum(new[0]) + again)[None], last, new[1]

    ours = cut(step, mesh, specs, (split_spec(mesh), specs, WHOLE))
    plain = replica_map(
        step,
        mesh,
        in_specs=(WHOLE, split_spec(mesh)),
        out_specs=(split_spec(mesh), WHOLE, WHOLE),
    )
    assert_close(ours(weights, x), jax.jit(plain)(weights, x), 1e-5)


def descended(mesh, spec, grad, weight):
    """One weight after a step of gradient descent."""
    return mark_update(
        lambda g, w: [w[0] - 0.1 * g[0]],
        lambda g: all_sum(g, mesh.axis),
        [grad],
        [weight],
        reductions=[spec],
        specs=[spec],
        divisor=1,
        key=[],
    )[0]


def test_rematerialized_parts_gather_again():
    mesh = make_mesh(4)
    spec = divided(mesh)
    weight = np.ones((8, 8), "float32")

    def step(weight, x, remat):
        def loss(weight, x):
            def block(x):
                return jnp.tanh(x @ weight)

            layer = jax.checkpoint(block) if remat else block
            return jnp.sum(layer(layer(x)))

        grad = jax.grad(loss)(weight, x)
        return descended(mesh, spec, grad, weight)

    texts = {}
    for remat in (False, True):
        ours = cut(lambda w, x, remat=remat: step(w, x, remat), mesh, spec)
        texts[remat] = ours.lower(weight, weight).as_text()
    counts = {k: t.count("stablehlo.all_gather") for k, t in texts.items()}
    assert counts[False] == 1
    assert counts[True] > 1
    # Each part's gradient is scattered before the parts are added up.
    assert texts[True].count("stablehlo.reduce_scatter") == 2


@pytest.mark.parametrize(
    ("platform", "shape", "scattered"),
    # The second has no whole tiles of a TPU.
    [
        ("tpu", (32, 1024), "4x8x1024"),
        ("tpu", (28, 1024), "28x1024"),
        ("cpu", (32, 1024), "32x1024"),
    ],
)
def test_on_tpus_sums_of_matrices_are_scattered_as_blocks_of_tiles(
    platform, shape, scattered, monkeypatch
):
    monkeypatch.setattr(ReplicaMesh, "platform", platform)
    mesh = make_mesh(4)
    spec = divided(mesh)
    weight, x = draw(shape, (8, shape[0]))

    def step(weight, x):
        grad = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(weight)
        return descended(mesh, spec, grad, weight)

    ours = cut(step, mesh, spec)
    grad = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(weight)
    np.testing.assert_allclose(
        ours(weight, x), weight - 0.1 * grad, rtol=1e-4, atol=1e-5
    )
    text = ours.lower(weight, x).as_text()
    (sent,) = re.findall(
        r"stablehlo\.reduce_scatter.*?: \(tensor<(\w+)xf32>\)", text, re.S
    )
    assert sent == scattered


def test_what_takes_a_variables_place_is_a_maximum():
    mesh = make_mesh(4)
    weights, x = data()
    specs = [divided(mesh, 1), WHOLE]

    def replace(grads, weights):
        return [weights[0] - grads[0], grads[1]]

    def step(weights, x):
        return sgd(mesh, weights, x, replace, specs, [specs[0], MAX])[1]

    plain = replica_map(
        step, mesh, in_specs=(WHOLE, split_spec(mesh)), out_specs=WHOLE
    )
    wanted = jax.jit(plain)(weights, x)
    assert_close(cut(step, mesh, specs)(weights, x), wanted)


def test_prints_and_inputs_that_are_returned():
    mesh = make_mesh(2)
    spec = divided(mesh)
    seen = []

    def step(weight, x):
        jax.debug.callback(lambda v: seen.append(float(v)), jnp.sum(x))
        return weight, weight, x

    ours = cut(step, mesh, spec, (spec, WHOLE, split_spec(mesh)))
    weight, x = np.arange(4.0), np.arange(6.0)
    same, whole, rows = ours(weight, x)
    jax.effects_barrier()
    np.testing.assert_array_equal(same, weight)
    np.testing.assert_array_equal(whole, weight)
    np.testing.assert_array_equal(rows, x)
    assert sorted(seen) == [3.0, 12.0]


def chain(weights, x, dtype=None):
    """Layers, one after the other."""
    for weight in weights:
        x = jnp.tanh(x @ (weight if dtype is None else weight.astype(dtype)))
    return x


def products_before_gathers(traced):
    """For each gather of a mapped function, how many products it waits for."""
    (mapped,) = [
        e for e in traced.jaxpr.eqns if e.primitive.name == "shard_map"
    ]
    waits, found = {}, []
    jaxpr = mapped.params["jaxpr"]
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = equation.primitive.name
        read = [v for v in equation.invars if isinstance(v, Var)]
        products = set().union(*(waits.get(v, set()) for v in read))
        if name == "all_gather":
            found.append(len(products))
        if name == "dot_general":
            products = products | {len(products)}
        waits |= dict.fromkeys(equation.outvars, products)
    return found


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_a_layers_weights_are_gathered_while_the_one_before_is_computed(dtype):
    mesh, depth, width = make_mesh(4), 5, 16
    specs = [divided(mesh)] * depth
    weights = draw(*[(width, width)] * depth, scale=0.25)
    batches = draw((3, 4, width))[0].astype(dtype or "float32")

    def step(weights, x):
        return chain(weights, x, dtype)

    rows = split_spec(mesh)
    one = sharded_map(step, mesh, in_specs=(specs, rows), out_specs=rows)
    traced = jax.make_jaxpr(one)(weights, batches[0])
    # The first two at once: there is nothing that they could wait for.
    assert products_before_gathers(traced) == [0, 0, 1, 2, 3]

    def many(weights, batches):
        return jax.lax.map(lambda batch: one(weights, batch), batches)

    compiled = jax.jit(many).lower(weights, batches).compile()
    (entry,) = re.findall(r"\nENTRY .*?\n\}", compiled.as_text(), re.S)
    # None is taken out of the loop, so that all would be whole in it.
    assert compiled.as_text().count("all-gather(") >= depth
    assert "all-gather(" not in entry
    wanted = [chain(weights, batch, dtype) for batch in batches]
    np.testing.assert_allclose(
        np.asarray(compiled(weights, batches), "float32"),
        np.asarray(wanted, "float32"),
        atol=1e-5 if dtype is None else 0.05,
    )


def test_what_is_read_again_is_gathered_once():
    mesh = make_mesh(2)
    specs = [divided(mesh)] * 3
    weights = [np.eye(4, dtype="float32")] * 3

    def step(weights, x):
        return jax.grad(lambda x: jnp.sum(chain(weights, x)))(x)

    mapped = sharded_map(
        step,
        mesh,
        in_specs=(specs, split_spec(mesh)),
        out_specs=split_spec(mesh),
    )
    traced = jax.make_jaxpr(mapped)(weights, np.ones((2, 4), "float32"))
    assert str(traced).count("all_gather[") == 3
    assert "optimization_barrier" not in str(traced)


def loop_loss(weight, x, remat):
    def block(x, weight):
        return jnp.tanh(x @ weight)

    layer = jax.checkpoint(block) if remat else block
    return jnp.sum(jax.lax.scan(lambda x, w: (layer(x, w), None), x, weight)[0])


def count_in_loops(traced, name):
    """How often a primitive is in the bodies of loops, and outside."""
    counts = collections.Counter()

    def count(jaxpr, is_in_loop):
        for equation in jaxpr.eqns:
            primitive = equation.primitive.name
            counts[is_in_loop] += primitive == name
            for inner in jaxprs_in_params(equation.params):
                count(inner, is_in_loop or primitive == "scan")

    count(traced.jaxpr, False)
    return counts[True], counts[False]


@pytest.mark.parametrize(
    ("is_stacked", "remat"), combine([False, True], [False, True], every=2)
)
def test_a_loop_gathers_a_slice_in_each_turn(remat, is_stacked):
    mesh, depth = make_mesh(4), 3
    weights, x = draw((depth, 8, 8), (8, 8), scale=0.3)
    spec = divided(mesh, 0 if is_stacked else 1)
    specs = [spec] * depth if is_stacked else [spec]
    given = list(weights) if is_stacked else [weights]

    def step(given, x):
        def loss(given):
            stacked = stack_values(given) if is_stacked else given[0]
            return loop_loss(stacked, x, remat)

        # Gradients are named, as in a model's step; and weights, too.
        given = [checkpoint_name(weight, "weight") for weight in given]
        grads = jax.grad(loss)(given)
        grads = [checkpoint_name(grad, "gradient") for grad in grads]
        pairs = zip(grads, given, strict=True)
        return [descended(mesh, spec, *pair) for pair in pairs]

    ours = cut(step, mesh, specs)
    found = np.asarray(ours(given, x)).reshape(weights.shape)
    grad = jax.grad(lambda w: loop_loss(w, x, False))(weights)
    np.testing.assert_allclose(found, weights - 0.1 * grad, atol=1e-5)
    traced = jax.make_jaxpr(ours)(given, x)
    # Once in the forward pass, and once in the backward pass.
    assert count_in_loops(traced, "all_gather") == (2, 0)
    assert count_in_loops(traced, "reduce_scatter") == (1, 0)


def test_a_loop_over_the_sharded_dimension_gathers_before_it():
    mesh = make_mesh(4)
    weight, x = draw((4, 6, 6), (8, 6), scale=0.3)
    spec = divided(mesh)

    def step(weight, x):
        grad = jax.grad(loop_loss)(weight, x, False)
        return descended(mesh, spec, grad, weight)

    ours = cut(step, mesh, spec)
    grad = jax.grad(loop_loss)(weight, x, False)
    np.testing.assert_allclose(ours(weight, x), weight - 0.1 * grad, atol=1e-5)
    traced = jax.make_jaxpr(ours)(weight, x)
    assert count_in_loops(traced, "all_gather") == (0, 1)


def test_values_of_other_layouts_are_stacked_whole():
    mesh = make_mesh(4)
    *weights, x = draw(*[(8, 8)] * 3, scale=0.3)
    specs = [divided(mesh), divided(mesh, 1)]

    def step(weights, x):
        grads = jax.grad(lambda w: loop_loss(stack_values(w), x, False))(
            weights
        )
        triples = zip(specs, grads, weights, strict=True)
        return [descended(mesh, *each) for each in triples]

    grads = jax.grad(lambda w: loop_loss(jnp.stack(w), x, False))(weights)
    wanted = [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]
    assert_close(cut(step, mesh, specs)(weights, x), wanted, 1e-5)


def test_weights_after_a_loop_are_gathered_after_it():
    mesh = make_mesh(4)
    *weights, x = draw((8, 8), (3, 8, 8), (8, 8), (8, 8), scale=0.3)

    def step(weights, x):
        first, stacked, last = weights
        x = jax.lax.scan(
            lambda x, w: (jnp.tanh(x @ w), None), jnp.tanh(x @ first), stacked
        )[0]
        return jnp.tanh(x @ last)

    specs = [divided(mesh), divided(mesh, 1), divided(mesh)]
    rows = split_spec(mesh)
    ours = sharded_map(step, mesh, in_specs=(specs, rows), out_specs=rows)
    np.testing.assert_allclose(
        jax.jit(ours)(weights, x), step(weights, x), atol=1e-5
    )
    (mapped,) = [
        e
        for e in jax.make_jaxpr(ours)(weights, x).jaxpr.eqns
        if e.primitive.name == "shard_map"
    ]
    jaxpr = mapped.params["jaxpr"]
    loop_axes = set()
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = equation.primitive.name
        read = {v for v in equation.invars if isinstance(v, Var)}
        if name == "scan" or read & loop_axes:
            loop_axes.update(equation.outvars)
    gathers = [
        bool(set(e.outvars) & loop_axes)
        for e in getattr(jaxpr, "jaxpr", jaxpr).eqns
        if e.primitive.name == "all_gather"
    ]
    assert gathers == [False, True]
