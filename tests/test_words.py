"""The words of the package: each module's first line names its subject."""

import ast
import pathlib
import re

import pytest

pytestmark = pytest.mark.quick

FOLDER = pathlib.Path(__file__).parents[1] / "keras_strategies"
# Questions, and verbs: what a module does is not what is in it.
NO_NOUN = r"(What|How|Which|Who|Where|When|Whether|From|Lets|[A-Z][a-z]+ing)\b"


def find_fault(first):
    """What is wrong with a module's first line, or None."""
    if re.match(NO_NOUN, first):
        return "does not begin with a noun"
    if not re.match(r"[A-Z`]|(grain|torch|model_to|train_and)", first):
        return "begins in the middle"
    if not first.endswith((".", ":")):
        return "goes on in a second line"
    return None


def test_modules_begin_with_their_subject():
    faults = []
    for path in sorted(FOLDER.rglob("*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text("utf-8")))
        first = doc.splitlines()[0]
        if fault := find_fault(first):
            faults.append(f"{path.relative_to(FOLDER)}: {fault}: {first}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("first", "is_good"),
    [
        ("The state of a running fit.", True),
        ("`Strategy.describe`: the mesh drawn.", True),
        ("What a fit is made of.", False),
        ("Making a source in every process.", False),
        ("The progress of this process, told by", False),
        ("and others.", False),
    ],
)
def test_faults_are_found(first, is_good):
    assert (find_fault(first) is None) == is_good
