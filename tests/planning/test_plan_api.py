"""`Strategy.plan` on devices that are there: what its figures are."""

import json
import subprocess
import sys

import jax
import keras
import pytest

import keras_strategies as ks
from keras_strategies.planning.compile.candidates import Batch, iter_candidates
from tests.support.plain_keras import mirrored

SHAPE = jax.ShapeDtypeStruct((16, 40), "float32")
BATCH = (SHAPE, SHAPE)
QUIET = {"progress": False}
LAYOUTS = ["replicated", "slots", "sharded"]


def make_model(depth=1, width=40, optimizer="adam"):
    layers = [
        keras.layers.Dense(width, "tanh", name=f"dense{i}")
        for i in range(depth)
    ]
    head = keras.layers.Dense(40, name="head")
    model = keras.Sequential([keras.Input((40,)), *layers, head])
    model.compile(optimizer, "mse")
    return model


def test_each_layout_has_its_bytes_and_collectives():
    plan = mirrored(4).plan(lambda: make_model(width=400), BATCH, **QUIET)
    assert [s.layout for s in plan.steps] == LAYOUTS
    replicated, slots, sharded = plan.steps
    weights = 4 * (40 * 400 + 400 + 400 * 40 + 40)
    assert replicated.memory["weights"] == weights
    assert replicated.memory["slots"] >= 2 * weights
    assert slots.memory["weights"] == weights
    # Kernels of 16,000 entries are under FullySharded's least size.
    assert sharded.memory["weights"] == weights
    assert replicated.counts["all-reduce"] >= 1
    assert all(step.rows == 16 and step.fits for step in plan.steps)
    for step in plan.steps:
        assert sum(step.memory.values()) == pytest.approx(step.bytes_in_all)
    json.dumps(plan.to_json(), allow_nan=False)


def test_what_is_planned_is_what_is_compiled():
    strategy = ks.MirroredStrategy(
        jax.devices()[:4],
        variable_partitioner=ks.experimental.FullySharded(min_size=1),
    )
    with strategy.scope():
        model = make_model(width=400)
    program = strategy.compile_step(model, BATCH)
    (step,) = strategy.plan(
        lambda: make_model(width=400),
        BATCH,
        strategies=ks.experimental.FullySharded(min_size=1),
        **QUIET,
    ).steps
    assert step.bytes_in_all == program.bytes_per_chip
    assert step.counts == {k: n for k, n in program.collectives.items() if n}
    assert step.layout == "FullySharded(min_size=1)"


def test_a_plan_has_the_slots_on_the_host_of_a_process():
    kinds = [
        ks.experimental.SlotsOnly(min_size=1, offload=offload)
        for offload in ("optimizer", None)
    ]
    plan = mirrored(4).plan(
        lambda: make_model(width=400), BATCH, strategies=kinds, **QUIET
    )
    offloaded, usual = plan.steps
    # On four devices of this process.
    assert offloaded.host_bytes == 2 * usual.memory["weights"]
    assert usual.host_bytes == 0
    assert offloaded.layout == "SlotsOnly(min_size=1, offload='optimizer')"


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        (None, LAYOUTS),
        (ks.experimental.SlotsOnly(), ["slots", "replicated", "sharded"]),
        (ks.experimental.SlotsOnly(4), ["slots", "replicated", "sharded"]),
        (ks.experimental.FullySharded(2), ["sharded:2", *LAYOUTS]),
        (
            ks.experimental.Replicated(offload="optimizer"),
            ["Replicated(offload='optimizer')", *LAYOUTS],
        ),
    ],
)
def test_the_layout_of_the_strategy_is_planned_first(kind, layouts):
    strategy = ks.MirroredStrategy(jax.devices()[:4], variable_partitioner=kind)
    batch = Batch(BATCH, 4, is_global=True)
    found = iter_candidates(strategy, make_model, batch, None, None)
    assert [candidate.layout for candidate in found] == layouts


def test_plans_need_no_import_but_the_packages():
    code = (
        "import sys\n"
        "import keras_strategies as ks\n"
        "import keras\n"
        "strategy = ks.MirroredStrategy()\n"
        "name = 'keras_strategies.planning'\n"
        "assert not [m for m in sys.modules if m.startswith(name)]\n"
        "def make_model():\n"
        "    layers = [keras.Input((4,)), keras.layers.Dense(2)]\n"
        "    model = keras.Sequential(layers)\n"
        "    model.compile('sgd', 'mse')\n"
        "    return model\n"
        "batch = keras.ops.ones((8, 4)), keras.ops.ones((8, 2))\n"
        "options = {'progress': False}\n"
        "options['strategies'] = 'replicated'\n"
        "plan = strategy.plan(make_model, batch, **options)\n"
        "assert isinstance(plan, ks.Plan)\n"
        "assert plan.steps[0].error is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("is_scanned", [False, True])
def test_of_a_deep_model_the_step_that_runs_is_compiled(is_scanned):
    def make():
        model = make_model(depth=8)
        ks.experimental.scan_blocks(model, is_scanned)
        return model

    strategy = mirrored(2)
    (step,) = strategy.plan(make, BATCH, strategies="replicated", **QUIET).steps
    with strategy.scope():
        model = make()
    program = strategy.compile_step(model, BATCH)
    assert step.bytes_in_all == program.bytes_per_chip
    assert ("while(" in program.as_text()) == is_scanned


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"batch": SHAPE}, ValueError, "as for `fit`"),
        ({"batch": (1, 2)}, TypeError, "arrays, or for their shapes"),
        (
            {"batch": (SHAPE, SHAPE.update(shape=(8, 4)))},
            ValueError,
            "the same number of rows",
        ),
        ({"strategies": "tiny"}, ValueError, "'sharded:64'"),
        ({"strategies": 3}, TypeError, "names or partitioners"),
        ({"topologies": []}, TypeError, "names of TPUs"),
        ({"topologies": 3}, TypeError, "names of TPUs"),
        ({"scale": "local"}, ValueError, "`scale` must be one of"),
        ({"effort": "high"}, ValueError, "`effort` must be one of"),
        ({"model": 3}, TypeError, "a function that creates and compiles"),
        ({"model": make_model()}, TypeError, "not `make_model"),
    ],
)
def test_wrong_arguments(change, error, message):
    arguments = {"model": make_model, "batch": BATCH} | change
    with pytest.raises(error, match=message):
        mirrored(2).plan(**arguments, **QUIET)


@pytest.mark.parametrize(
    ("layout", "message"),
    [("sharded:3", "must divide the number"), ("model:2", "need a TPU slice")],
)
def test_what_is_wrong_with_a_candidate_is_said_in_its_row(layout, message):
    plan = mirrored(4).plan(
        make_model, BATCH, strategies=[layout, "slots"], **QUIET
    )
    assert message in plan.steps[0].error
    assert message in str(plan).replace("\n", " ")
    assert plan.steps[0].fits is False


@pytest.mark.parametrize(
    ("maker", "error"),
    [(lambda: 1 // 0, ZeroDivisionError), (lambda: 3, TypeError)],
)
def test_what_the_function_raises_is_raised(maker, error):
    with pytest.raises(error):
        mirrored(2).plan(maker, BATCH, **QUIET)
