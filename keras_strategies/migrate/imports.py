"""Import statements: those of TensorFlow and Keras, and the new ones."""

import libcst as cst

from keras_strategies.migrate import tables
from keras_strategies.migrate.chains import dotted_name, module_of, normalize
from keras_strategies.migrate.edits import (
    MARK,
    PLACEHOLDERS,
    Edits,
    apply,
    name_node,
)
from keras_strategies.migrate.rules import (
    Port,
    find_replacement,
    is_ported_import,
)
from keras_strategies.migrate.scopes import Names, Scope, read_names

_PACKAGE = "keras_strategies"
_KERAS = frozenset(
    {"keras", "keras_hub", "keras_cv", "keras_nlp", "keras_tuner"}
)
_FIRST = _KERAS | {
    "tensorflow",
    "tensorflow_datasets",
    "tensorflow_hub",
    "tensorflow_addons",
    _PACKAGE,
}


def port_imports(port: Port) -> None:
    """Ports statements that import from `tf.keras` or `tf.distribute`."""
    for node in port.file.names.imports:
        if isinstance(node, cst.Import):
            _port_import(port, node)
        else:
            _port_import_from(port, node)


def _port_import(port: Port, node: cst.Import) -> None:
    for alias in node.names:
        full = dotted_name(alias.name) or ""
        new = normalize(full)
        if full.startswith("tensorflow.python"):
            port.mark(node, f"`{full}` {tables.MARKED['tensorflow.python']}")
        if new == full or not new.startswith("keras") or not alias.asname:
            continue
        is_same = dotted_name(alias.asname.name) == new

        def edit(
            part: cst.ImportAlias, new: str = new, is_same: bool = is_same
        ) -> cst.ImportAlias:
            asname = None if is_same else part.asname
            return part.with_changes(name=name_node(new), asname=asname)

        port.edits.replace(alias, edit)


def _port_import_from(port: Port, node: cst.ImportFrom) -> None:
    module = module_of(node)
    if module.split(".")[0] not in ("tensorflow", "keras"):
        return
    new = normalize(module)
    if module.startswith("tensorflow.python"):
        port.mark(node, f"`{module}` {tables.MARKED['tensorflow.python']}")
        return
    if isinstance(node.names, cst.ImportStar):
        if new.split(".")[0] != "keras":
            port.mark(
                node, "name what is imported: `*` hides it from `migrate`"
            )
        elif new != module:
            port.edits.replace(
                node, lambda part: part.with_changes(module=name_node(new))
            )
        return
    groups = _group(module, node.names)
    kept = groups.pop(module, [])
    if not groups and len(kept) == len(node.names):
        return
    line = port.file.names.statement_of(node)
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) > 1:
        port.mark(node, "write this import on a line of its own")
        return
    statements: list[cst.BaseSmallStatement] = []
    if kept:
        statements.append(_from(node, module, kept))
    for name, aliases in groups.items():
        statements += [_from(node, name, aliases)] if name else _plain(aliases)
    if not statements:
        port.drop(node)
        return
    lines = [cst.SimpleStatementLine([each]) for each in statements]
    lines[-1] = lines[-1].with_changes(
        trailing_whitespace=line.trailing_whitespace
    )
    lines[0] = lines[0].with_changes(leading_lines=line.leading_lines)
    port.edits.replace(
        line,
        lambda new: lines[0] if len(lines) == 1 else cst.FlattenSentinel(lines),
    )


def _group(module: str, names: object) -> dict[str, list[cst.ImportAlias]]:
    """Returns the names by the module that they are imported from now."""
    groups: dict[str, list[cst.ImportAlias]] = {}
    for alias in names:
        full = normalize(f"{module}.{dotted_name(alias.name)}")
        target = full
        if is_ported_import(full):
            prefix, text, _ = find_replacement(full) or ("", "", False)
            target = text + full[len(prefix) :]
        if _is_replaced(full):
            continue
        if target == "keras":
            groups.setdefault("", []).append(alias)
            continue
        root = target.rpartition(".")[0]
        if root.split(".")[0] == "ks":
            root = _PACKAGE + root[2:]
        elif root.split(".")[0] == "tensorflow":
            root = module
        groups.setdefault(root, []).append(alias)
    return groups


