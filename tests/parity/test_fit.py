"""fit, evaluate and predict give one device's numbers (docs/parity.md).

The default run covers one case of each kind, on even and uneven numbers of
rows on 2 replicas, and a basic one on several strategies; `-m slow` runs every
case x strategy x rows/batch pair.
"""

import pytest

from tests.parity.cases import BY_DEFAULT, CASES
from tests.parity.one_device import PAIRS, STRATEGIES, check, list_seen
from tests.support.combinations import combine, some

# Even batches, and an uneven one at the end.
_QUICK = ((15, 4),)
# tests/parity/test_sharded.py has them with divided variables, or another case
# differs from them by little.
_DIVIDED = {
    *("global_clipnorm", "accumulation", "ema", "loss_scale_overflow"),
    *("two_optimizers", "kernel_regularizer", "own_apply_gradients"),
    *("beside_optimizer", "frozen_after_compile", "steps_per_execution"),
    *("synchronized_masked", "transformer", "bfloat16"),
}
_ALIKE = {
    *("muon", "clipnorm", "loss_scale_optimizer", "sum", "scalar_function"),
    *("mask_and_weight", "marked", "weighted", "own_trackers"),
    *("mean_with_sample_weight", "dice", "activity_regularizer", "masked"),
    *("synchronized_renorm", "sort", "keras_binary"),
}
# All uneven, and fewer rows than replicas, too.
_BASIC_PAIRS = ((64, 16), (13, 5), (3, 8))
_BASIC = "sgd"


@pytest.mark.parametrize(
    "name", some(BY_DEFAULT, {*BY_DEFAULT} - _DIVIDED - _ALIKE)
)
def test_equals_one_device(name):
    check(name, "mirrored2", _QUICK, list_seen(name))


@pytest.mark.parametrize("strategy", combine(STRATEGIES, every=2))
@pytest.mark.parametrize("name", [_BASIC])
def test_a_basic_case_equals_one_device_everywhere(name, strategy):
    check(name, strategy, _BASIC_PAIRS)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_every_case_equals_one_device_everywhere(name, strategy):
    check(name, strategy, PAIRS, list_seen(name))
