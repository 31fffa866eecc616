"""fit, evaluate and predict on several processes: the numbers of one."""

import pytest

from tests.multi_process import (
    counted_rows,
    own_rows,
    scenarios,
    test_bad_input,
    test_own_batches,
)
from tests.support.jobs import values_of, values_of_each
from tests.support.optional import without_torch
from tests.support.plain_keras import assert_same, mirrored, no_data_left

pytestmark = pytest.mark.multi_process

TARGET = "multi_process.scenarios:loops"
CASES = [(16, 8, 1), (20, 8, 1), (30, 8, 1), (5, 8, 1), (30, 8, 3), (9, 1, 1)]
NAMES = without_torch(
    ["arrays", "PyDataset", "generator", "tf.data", "grain", "torch"]
)


FEW = ["arrays", "generator", "tf.data"], CASES[2:3]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What wrong data, the loops, a model with states and steps of own rows
    give in each of two processes."""
    directory, other = map(tmp_path_factory.mktemp, ("own", "wrong"))
    own_rows.write_files(directory)
    calls = (
        (test_bad_input.TARGET, other, test_bad_input.FEW),
        (TARGET, *FEW),
        ("multi_process.scenarios:stateful",),
        (test_own_batches.TARGET, directory, test_own_batches.FEW),
        ("multi_process.counted_rows:count",),
    )
    return values_of_each(2, *calls, devices=1, uses=["tensorflow"])


@no_data_left
def test_loops_equal_those_of_one_process(found):
    compare(scenarios.loops(*FEW, mirrored(2)), found[1], *FEW)


def test_a_model_is_built_for_the_rows_of_all_processes(found):
    """One whose states are as many as a batch's rows takes no others."""
    values = found[2]
    plain = scenarios.fit_stateful(
        scenarios.build_stateful(), from_tf_data=False
    )
    for value in values:
        assert_same([plain, plain], value)


def test_steps_of_own_rows_are_those_of_tf(found):
    test_own_batches.check(found[3], test_own_batches.FEW)


def test_each_row_is_used_once_whatever_the_source(found):
    """Keras 3.16 divides rows between processes, too, but not under ours."""
    rows = counted_rows.ROWS.ravel().tolist()
    assert list(found[4][0]) == list(counted_rows.SOURCES)
    for name in counted_rows.SOURCES:
        used = [value[name] for value in found[4]]
        for value in used:
            assert value["trained"] == [1] * len(rows), name
            assert value["evaluated"] == [1] * len(rows), name
            assert value["predicted"] == rows, name
        own = [value["own"] for value in used]
        assert all(own), name
        assert sorted(sum(own, [])) == rows, name


def test_wrong_data_ends_in_one_error_everywhere(found):
    test_bad_input.check(*found[0])


@no_data_left
@pytest.mark.slow
@pytest.mark.parametrize(("num_processes", "devices"), [(2, 2), (3, 2), (2, 1)])
def test_loops_equal_those_of_one_process_for_all_sizes(num_processes, devices):
    args = NAMES, CASES
    options = {"devices": devices, "uses": ["tensorflow"]}
    several = values_of(TARGET, num_processes, *args, **options)
    one = scenarios.loops(*args, mirrored(devices * num_processes))
    compare(one, several, *args)


def compare(one, several, names, cases):
    assert len(one) == len(names) * len(cases)
    for value in several:
        assert_same(one, value)
        assert value == several[0]
