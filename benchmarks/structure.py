"""How large the package is: modules, logic lines, docstrings, words.

    ./run bench structure
    ./run bench structure --commit 925aa3b

A logic line is one that is not blank and holds more than a comment or a
docstring. Words are counted in the package, the README and docs/.
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
# The project's own words, and the field's.
WORDS = {
    "go on": r"\bgo(es|ing)? on\b",
    "resume": r"\bresum",
    "keeper, kept": r"\b(keeper|kept)\b",
    "laid out, lies": r"\b(laid out|lies|lie)\b",
    "told, heard, said": r"\b(told|heard|said)\b",
    "who (of things)": r"\bwho\b",
    "sentences that begin with Of": r"(^|[.:]\s+)Of\b",
    "is none, is no": r"\bis (none|no)\b",
}


def docstrings_of(tree):
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
    for node in docstrings_of(ast.parse(source)):
        lines -= set(range(node.lineno, node.end_lineno + 1))
    return lines


def figures(root):
    """What is counted, by name."""
    package = root / "keras_strategies"
    sources = {p: p.read_text("utf-8") for p in package.rglob("*.py")}
    trees = {p: ast.parse(source) for p, source in sources.items()}
    docs = [
        ast.get_docstring(node)
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        )
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
    yield "logic lines", sum(map(len, map(logic_lines, sources.values())))
    yield "docstrings", len(lengths)
    yield "words of a docstring, median", statistics.median(lengths)
    texts = list(sources.values())
    for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        texts.append(path.read_text("utf-8"))
    for name, pattern in WORDS.items():
        yield (
            f"words: {name}",
            sum(len(re.findall(pattern, t, re.I | re.M)) for t in texts),
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", help="beside what is here now")
    args = parser.parse_args()
    now = dict(figures(ROOT))
    before = {}
    if args.commit:
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(
                ["git", "-C", str(ROOT), "archive", args.commit],
                check=True,
                capture_output=True,
            ).stdout
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                tar.extractall(folder, filter="data")
            before = dict(figures(pathlib.Path(folder)))
    for name, value in now.items():
        was = f"{before[name]:>10} ->" if before else ""
        print(f"{name:<32}{was}{value:>10}")


if __name__ == "__main__":
    main()