def _is_replaced(full: str) -> bool:
    """Returns whether a name of Keras 2 is replaced where it is used."""
    found = find_replacement(full)
    return (
        found is not None
        and not found[2]
        and full.startswith("keras.")
        and not is_ported_import(full)
    )


def _from(
    node: cst.ImportFrom, module: str, aliases: list[cst.ImportAlias]
) -> cst.ImportFrom:
    is_whole = len(aliases) == len(node.names)
    if is_whole:
        return node.with_changes(module=name_node(module))
    last = len(aliases) - 1
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    new = [
        alias.with_changes(
            comma=comma if index < last else cst.MaybeSentinel.DEFAULT
        )
        for index, alias in enumerate(aliases)
    ]
    return node.with_changes(
        module=name_node(module), names=new, lpar=None, rpar=None
    )


def _plain(aliases: list[cst.ImportAlias]) -> list[cst.BaseSmallStatement]:
    """Writes `from tensorflow import keras` as `import keras`."""
    statements: list[cst.BaseSmallStatement] = []
    for alias in aliases:
        alias = alias.with_changes(comma=cst.MaybeSentinel.DEFAULT)
        if alias.asname and dotted_name(alias.asname.name) == "keras":
            alias = alias.with_changes(asname=None)
        statements.append(cst.Import([alias]))
    return statements


def finish_imports(code: str, before: Names) -> str:
    """Adds imports to new code, and drops those that it does not use.

    Args:
      code: The file with its other edits, which has placeholders.
      before: The names of the file before.
    """
    aliases = {}
    for module, placeholder in PLACEHOLDERS.items():
        aliases[module] = _choose_alias(module, before)
        code = code.replace(placeholder, aliases[module])
    module = cst.parse_module(code, config=before.module.config_for_parsing)
    names = read_names(module)
    needed = _find_needed(names, aliases)
    edits = Edits()
    _drop_unused(names, before, edits)
    for scope, anchor in _find_anchors(names).items():
        lines = [
            _statement(each, aliases[each])
            for each in ("ks", "jax", "keras")
            if each in needed.get(scope, ())
        ]
        if lines:
            _insert(names, anchor, lines, edits)
    return apply(names, edits).code


def _choose_alias(module: str, names: Names) -> str:
    is_taken = any(
        module in scope.others or module in scope.functions
        for scope in names.scopes
    )
    return f"{module}_module" if is_taken else module


def _statement(module: str, alias: str) -> cst.SimpleStatementLine:
    name = _PACKAGE if module == "ks" else module
    text = f"import {name}" + ("" if alias == name else f" as {alias}")
    line = cst.parse_statement(text)
    return cst.ensure_type(line, cst.SimpleStatementLine)


def _is_ours(node: cst.Import | cst.ImportFrom) -> bool:
    """Returns whether a statement imports Keras or TensorFlow."""
    if isinstance(node, cst.ImportFrom):
        modules = [module_of(node)]
    else:
        modules = [dotted_name(alias.name) or "" for alias in node.names]
    return any(module.split(".")[0] in _FIRST for module in modules)


def _find_anchors(names: Names) -> dict[Scope, cst.CSTNode]:
    """Returns the first import of Keras or TensorFlow in each scope."""
    anchors: dict[Scope, cst.CSTNode] = {}
    for node in names.imports:
        line = names.statement_of(node)
        if _is_ours(node) and isinstance(line, cst.SimpleStatementLine):
            anchors.setdefault(names.scope_of[node], line)
    return anchors


