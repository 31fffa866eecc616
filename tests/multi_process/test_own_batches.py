"""A step of several processes has the batch size, also of rows of their own."""

import itertools

import numpy as np
import pytest

from keras_strategies.testing import run_processes
from tests.multi_process import own_batches

FILES = (8, 8, 8, 8)
STEPS = 5
SLOW = [
    (pipeline, size, policy)
    for pipeline, size, policy in itertools.product(
        own_batches.PIPELINES, (3, 4, 5, 8), ("AUTO", "FILE", "OFF", "HINT")
    )
]


def check(folder, cases):
    own_batches.write_files(folder, FILES)
    one, other = run_processes(
        "tests.multi_process.own_batches:read_and_fit",
        2,
        args=(str(folder), cases, STEPS),
        devices_per_process=1,
        timeout_s=400,
    )
    for pipeline, size, policy in cases:
        name = f"{pipeline} {size} {policy}"
        mine, others = one.value[name], other.value[name]
        assert mine["weights"] == others["weights"], name
        steps = [
            a + b for a, b in zip(mine["steps"], others["steps"], strict=True)
        ]
        sizes = [len(step) for step in steps]
        times = 2 if policy == "OFF" else 1
        if "repeat" in pipeline:
            assert sizes == [size] * STEPS, name
        else:
            rows = np.bincount(sum(steps, []), minlength=sum(FILES))
            assert (rows == times).all(), name
            assert max(sizes) == size, name
            whole = times * sum(FILES) // size
            # Where the replicas' places do not move on, one may end earlier.
            assert whole <= len(sizes) <= whole + times * 3, name
        # One device that is given the same rows of each step.
        model = own_batches.build()
        for step in steps:
            if step:
                x = np.array(step, "float32")[:, None] / 32
                model.train_on_batch(x, np.sin(x))
        # `fit` may share the rows of a step out in another way.
        if size % 2 == 0:
            assert mine["fitted"] == len(steps), name
            for got, wanted in zip(
                mine["weights"], model.get_weights(), strict=True
            ):
                np.testing.assert_allclose(
                    got, wanted, rtol=1e-5, atol=1e-6, err_msg=name
                )


def test_a_map_after_batch_leaves_the_batch_size(tmp_path):
    cases = [("batch.map", 4, "AUTO"), ("batch.map.prefetch", 4, "OFF")]
    check(tmp_path, cases)


@pytest.mark.slow
def test_pipelines_and_policies_leave_the_batch_size(tmp_path):
    check(tmp_path, SLOW)
