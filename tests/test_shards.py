"""The parts of the tests that pull requests run are together all of them."""

import pathlib
import re

import pytest

from tests.support.shards import choose

pytestmark = pytest.mark.quick

WORKFLOW = pathlib.Path(__file__).parents[1] / ".github/workflows/tests.yml"
NODES = [
    f"{file}::test[{n}]"
    for file, count in (("a", 40), ("b", 25), ("c", 20), ("d", 9), ("e", 1))
    for n in range(count)
]


def find_file(node):
    return node.partition("::")[0]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_parts_are_disjoint_and_together_all(count):
    parts = [
        choose(NODES, f"{k}/{count}", find_file) for k in range(1, count + 1)
    ]
    assert sorted(node for part in parts for node in part) == sorted(NODES)


def test_a_scope_is_in_one_part_and_parts_are_even():
    parts = [choose(NODES, f"{k}/3", find_file) for k in (1, 2, 3)]
    files = [{find_file(node) for node in part} for part in parts]
    assert files == [{"a"}, {"b", "e"}, {"c", "d"}]


@pytest.mark.parametrize("shard", ["0/3", "4/3", "3", "one", "1/"])
def test_what_is_no_part_is_refused(shard):
    with pytest.raises(ValueError, match="--shard must|invalid literal"):
        choose(NODES, shard, find_file)


def test_pull_requests_run_every_part_of_both_runs():
    text = WORKFLOW.read_text("utf-8")
    (listed,) = re.findall(r"shard: \[([\d, ]+)\]", text)
    numbers = listed.split(", ")
    assert numbers == [str(k + 1) for k in range(len(numbers))]
    part = f"--shard ${{{{ matrix.shard }}}}/{len(numbers)}"
    assert f"- run: ./run test {part}\n" in text
    assert f"- run: ./run test -m multi_process {part}\n" in text
