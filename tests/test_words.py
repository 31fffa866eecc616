"""The words of the package: summaries, messages, comments and names."""

import ast
import io
import pathlib
import re
import tokenize

import pytest

pytestmark = pytest.mark.quick

DIRECTORY = pathlib.Path(__file__).parents[1] / "keras_strategies"
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
QUESTIONS = (
    r"(What|Where|Who|Whose|Whom|Why|How|When|Which|Of|As|Until|If|From|By)\b"
)
# Capitalized words that end in "s" and are not verbs.
NO_VERB = re.compile(
    r"(This|Its|As|Rows|Bytes|Names|Arrays|Files|Values|Figures|Batches|Steps"
    r"|Variables|Shapes|Devices|Processes|Entries|Models|Numbers|Results|Slots"
    r"|Seeds|Keys|Paths|Errors|Columns|Lines|Replicas|Positions|Messages|Facts"
    r"|Layers|Losses|Metrics)\b"
)
# As "_made" and "shown": they name neither what is done nor what comes out.
PARTICIPLE = re.compile(
    r"_*([a-z]+ed|made|shown|told|held|given|taken|written|found|known|chosen"
    r"|drawn|grown|sent|kept|left|built|said|laid|bound|hidden|broken)"
)
# Functions whose participle is an adjective or a verb that ends so.
NAMED = re.compile(r"_*(feed|seed|need|set|serialized)")  # One is tf's.
RULE = re.compile(
    r"\b(must|should|cannot|can|could not|couldn't|may|not|no|only|needs?"
    r"|expect\w*|requires?|required|unknown|invalid|too|missing|already"
    r"|differ\w*|fail\w*|without|bound to another)\b",
    re.I,
)
WORDS = {
    r"(?i)\b(nobody|somebody)\b": "a person is meant by no code",
    r"(?i)\b(lie|lies|lay|lays|laid|lying)\b": '"is", "is stored", "is placed"',
    r"(?i)\b(alike|anew|meanwhile)\b": '"equally", "again", "in between"',
    r"\b(as|equally) many\b": '"the same number of"',
    r"\b[Ii]t is none\b": '"is not one"',
}


def summary_problem(doc, kind):
    """Returns what is wrong with a docstring's first line, or None."""
    first = doc.splitlines()[0]
    if re.match(QUESTIONS, first):
        return "begins with a question word"
    if kind == "function" and (
        not re.match(r"([A-Z][a-z]+s|See|No-op)\b", first)
        or NO_VERB.match(first)
    ):
        return "does not begin with a verb in the third person"
    if not re.match(r"[A-Z`\"'(]|grain|tf\b|torch", first):
        return "begins in the middle of a sentence"
    if kind == "module" and not first.endswith((".", ":")):
        return "continues in a second line"
    return None


def name_problem(name):
    """Returns what is wrong with a function's name, or None."""
    if PARTICIPLE.fullmatch(name) and not NAMED.fullmatch(name):
        return "is a bare participle"
    return None


def message_problem(text):
    """Returns what is wrong with an error's message, or None.

    Its rule, in front of "Received", is an obligation or names the problem.
    """
    rule, is_there, _ = text.partition("Received")
    if is_there and rule.strip() and not RULE.search(rule):
        return 'states its rule as a fact: write "must be"'
    return None


def word_problems(text):
    """Yields the words of a text that have a plainer one."""
    for pattern, better in WORDS.items():
        if match := re.search(pattern, text):
            yield f"{match[0]!r}: {better}"


def list_documented(tree):
    """Yields the documented nodes of a module: (node, kind)."""
    yield tree, "module"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node, "class"
        elif isinstance(node, FUNCTIONS):
            decorators = [ast.unparse(d) for d in node.decorator_list]
            is_property = any("property" in name for name in decorators)
            yield node, "property" if is_property else "function"


def list_texts(source, tree):
    """Yields the comments and strings of a module: (line, text)."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def join_message(node):
    """Returns the text of a raised error, without what is filled in."""
    parts = [
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    return "".join(parts)


def problems_in(source):
    """Yields the problems of a module: (line, problem)."""
    tree = ast.parse(source)
    for node, kind in list_documented(tree):
        line = getattr(node, "lineno", 1)
        doc = ast.get_docstring(node)
        if doc and (problem := summary_problem(doc, kind)):
            yield line, f"{doc.splitlines()[0]!r} {problem}"
        if kind == "function" and (problem := name_problem(node.name)):
            yield line, f"{node.name} {problem}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            text = join_message(node.exc)
            if problem := message_problem(text):
                yield node.lineno, f"{text[:60]!r} {problem}"
    for line, text in list_texts(source, tree):
        for problem in word_problems(text):
            yield line, problem


def test_the_package_reads_as_plain_english():
    problems = [
        f"{path.relative_to(DIRECTORY)}:{line}: {problem}"
        for path in sorted(DIRECTORY.rglob("*.py"))
        for line, problem in problems_in(path.read_text("utf-8"))
    ]
    assert not problems, "\n".join(problems)


SOURCE = """\
"Values of a thing."


class Thing:
    "A thing."

    @property
    def size(self):
        "The number of rows."

    def {name}(self):
        "{summary}"
        # {comment}
        raise ValueError("{message}")
"""
GOOD = {
    "name": "make_rows",
    "summary": "Returns the rows.",
    "comment": "It is stored.",
    "message": "`x` must be 3. Received: 4. Pass 3.",
}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"name": "_made"}, "participle"),
        ({"name": "seed"}, None),
        ({"summary": "What the rows are."}, "question word"),
        ({"summary": "Of each the rows."}, "question word"),
        ({"summary": "The rows."}, "verb"),
        ({"summary": "Rows of the batch."}, "verb"),
        ({"comment": "Nobody, or somebody."}, "no code"),
        ({"comment": "It lies there."}, "is stored"),
        ({"comment": "It is none."}, "is not one"),
        ({"message": "`x` is 3. Received: 4."}, "must be"),
        ({"message": "There is no x. Received: 4."}, None),
    ],
)
def test_problems_are_found(change, problem):
    found = [text for _, text in problems_in(SOURCE.format(**GOOD | change))]
    if problem is None:
        assert found == []
    else:
        assert len(found) == 1
        assert problem in found[0]


@pytest.mark.parametrize(
    ("first", "problem"),
    [
        ("The state of a running fit.", None),
        ("`Strategy.describe`: the mesh drawn.", None),
        ("What a fit is made of.", "question word"),
        ("The progress of this process, shown by", "second line"),
        ("and others.", "middle of a sentence"),
    ],
)
def test_problems_of_a_module_are_found(first, problem):
    found = summary_problem(first, "module")
    assert found is None if problem is None else problem in found
