"""The order in which threads start programs, on pretended devices."""

import threading
import types

import jax
import pytest

from keras_strategies.spmd.dispatch import (
    CacheChoice,
    dispatch,
    keep_out_of_cache,
)

pytestmark = pytest.mark.quick


def overlap(platform, num_devices):
    """Whether two threads started programs at the same time."""
    mesh = types.SimpleNamespace(
        platform=platform, devices=(None,) * num_devices, num_processes=1
    )
    both = threading.Barrier(2)
    met = []

    def program():
        try:
            both.wait(0.5)
            met.append(True)
        except threading.BrokenBarrierError:
            both.reset()
        return ((),)

    threads = [
        threading.Thread(target=dispatch, args=(mesh, program))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return bool(met)


@pytest.mark.parametrize(
    ("platform", "num_devices", "expected"),
    [("gpu", 2, False), ("gpu", 1, True), ("cpu", 2, False), ("tpu", 2, True)],
)
def test_only_one_thread_starts_programs_on_several_gpus(
    platform, num_devices, expected
):
    assert overlap(platform, num_devices) is expected


def test_program_on_gpus_does_not_wait_for_the_last_one():
    class Infinite:
        def block_until_ready(self):
            raise AssertionError

        def is_deleted(self):
            return False

    mesh = types.SimpleNamespace(
        platform="gpu", devices=(None, None), num_processes=1
    )
    outputs = [dispatch(mesh, lambda: ((Infinite(),),)) for _ in range(2)]
    assert len(outputs) == 2


def cached_after():
    return jax.config.jax_persistent_cache_min_compile_time_secs


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_a_program_that_may_hang_on_cpus_is_not_cached(platform):
    mesh = types.SimpleNamespace(platform=platform)
    before, found = cached_after(), []

    def program():
        with CacheChoice():
            keep_out_of_cache(mesh)
        found.append(cached_after())
        return ((),)

    mesh.devices, mesh.num_processes = (None,), 1
    dispatch(mesh, program)
    seconds = 1e9 if platform == "cpu" else before
    assert found == [seconds]
    assert cached_after() == before


def test_a_trace_outside_of_programs_changes_nothing():
    before = cached_after()
    keep_out_of_cache(types.SimpleNamespace(platform="cpu"))
    assert cached_after() == before
