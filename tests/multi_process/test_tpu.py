"""TPUStrategy on several processes gives the numbers of one."""

import numpy as np
import pytest

from tests.multi_process.tpu import train
from tests.support.jobs import values_of

pytestmark = pytest.mark.multi_process


@pytest.mark.slow
def test_replicas_of_two_cores_in_two_processes():
    alone = train(1)
    both = values_of("multi_process.tpu:train", 2, 2, devices=4)
    for result in both:
        assert result["replicas"] == 4
        assert result["local"] == 2
        assert result["part"] == [6, 4]
        for name in ("losses", "predictions", "evaluation"):
            np.testing.assert_allclose(
                result[name], alone[name], rtol=2e-5, atol=2e-5
            )
        # A sum over the replicas, of which `alone` has eight.
        assert result["total"] / 4 == pytest.approx(alone["total"] / 8, 1e-4)
    assert both[0] == both[1]
