"""Thousands of replicas: what Python does does not grow with them."""

import cProfile
import pstats
import time

import jax
import pytest

import keras_strategies as ks
from keras_strategies.fit.binding import find_binding
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.step.lower_step import lower_step
from tests.support.slices import make_slice


def calls_to_trace(strategy):
    """Calls of Python functions while a train step is traced and lowered."""
    from benchmarks.tpu_collectives import build, make_batch

    model = build(strategy, "mlp")
    batch = make_batch(strategy, "mlp", 8)
    profile = cProfile.Profile()
    profile.enable()
    lower_step(
        model,
        strategy._runtime.mesh,
        "train",
        batch,
        find_binding(model).build_for_shapes,
    )
    profile.disable()
    return pstats.Stats(profile).total_calls


def test_tracing_for_eight_replicas_is_tracing_for_two():
    def strategy(count):
        devices = tuple(jax.devices()[:count])
        # A name of its own: JAX has traced nothing for such a mesh yet.
        mesh = ReplicaMesh(devices=devices, axis="scaled", is_abstract=True)
        return ks.Strategy(mesh)

    # What is traced first fills caches.
    calls_to_trace(strategy(3))
    two, eight = calls_to_trace(strategy(2)), calls_to_trace(strategy(8))
    assert abs(two - eight) < 0.01 * two


@pytest.mark.tpu
def test_tracing_for_4096_chips_is_tracing_for_16():
    names = ("v5e:2x2", "v5e:4x4", "v5p:8x8x16", "v5p:16x16x16")
    counts = []
    for name in names:
        # What other tests traced for such a mesh.
        jax.clear_caches()
        counts.append(calls_to_trace(ks.TPUStrategy.for_topology(name)))
    del counts[0]
    assert max(counts) - min(counts) < 0.01 * min(counts), counts


def test_a_mesh_of_4096_devices_is_made_quickly():
    devices = tuple(make_slice((16, 16, 16)))
    start = time.process_time()
    mesh = ReplicaMesh(devices=devices)
    assert (mesh.num_replicas, mesh.num_processes) == (4096, 1024)
    # 0.01 s; a count for each process would be 4 million steps.
    assert time.process_time() - start < 0.5
