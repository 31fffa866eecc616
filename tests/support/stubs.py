"""Writes the stubs and the API pages from the modules of public names.

    ./run names

A public name is written once: in `_MODULES` of its public module. From there,
the module's stub (`.pyi`) and the lists of names in `docs/api/` are generated.
In a page, a list is between two comments:

    <!-- names of keras_strategies in spmd.values hooks.merge -->
    <!-- end of names -->

docs/migration.md has a diff and tables of the command `migrate`.

The words after "in" are the modules that define the names, or the directories
of these modules. Without them, all names of the public module are listed.
"""

import ast
import pathlib
import re

from tests.support import migration_page

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = "keras_strategies"
_STUB = '"""The public names, for type checkers; `./run names` writes them."""'
_LIST = re.compile(
    r"(<!-- names of ([\w.]+)(?: in ([\w. ]+))? -->\n)"
    r".*?(<!-- end of names -->)",
    re.DOTALL,
)
# What mkdocstrings shows of a class beside its own members.
_INHERITED = "inherited_members:\n        - for_topology"
_OPTIONS = {
    "keras_strategies.Strategy": "inherited_members: true",
    "keras_strategies.MirroredStrategy": _INHERITED,
    "keras_strategies.TPUStrategy": _INHERITED,
}


def find_path(module):
    """The file of a module of the package, by its dotted name."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def read_names(module):
    """The defining modules of a public module's names, with dots.

    A name that is a module itself has "" instead.
    """
    tree = ast.parse(find_path(module).read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "_MODULES":
            names = ast.literal_eval(node.value)
            base = _find_base(tree, module)
            return {
                name: f"{base}.{place}" if place else ""
                for name, place in names.items()
            }
    return {
        alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }


def _find_base(tree, module):
    """The package that the places in a module's `_MODULES` are relative to."""
    (call,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "_lazy_names"
    )
    base = call.args[1]
    if isinstance(base, ast.Constant):
        return base.value
    is_own = isinstance(base, ast.Name)
    return module if is_own else module.rpartition(".")[0]


def make_stub(module):
    """The text of a public module's stub, as ruff formats it."""
    imports = sorted(
        (place or module, _rank(name), name)
        for name, place in read_names(module).items()
    )
    lines = [_STUB, ""]
    for place, _, name in imports:
        line = f"from {place} import {name} as {name}"
        if len(line) > 80:
            line = f"from {place} import (\n    {name} as {name},\n)"
        lines.append(line)
    if module == PACKAGE:
        lines += ["", "__version__: str"]
    return "\n".join(lines) + "\n"


def _rank(name):
    """Where ruff sorts a name: constants, classes, then all others."""
    if name.isupper():
        return 0
    return 1 if name[0].isupper() else 2


def make_page(text):
    """A page of the API, with its lists of names generated again."""
    return _LIST.sub(_make_list, text)


def _make_list(match):
    head, module, places, end = match.groups()
    found = read_names(module)
    of_root = read_names(PACKAGE) if module != PACKAGE else {}
    names = [
        name
        for place in (places or "").split() or [""]
        for name in sorted(found, key=lambda name: (_rank(name), name))
        if f"{found[name]}.".startswith(f"{PACKAGE}.{place}".rstrip(".") + ".")
    ]
    # Names that `ks` has, too, are described there.
    rows = [_make_row(module, name) for name in names if name in of_root]
    table = f"| name | is |\n|---|---|\n{''.join(rows)}\n" if rows else ""
    entries = [_make_entry(module, n) for n in names if n not in of_root]
    return f"{head}\n{table}{''.join(entries)}{end}"


def _make_row(module, name):
    short = f"ks.{module.partition('.')[2]}.{name}"
    return f"| `{short}` | [`ks.{name}`][{PACKAGE}.{name}] |\n"


def _make_entry(module, name):
    options = _OPTIONS.get(f"{module}.{name}")
    options = f"    options:\n      {options}\n" if options else ""
    return f"::: {module}.{name}\n{options}\n"


def list_generated():
    """The generated texts, by their files."""
    stubs = sorted((ROOT / PACKAGE).rglob("*.pyi"))
    texts = {}
    for path in stubs:
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        texts[path] = make_stub(module)
    for path in sorted((ROOT / "docs" / "api").glob("*.md")):
        texts[path] = make_page(path.read_text("utf-8"))
    script = ROOT / "examples" / "migration" / "custom_loop_tf.py"
    for name in ("migration.md", "migration_names.md"):
        path = ROOT / "docs" / name
        texts[path] = migration_page.make_page(
            path.read_text("utf-8"), script.read_text("utf-8")
        )
    return texts


if __name__ == "__main__":
    for path, text in list_generated().items():
        if path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            print(path.relative_to(ROOT))
