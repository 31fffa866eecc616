"""Figures and steps of plans, with what a test does not say left out."""

from keras_strategies.planning.program.costs import Costs
from keras_strategies.planning.report.planned_step import Estimate, PlannedStep

GIB = 2**30


def figures(**given):
    facts = {
        "argument_bytes": 0.0,
        "output_bytes": 0.0,
        "temporary_bytes": 0.0,
        "compile_seconds": 0.0,
    }
    return Costs(**facts | given)


def times(
    seconds=0.5,
    compute=0.4,
    memory=0.1,
    links=0.2,
    utilization=0.4,
    latency=0.05,
    host=3e-4,
):
    return Estimate(
        seconds=seconds,
        compute_seconds=compute,
        memory_seconds=memory,
        link_seconds=links,
        latency_seconds=latency,
        host_seconds=host,
        utilization=utilization,
    )


def step(**given):
    facts = {
        "topology": "v5e:4x4",
        "layout": "sharded",
        "num_devices": 16,
        "num_replicas": 16,
        "rows": 64,
        "limit_bytes": 16_000_000_000,
        "bytes_in_all": 10e9,
        "memory": {
            "weights": 1e9,
            "slots": 2e9,
            "other": 0.5e9,
            "gradients": 1.5e9,
            "activations": 4e9,
            "temporary": 1e9,
        },
        "counts": {"all-gather": 12, "reduce-scatter": 6},
        "sent": {"all-gather": 3e9, "reduce-scatter": 1.5e9},
        "estimate": times(),
        "tokens": 2048,
        "max_rows": 7,
        "is_full_effort": True,
    }
    return PlannedStep(**facts | given)
