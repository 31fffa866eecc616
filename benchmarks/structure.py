"""How large the package is: modules, logic lines, docstrings, words.

    ./run bench structure
    ./run bench structure --commit 925aa3b

A logic line is one that is not blank and holds more than a comment, a
docstring or an import. A function's lines are those without its docstring.
`Any` is bare where it is a whole annotation. Words are counted in the package,
the README and docs/.
"""

import argparse
import ast
import io
import pathlib
import re
import statistics
import subprocess
import tarfile
import tempfile
import tokenize

ROOT = pathlib.Path(__file__).parents[1]
SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
# Words that read as translated: docs and code use the plain ones.
WORDS = {
    "is no, is none": r"\b(is|are|was|were) (no|none)\b",
    "says, said, told": r"\b(says?|said|tells?|told)\b",
    "own": r"\bown\b",
    "nobody, somebody": r"\b([Nn]obody|[Ss]omebody)\b",
    "lies, laid (of things)": r"\b(lies?|lays?|laid|lying)\b",
    "who (of things)": r"\bwho\b",
    "alike, anew, meanwhile": r"\b(alike|anew|meanwhile)\b",
    "as many, equally many": r"\b(as|equally) many\b",
}


def list_docstrings(tree):
    """The nodes of docstrings, of the module, its classes and functions."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield body[0]


def logic_lines(source):
    """The numbers of lines with code."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SKIPPED:
            lines |= set(range(token.start[0], token.end[0] + 1))
    tree = ast.parse(source)
    imports = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    )
    for node in (*list_docstrings(tree), *imports):
        lines -= count_lines(node)
    return lines


def count_logic_lines(package):
    """The logic lines of each room of a package, with its subrooms, by name.

    "" is the room of the modules that are in no directory.
    """
    counts = {}
    for path in sorted(package.rglob("*.py")):
        room, *_ = [*path.relative_to(package).parts[:-1], ""]
        count = len(logic_lines(path.read_text("utf-8")))
        counts[room] = counts.get(room, 0) + count
    return counts


def count_lines(node):
    return set(range(node.lineno, node.end_lineno + 1))


def list_functions(tree):
    """Yields the functions, and whether each is public: (node, bool)."""
    for parent in ast.walk(tree):
        hidden = isinstance(parent, FUNCTIONS) or (
            isinstance(parent, ast.ClassDef) and parent.name.startswith("_")
        )
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, FUNCTIONS):
                yield node, not hidden and not node.name.startswith("_")


def length(function):
    docstring = next(iter(list_docstrings(function)), None)
    own = docstring is not None and docstring is function.body[0]
    return len(
        count_lines(function) - (count_lines(docstring) if own else set())
    )


def is_any(annotation):
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


def has_bare_any(function):
    a = function.args
    named = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
    annotations = [arg.annotation for arg in named if arg]
    return any(map(is_any, [*annotations, function.returns]))


def function_figures(trees):
    """What is counted of functions, by name."""
    found = [pair for tree in trees for pair in list_functions(tree)]
    yield "functions", len(found)
    yield "functions over 40 lines", sum(length(f) > 40 for f, _ in found)
    yield "functions with a bare Any", sum(has_bare_any(f) for f, _ in found)
    yield (
        "public, Any without Returns:",
        sum(
            public
            and is_any(f.returns)
            and "Returns:" not in (ast.get_docstring(f) or "")
            for f, public in found
        ),
    )


def figures(root):
    """What is counted, by name."""
    package = root / "keras_strategies"
    sources = {p: p.read_text("utf-8") for p in package.rglob("*.py")}
    trees = {p: ast.parse(source) for p, source in sources.items()}
    docs = [
        ast.get_docstring(node)
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS | ast.ClassDef)
    ]
    lengths = [len(doc.split()) for doc in docs if doc]
    yield "modules", sum(p.name != "__init__.py" for p in sources)
    yield "rooms", sum(p.name == "__init__.py" for p in sources)
    rooms = {}
    for path in sources:
        if path.name != "__init__.py":
            rooms[path.parent] = rooms.get(path.parent, 0) + 1
    yield "modules of the largest room", max(rooms.values())
    yield "lines", sum(len(source.splitlines()) for source in sources.values())
    counts = count_logic_lines(package)
    yield "logic lines", sum(counts.values())
    for room, count in counts.items():
        yield f"logic lines of {room or 'no room'}", count
    yield from function_figures(trees.values())
    yield "docstrings", len(lengths)
    yield "words of a docstring, median", statistics.median(lengths)
    texts = list(sources.values())
    for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        texts.append(path.read_text("utf-8"))
    for name, pattern in WORDS.items():
        yield (
            f"words: {name}",
            sum(len(re.findall(pattern, t)) for t in texts),
        )


def layer_figures():
    """What tests/test_layers.py keeps at zero, of what is here now."""
    # Imported here, because that test counts lines by this module.
    from tests import test_layers

    sources = test_layers.read_sources()
    imports = test_layers.imports_of_all(sources)
    yield "circles of imports", len(test_layers.find_circles(imports))
    problems = [
        problem
        for path, source in sources.items()
        for problem in test_layers.find_problems(path, source)
    ]
    yield "imports of a room above", sum("a room above" in f for f in problems)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", help="beside what is here now")
    args = parser.parse_args()
    now = dict(figures(ROOT)) | dict(layer_figures())
    before = {}
    if args.commit:
        with tempfile.TemporaryDirectory() as directory:
            archive = subprocess.run(
                ["git", "-C", str(ROOT), "archive", args.commit],
                check=True,
                capture_output=True,
            ).stdout
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                tar.extractall(directory, filter="data")
            before = dict(figures(pathlib.Path(directory)))
    for name, value in now.items():
        was = f"{before.get(name, 0):>10} ->" if before else ""
        print(f"{name:<32}{was}{value:>10}")


if __name__ == "__main__":
    main()
