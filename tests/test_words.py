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


ROOT = DIRECTORY.parent
PACKAGE, TESTS = ("keras_strategies",), ("keras_strategies", "tests")
ALL = (*TESTS, "docs", "CHANGELOG.md")
# Words, in texts and names, that say less than others: a pattern, what to
# write, and where the pattern must not occur. Patterns in lower case ignore it.
PLAINER = (
    (r"dearest", "most expensive", ALL),
    (r"endless", "infinite, unknown trip count", ALL),
    (r"(?<![a-z])folders?(?![a-z])", "directory", ALL),
    (r"(?<![a-z])cures?(?![a-z])", "fix", ALL),
    # Tests cause faults; the package finds problems.
    (
        r"(?<!at )(?<!segmentation )(?<![a-z])faults?(?![a-z])",
        "problem",
        (*PACKAGE, "docs", "CHANGELOG.md"),
    ),
    (
        r"\b(each|every|per) turn\b|\bturns of (a|the) (loop|scan)"
        r"|\bnumber of turns\b",
        "iteration",
        ALL,
    ),
    (r"(?<![a-z])twins?(?![a-z])", "retrace, clone", PACKAGE),
    (r"\b_*(is_uneven|call_unevenly)\b", "ragged", TESTS),
    (r"\b(That|Those) of\b", "name what it is", ALL),
    (
        r"colour|behaviour|favour|neighbour|honour|centre|labelled"
        r"|modelled|\bgrey\b|catalogue",
        "American spelling",
        ALL,
    ),
    (
        r"def test_\w*_(is|are)_told(_once|_first|_at_once)?\(",
        "is_reported, warns_if",
        ("tests",),
    ),
    (r"def _*(of_\w+|[a-z]\w*_of)\(", "a verb, such as get_shape", PACKAGE),
    (r"\bmust be for (a|an|the) ", "what is missing", PACKAGE),
    (
        r"\b(_?(MOST|LEAST)(_[A-Z]+)*|_(most|least)(_[a-z]+)*"
        r"|(most|least)_(?!common\b)[a-z_]+"
        r"|(most|least)(?= ?=|: (int|float)\b))(?!\w)",
        "max, min",
        TESTS,
    ),
)
STATE = re.compile(
    r"Received: (a|an|the|no|both|none|only|another|neither|at least)\b"
    r"[^{}]*?(\. |\.?$)"
)
MAX_WORDS = 40
MAX_ENTRY = 120


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
    if state := STATE.search(text):
        return f"{state[0]!r} is no value: say what happened"
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
    if any(word_problems(source)):  # Tokens take long; comments are in it.
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def join_message(node):
    """Returns the text of a raised error, with "{}" for what is filled in."""
    return "".join(
        "{}" if isinstance(part, ast.FormattedValue) else part.value
        for part in ast.walk(node)
        if isinstance(part, ast.FormattedValue)
        or (isinstance(part, ast.Constant) and isinstance(part.value, str))
    )


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
        ({"message": "`x` must be 3. Received: a list. Do."}, "no value"),
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


def list_files(place):
    """Returns the files of a place in which words are searched."""
    path = ROOT / place
    found = [path] if path.is_file() else path.rglob("*")
    kinds = (".py", ".pyi", ".md", ".toml")
    here = pathlib.Path(__file__)
    return sorted(p for p in found if p.suffix in kinds and p != here)


def plainer_words(text, place):
    """Yields the words of a text that `PLAINER` has: (line, word)."""
    lower = text.lower()
    for pattern, better, places in PLAINER:
        if place in places:
            has_case = re.search("[A-Z]", pattern)
            for match in re.finditer(pattern, text if has_case else lower):
                line = text.count("\n", 0, match.start()) + 1
                yield line, f"{match[0]!r}: {better}"


@pytest.mark.parametrize("place", ALL)
def test_words_are_plain(place):
    problems = [
        f"{path.relative_to(ROOT)}:{line}: {problem}"
        for path in list_files(place)
        for line, problem in plainer_words(path.read_text("utf-8"), place)
    ]
    assert not problems, "\n".join(problems)


def list_entries(text):
    """Yields the entries of a change log: (line, text)."""
    for match in re.finditer(r"^- .*(\n  .*)*", text, re.M):
        yield text.count("\n", 0, match.start()) + 1, match[0]


def test_entries_of_the_changelog_are_short():
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert not [
        f"{line}: {entry}"
        for line, entry in list_entries(text)
        if len(entry.split()) > MAX_WORDS or len(entry) > MAX_ENTRY
    ]
    assert not re.findall(r"^  \S.*", text, re.M), "an entry is one line"


@pytest.mark.parametrize(
    ("text", "place", "found"),
    [
        ("The dearest folder.", "docs", 2),
        ("def find_fault(cure):", "keras_strategies", 2),
        ("def find_fault():", "tests", 0),
        ("A segmentation fault; who is at fault?", "docs", 0),
        ("in each turn", "tests", 1),
        ("They take turns.", "docs", 0),
        ("The sum. Those of others.", "CHANGELOG.md", 1),
        ("It equals those of others.", "docs", 0),
        ("def shape_of(x):", "keras_strategies", 1),
        ("def test_it_is_told(x):", "tests", 1),
        ("default, secure, obscure", "keras_strategies", 0),
        ("_MOST_TRIES = least_rows", "keras_strategies", 2),
        ("def f(most=1, least: int = 2):", "tests", 2),
        ("most_common, at_most, almost", "keras_strategies", 0),
        ("the behaviour of a neighbour", "docs", 2),
    ],
)
def test_plainer_words_are_found(text, place, found):
    assert len(list(plainer_words(text, place))) == found


def test_long_entries_are_found():
    text = "- One.\n- Two,\n  " + "word " * 40 + "\n\n- Three.\n"
    lengths = [len(e.split()) > MAX_WORDS for _, e in list_entries(text)]
    assert lengths == [False, True, False]