def _find_needed(
    names: Names, aliases: dict[str, str]
) -> dict[Scope, set[str]]:
    """Returns the modules that each scope with an import has to import."""
    anchors = _find_anchors(names)
    needed: dict[Scope, set[str]] = {scope: set() for scope in anchors}
    modules = {alias: module for module, alias in aliases.items()}
    for scope in names.scopes:
        for use in scope.uses:
            root = (dotted_name(use) or "").split(".")[0]
            if root in modules and not _is_bound(names, root, scope):
                home = _find_home(scope, anchors, names.root)
                needed.setdefault(home, set()).add(modules[root])
    for node in names.imports:
        # Who imports Keras needs its backend, which the package chooses.
        scope = names.scope_of[node]
        if _imports_keras(node) and scope in anchors:
            needed[scope].add("ks")
    for scope, modules_of in needed.items():
        if "keras" in modules_of:
            modules_of.add("ks")
        if any(
            normalize(origin) == _PACKAGE
            for each in scope.visible()
            for origins in each.imports.values()
            for origin in origins
        ):
            modules_of.discard("ks")
    if "ks" in needed.get(names.root, ()):
        for scope in needed:
            if scope is not names.root:
                needed[scope].discard("ks")
    return needed


def _imports_keras(node: cst.Import | cst.ImportFrom) -> bool:
    if isinstance(node, cst.ImportFrom):
        return module_of(node).split(".")[0] in _KERAS
    return any(
        (dotted_name(alias.name) or "").split(".")[0] in _KERAS
        for alias in node.names
    )


def _is_bound(names: Names, name: str, scope: Scope) -> bool:
    return any(
        name in each.imports or name in each.others or name in each.functions
        for each in scope.visible()
    )


def _find_home(
    scope: Scope, anchors: dict[Scope, cst.CSTNode], root: Scope
) -> Scope:
    """Returns the scope that is to import a module for code in a scope."""
    if root in anchors:
        return root
    for each in scope.enclosing():
        if each in anchors:
            return each
    return root


def _insert(
    names: Names,
    anchor: cst.CSTNode,
    lines: list[cst.SimpleStatementLine],
    edits: Edits,
) -> None:
    def is_mark(line: cst.EmptyLine) -> bool:
        return bool(line.comment and line.comment.value.startswith(MARK))

    module = names.module
    above = module.header if module.body[0] is anchor else ()
    marks = [line for line in above if is_mark(line)]
    if marks:
        kept = [line for line in above if not is_mark(line)]
        edits.replace(module, lambda node: node.with_changes(header=kept))

    def edit(node: cst.SimpleStatementLine) -> cst.FlattenSentinel:
        moved = [*marks, *filter(is_mark, node.leading_lines)]
        others = [line for line in node.leading_lines if not is_mark(line)]
        first = lines[0].with_changes(leading_lines=others)
        rest = [node.with_changes(leading_lines=moved)] if node.body else []
        return cst.FlattenSentinel([first, *lines[1:], *rest])

    edits.replace(anchor, edit)


def _drop_unused(names: Names, before: Names, edits: Edits) -> None:
    """Drops imports of TensorFlow that only ported code has used."""
    used_before = _find_used(before)
    used = _find_used(names)
    for node in names.imports:
        if isinstance(node.names, cst.ImportStar):
            continue
        dropped = []
        for alias in node.names:
            origin, name = _origin(node, alias)
            was_used = (name, origin) in used_before
            is_used = (name, origin) in used
            if origin.split(".")[0] == "tensorflow" and was_used:
                dropped += [] if is_used else [alias]
        if len(dropped) == len(node.names):
            edits.dropped.add(node)
        elif dropped:
            kept = [alias for alias in node.names if alias not in dropped]
            last = kept[-1]
            edits.dropped.update(dropped)
            edits.replace(
                last,
                lambda part: part.with_changes(comma=cst.MaybeSentinel.DEFAULT),
            )


def _origin(
    node: cst.Import | cst.ImportFrom, alias: cst.ImportAlias
) -> tuple[str, str]:
    """Returns what an import binds: its full name, and the name here."""
    full = dotted_name(alias.name) or ""
    name = full.split(".")[0]
    if isinstance(node, cst.ImportFrom):
        full = f"{module_of(node)}.{full}"
    elif alias.asname is None:
        full = name
    if alias.asname is not None:
        name = dotted_name(alias.asname.name) or ""
    return full, name


def _find_used(names: Names) -> set[tuple[str, str]]:
    """Returns the imported names that are read, with what they refer to."""
    used = set()
    for scope in names.scopes:
        for use in scope.uses:
            root = (dotted_name(use) or "").split(".")[0]
            for each in scope.visible():
                used |= {(root, o) for o in each.imports.get(root, ())}
    return used
