"""Advice on steps."""

import pytest

from keras_strategies.planning.report.advice import write_advice
from tests.planning.made import step, times

pytestmark = pytest.mark.quick

STATE = {"weights": 8e9, "slots": 16e9, "activations": 1e9}
ROWS = {"weights": 1e9, "slots": 2e9, "activations": 27e9}
OTHER = {"weights": 1e9, "slots": 2e9, "temporary": 27e9}
ONE = {"layout": "replicated", "num_replicas": 1, "max_rows": 0}
MORE = "Shard over more replicas (with a larger `shards`), or use more devices."
ON_HOST = (
    " Or let the host store the 16.0 GB of slots: pass `offload='optimizer'` "
    "to the partitioner (docs/large_models.md)."
)


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({}, ""),
        ({"error": "It cannot be."}, ""),
        ({"bytes_in_all": None}, ""),
        (
            {"bytes_in_all": 30e9, "memory": STATE, "layout": "replicated"},
            "Weights and optimizer slots take 24.0 GB on every device. Shard "
            "them with `ks.experimental.FullySharded()`.",
        ),
        (
            {"bytes_in_all": 30e9, "memory": STATE, "layout": "sharded:4"},
            MORE + ON_HOST,
        ),
        (
            {"bytes_in_all": 33e9, "memory": STATE, "layout": "FullySharded"},
            MORE,
        ),
        (
            {"bytes_in_all": 30e9, "memory": STATE} | ONE,
            "Use devices with more memory, or shard the state." + ON_HOST,
        ),
        (
            {"bytes_in_all": 33e9, "memory": STATE} | ONE,
            "Use devices with more memory, or shard the state.",
        ),
        (
            {"bytes_in_all": 30e9, "memory": ROWS, "max_rows": 2},
            "At most 2 rows per replica fit. To update from more, pass "
            "`gradient_accumulation_steps` to the optimizer.",
        ),
        (
            {"bytes_in_all": 30e9, "memory": ROWS, "max_rows": 0},
            "One row needs too much memory. To fit the model, create its "
            "blocks in a `keras.RematScope` (without `Dropout`, which Keras "
            "cannot rematerialize), or use a layout with a model axis, such as "
            "'model:4'.",
        ),
        (
            {"bytes_in_all": 30e9, "memory": OTHER, "max_rows": 2},
            "At most 2 rows per replica fit. To update from more, pass "
            "`gradient_accumulation_steps` to the optimizer.",
        ),
        ({"bytes_in_all": 30e9, "memory": OTHER, "max_rows": 0}, MORE),
        (
            {"estimate": times(compute=0.1, links=0.4), "max_rows": 7},
            "Communication takes longer than computation, so more rows per "
            "replica (up to 7 fit) add little time.",
        ),
        ({"estimate": times(compute=0.1, links=0.4), "max_rows": 5}, ""),
        (
            {"bytes_in_all": 15.9e9},
            "Only 0.10 GB are left, so the step may no longer fit after a "
            "small change.",
        ),
        ({"limit_bytes": None}, ""),
    ],
)
def test_what_to_do(given, advice):
    assert write_advice(step(**given)) == advice


def test_with_remat_is_said_only_where_it_saves():
    big = step(bytes_in_all=30e9, memory=ROWS)
    assert write_advice(big, remat=(30e9, 9e9)) == (
        "Create the model's blocks in `keras.RematScope(mode="
        "'list_of_layers', layer_names=...)`, with their names. It reduces the "
        "memory from 30.0 to 9.00 GB."
    )
    assert write_advice(big, remat=(30e9, 29e9)) == write_advice(big)
    one = step(bytes_in_all=30e9, memory=ROWS, max_rows=None)
    assert "RematScope" not in write_advice(one, has_remat=True)


def test_a_step_that_python_starts_more_slowly_than_it_runs():
    host = times(3e-4, 1e-4, 1e-4, 0.0, 0.01, host=3e-4)
    advice = write_advice(
        step(estimate=host, top_operations={"dot in a": 1e-4})
    )
    assert advice.startswith("Python starts a step no faster than in 0.3 ms")
    assert "steps_per_execution" in advice
    assert "dot" not in advice


def test_the_most_expensive_operations_of_a_step_with_little_use_are_named():
    top_operations = {"gather in a": 0.2, "gather in b": 0.25, "dot in c": 0.04}
    slow = times(0.5, utilization=0.04)
    advice = write_advice(step(estimate=slow, top_operations=top_operations))
    assert advice == (
        "The most expensive operations of the 500 ms are gather in b (250 "
        "ms) and gather in a (200 ms)."
    )
    # Others than these take the time.
    small = {name: seconds / 20 for name, seconds in top_operations.items()}
    assert write_advice(step(estimate=slow, top_operations=small)) == ""
    usual = times(0.5, utilization=0.06)
    assert (
        write_advice(step(estimate=usual, top_operations=top_operations)) == ""
    )
    unknown = times(0.5, utilization=None)
    assert (
        write_advice(step(estimate=unknown, top_operations=top_operations))
        == ""
    )
