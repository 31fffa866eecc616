"""fit, evaluate and predict give one device's numbers (docs/parity.md).

The default run covers most cases on even and uneven numbers of rows on 2
replicas, and a basic one on every strategy; `-m slow` runs every case x
strategy x rows/batch pair.
"""

import pytest

from tests.parity.cases import BY_DEFAULT, CASES, LOSSES, METRICS
from tests.parity.one_device import PAIRS, STRATEGIES, check

# Even batches, and an uneven one at the end.
_QUICK = ((15, 4),)
# All uneven, and fewer rows than replicas, too.
_BASIC_PAIRS = ((64, 16), (13, 5), (3, 8))
_BASIC = "sgd"


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_equals_one_device(name):
    check(name, "mirrored2", _QUICK, _seen(name))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", [_BASIC])
def test_a_basic_case_equals_one_device_everywhere(name, strategy):
    check(name, strategy, _BASIC_PAIRS)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_every_case_equals_one_device_everywhere(name, strategy):
    check(name, strategy, PAIRS, _seen(name))


def _seen(name):
    # All counts, of all loops: tests/keras_bridge/inputs/test_row_counts.py.
    return ("evaluate",) if name in LOSSES | METRICS else ()
