"""Import statements: those of TensorFlow and Keras, and the new ones."""

import ast
import re

from keras_strategies.migrate import tables
from keras_strategies.migrate.port import PACKAGE, Port
from keras_strategies.migrate.scopes import (
    Scope,
    bindings,
    dotted_name,
    module_of,
    normalize,
)
from keras_strategies.migrate.source import Rendered
from keras_strategies.migrate.tables import find_replacement
from keras_strategies.migrate.uses import is_ported_import

_KERAS = {"keras", "keras_hub", "keras_cv", "keras_nlp", "keras_tuner"}
_FIRST = _KERAS | {
    "tensorflow",
    "tensorflow_datasets",
    "tensorflow_hub",
    "tensorflow_addons",
    PACKAGE,
}
_FROM = re.compile(r"from\s+([\w.]+)\s+import\b")


def roots_of(node: ast.AST) -> set[str]:
    """Returns the first names of the modules that a statement imports."""
    if isinstance(node, ast.ImportFrom):
        return {module_of(node).split(".")[0]}
    return {alias.name.split(".")[0] for alias in node.names}


def port_imports(port: Port, rendered: Rendered) -> set[ast.stmt]:
    """Ports imports of TensorFlow, and adds those that new code needs.

    Args:
      port: The file.
      rendered: Its text with all other edits.

    Returns:
      The statements before which there are new ones.
    """
    used, kept = _find_uses(port, rendered)
    needed: dict[Scope, set[str]] = {}
    anchors: dict[Scope, ast.stmt] = {}
    for node in port.names.imports:
        if roots_of(node) & _FIRST:
            anchors.setdefault(port.names.scope_of[node], node)
    for edit in rendered.edits:
        scope = port.names.scope_of[edit.node] if edit.node else port.names.root
        homes = [port.names.root, *scope.enclosing()]
        home = next((s for s in homes if s in anchors), port.names.root)
        for module in edit.modules:
            full = PACKAGE if module == "ks" else module
            if port.names.origin(port.aliases[module], scope) != full:
                needed.setdefault(home, set()).add(module)
    for node in port.names.imports:
        modules = needed.setdefault(port.names.scope_of[node], set())
        for line in _port_import(port, node, used - kept):
            if line.split()[1].split(".")[0] in _KERAS:
                modules.add("ks")
            if re.fullmatch(r"import keras( as keras|\..*)?", line):
                modules.add("-keras")
    root = needed.get(port.names.root, set())
    for scope, modules in needed.items():
        has_ks = any(
            origin.split(".")[0] == PACKAGE
            for each in scope.visible()
            for origins in each.imports.values()
            for origin in origins
        )
        if "keras" in modules:
            modules.add("ks")
        is_inner = scope is not port.names.root
        if (is_inner and "ks" in root) or has_ks:
            modules.discard("ks")
    filled = set()
    for scope, anchor in anchors.items():
        modules = needed.get(scope, set())
        for module in ("ks", "jax", "keras"):
            if module in modules and f"-{module}" not in modules:
                filled.add(anchor)
                _insert(port, anchor, module)
    return filled


def _insert(port: Port, anchor: ast.stmt, module: str) -> None:
    full = PACKAGE if module == "ks" else module
    alias = port.aliases[module]
    name = f"import {full}" + ("" if alias == full else f" as {alias}")
    start = port.source.line_start(port.source.span(anchor)[0])
    port.insert_line(start, name)


def _find_uses(
    port: Port, rendered: Rendered
) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Returns the imported names that are read, and those still read."""
    used, kept = set(), set()
    for scope in port.names.scopes.values():
        for use in scope.uses:
            root = dotted_name(use).split(".")[0]
            found = {
                (root, origin)
                for each in scope.visible()
                for origin in each.imports.get(root, ())
            }
            used |= found
            if found and rendered.keeps(port.source.span(use)[0]):
                kept |= found
    return used, kept


def _port_import(
    port: Port, node: ast.Import | ast.ImportFrom, unused: set[tuple[str, str]]
) -> list[str]:
    """Ports a statement; returns those that there are then."""
    if not roots_of(node) & {"tensorflow", "keras", "tensorflow_estimator"}:
        return [f"import {root}" for root in roots_of(node)]
    names = [node.module] if isinstance(node, ast.ImportFrom) else []
    for name in names or [alias.name for alias in node.names]:
        if (name or "").startswith("tensorflow.python"):
            reason = tables.MARKED["tensorflow.python"]
            port.mark(node, f"`{name}` {reason}")
            return []
    dropped = {
        alias
        for alias, bound in zip(node.names, bindings(node), strict=True)
        if bound in unused and bound[1].split(".")[0] == "tensorflow"
    }
    groups: dict[str, list[str]] = {}
    for alias in node.names:
        is_as = alias.asname not in (None, alias.name)
        if isinstance(node, ast.ImportFrom):
            module, name = _target(module_of(node), alias.name)
            if name is None or alias in dropped:
                continue
            as_name = f" as {alias.asname}" if is_as else ""
            if not module:
                as_name = "" if alias.asname in (None, name) else as_name
                module = f"import {name}{as_name}"
            groups.setdefault(module, []).append(name + as_name)
        elif alias not in dropped:
            full = normalize(alias.name) if alias.asname else alias.name
            is_as = alias.asname and alias.asname != full
            text = full + (f" as {alias.asname}" if is_as else "")
            groups.setdefault("", []).append(text)
    if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
        groups = {normalize(module_of(node)): ["*"]}
        if next(iter(groups)).split(".")[0] == "tensorflow":
            text = "name what is imported: `*` hides it from `migrate`"
            port.mark(node, text)
    return _write(port, node, groups)


def _target(module: str, name: str) -> tuple[str, str | None]:
    """Returns where a name is imported from now; None if it is not."""
    full = normalize(f"{module}.{name}")
    if is_ported_import(full):
        prefix, text, _ = find_replacement(full) or ("", "", False)
        target = text + full[len(prefix) :]
        root = target.rpartition(".")[0]
        return re.sub(r"^ks\b", PACKAGE, root), name
    found = find_replacement(full)
    is_replaced = found is not None and not found[2]
    if is_replaced and full.startswith("keras."):
        return "", None
    if full == "keras":
        return "", name
    root = full.rpartition(".")[0]
    return (root if root.split(".")[0] == "keras" else module), name


def _write(
    port: Port, node: ast.Import | ast.ImportFrom, groups: dict[str, list[str]]
) -> list[str]:
    """Replaces a statement by those of the modules and their names."""
    source, span = port.source, port.source.span(node)
    if not groups:
        port.dropped.add(node)
        return []
    lines = [
        module
        if module.startswith("import ")
        else f"from {module} import {', '.join(names)}"
        if module
        else f"import {', '.join(names)}"
        for module, names in groups.items()
    ]
    if [ast.unparse(node)] == lines:
        return lines
    match = _FROM.match(source.text, span[0])
    is_whole = sum(map(len, groups.values())) == len(node.names)
    if match and is_whole and len(lines) == 1 and lines[0].startswith("from"):
        port.edit(node, match.span(1), list(groups))
        return lines
    line = source.line_start(span[0])
    joint = source.newline + source.indent(line) if line == span[0] else "; "
    comments = source.comments(span) if line == span[0] else []
    port.edit(node, span, [joint.join([*comments, *lines])])
    return lines
