"""Each rule, before and after: tests/migrate/cases.txt."""

import ast
import pathlib
import re

import pytest

from keras_strategies.migrate.porting import port_sources

pytestmark = pytest.mark.quick

TEXT = (pathlib.Path(__file__).parent / "cases.txt").read_text("utf-8")
CASES = {
    name: (before, after)
    for name, before, after in re.findall(
        r"^### (.*)\n((?:.*\n)*?)------\n((?:.*\n)*?)(?=### |\Z)", TEXT, re.M
    )
}


def port(source):
    return port_sources({"script": ("script", source)})["script"]


def test_all_cases_are_read():
    assert (
        len(CASES)
        == TEXT.count("\n------\n")
        == len(re.findall("^###", TEXT, re.M))
    )
    assert len(CASES) > 30


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    before, after = CASES[name]
    ported = port(before)
    assert ported.code == after
    ast.parse(ported.code)
    marks = [
        line.split("# ks-migrate: ")[1]
        for line in after.splitlines()
        if "# ks-migrate: " in line
    ]
    assert sorted(text for _, text in ported.left) == sorted(marks)


@pytest.mark.parametrize("name", CASES)
def test_a_second_run_changes_nothing(name):
    assert port(CASES[name][1]).code == CASES[name][1]
