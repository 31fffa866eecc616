"""Import statements: those of TensorFlow and Keras, and the new ones."""

import ast
import re

from keras_strategies.migrate import tables
from keras_strategies.migrate.port import PACKAGE, Port
from keras_strategies.migrate.scopes import (
    Scope,
    bindings,
    get_module,
    normalize,
)
from keras_strategies.migrate.source import Rendered
from keras_strategies.migrate.tables import find_replacement
from keras_strategies.migrate.uses import is_ported_import

_FULL = {"ks": PACKAGE, "jax": "jax", "keras": "keras"}
_KERAS = {"keras", "keras_hub", "keras_cv", "keras_nlp", "keras_tuner"}
TENSORFLOW = {"tensorflow", "tensorflow_estimator"}
_FIRST = _KERAS | TENSORFLOW | tables.WORDS["first"]
_FROM = re.compile(r"from\s+([\w.]+)\s+import\b")


def find_roots(node: ast.Import | ast.ImportFrom) -> set[str]:
    """Returns the first names of the modules that a statement imports."""
    return {origin.split(".")[0] for _, origin in bindings(node)}


def port_imports(port: Port, rendered: Rendered) -> set[ast.stmt]:
    """Ports imports of TensorFlow, and adds those that new code needs.

    Args:
      port: The file.
      rendered: Its text with all other edits.

    Returns:
      The statements before which there are new ones.
    """
    names = port.names
    unused = names.find_uses() - names.find_uses(rendered.keeps)
    anchors: dict[Scope, ast.stmt] = {}
    for node in names.imports:
        if find_roots(node) & _FIRST:
            anchors.setdefault(names.scope_of[node], node)
    needed: dict[Scope, set[str]] = {scope: set() for scope in anchors}
    for edit in rendered.edits:
        scope = names.scope_of.get(edit.node, names.root)
        homes = [s for s in (names.root, *scope.enclosing()) if s in anchors]
        for module in edit.modules if homes else ():
            if names.origin(port.aliases[module], scope) != _FULL[module]:
                needed[homes[0]].add(module)
    bound = set()
    for node in names.imports:
        scope = names.scope_of[node]
        for line in _port_import(port, node, unused):
            if line.split()[1].split(".")[0] in _KERAS:
                needed[scope].add("ks")
            if re.fullmatch(r"import keras( as keras|\..*)?", line):
                bound.add((scope, "keras"))
    filled = set()
    for scope, modules in needed.items():
        if "keras" in modules:
            modules.add("ks")
        is_inner = scope is not names.root
        homes = scope.visible()
        there = (n for n in names.imports if names.scope_of[n] in homes)
        has_ks = any(PACKAGE in find_roots(node) for node in there)
        if has_ks or (is_inner and "ks" in needed.get(names.root, ())):
            bound.add((scope, "ks"))
        for module in _FULL:
            if module in modules and (scope, module) not in bound:
                filled.add(anchors[scope])
                _insert(port, anchors[scope], module)
    return filled


def _insert(port: Port, anchor: ast.stmt, module: str) -> None:
    alias = port.aliases[module]
    is_same = alias == _FULL[module]
    line = f"import {_FULL[module]}" + ("" if is_same else f" as {alias}")
    start = port.source.line_start(port.source.span(anchor)[0])
    port.insert_line(start, line)


def _port_import(
    port: Port, node: ast.Import | ast.ImportFrom, unused: set[tuple[str, str]]
) -> list[str]:
    """Ports a statement; returns those that there are then."""
    if not find_roots(node) & (TENSORFLOW | {"keras"}):
        return [f"import {root}" for root in find_roots(node) if root]
    is_from = isinstance(node, ast.ImportFrom)
    module = get_module(node) if is_from else ""
    groups: dict[str, list[ast.alias]] = {}
    for alias, bound in zip(node.names, bindings(node), strict=True):
        full = f"{module}.{alias.name}".lstrip(".")
        if full.startswith("tensorflow.python"):
            name, text = module or full, tables.MARKED["tensorflow.python"]
            port.mark(node, f"`{name}` {text}")
            return []
        if alias.name == "*" and normalize(module).startswith("tensorflow"):
            text = "name what is imported: `*` hides it from `migrate`"
            port.mark(node, text)
        if bound in unused and bound[1].startswith("tensorflow"):
            continue
        root, name = "", alias.name
        if is_from:
            root, name = _find_target(module, alias.name)
        elif alias.asname:
            name = normalize(alias.name)
        if name:
            asname = None if alias.asname == name else alias.asname
            groups.setdefault(root, []).append(ast.alias(name, asname))
    lines = [
        ast.unparse(ast.ImportFrom(root, each, 0) if root else ast.Import(each))
        for root, each in groups.items()
    ]
    if not lines:
        port.dropped.add(node)
    elif lines != [ast.unparse(node)]:
        _write(port, node, lines, sum(map(len, groups.values())))
    return lines


def _find_target(module: str, name: str) -> tuple[str, str]:
    """Returns from where a name is imported now; "" if it is not."""
    full = normalize(f"{module}.{name}")
    prefix, text, is_mark = find_replacement(full) or ("", "", True)
    if is_ported_import(full):
        root = (text + full[len(prefix) :]).rpartition(".")[0]
        return re.sub(r"^ks\b", PACKAGE, root), name
    if not is_mark and full.startswith("keras."):
        return "", ""
    root = full.rpartition(".")[0]
    is_keras = full.split(".")[0] == "keras"
    return (root if is_keras else module), name


def _write(port: Port, node: ast.stmt, lines: list[str], count: int) -> None:
    """Replaces a statement by others, or the module in it."""
    source, span = port.source, port.source.span(node)
    match = _FROM.match(source.text, *span)
    is_whole = count == len(getattr(node, "names", ()))
    if match and is_whole and len(lines) == 1 and lines[0].startswith("from"):
        port.edit(node, match.span(1), [lines[0].split()[1]])
        return
    line = source.line_start(span[0])
    joint, comments = "; ", []
    if line == span[0]:
        joint = source.newline + source.indent(line)
        comments = source.comments(span)
    port.edit(node, span, [joint.join([*comments, *lines])])
