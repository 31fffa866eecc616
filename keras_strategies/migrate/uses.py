"""Names that no rule of a call has ported."""

import ast

from keras_strategies.migrate import tables
from keras_strategies.migrate.languages import Language
from keras_strategies.migrate.port import Port
from keras_strategies.migrate.scopes import dotted_name, normalize
from keras_strategies.migrate.tables import BACKEND, TF, WORDS, find_replacement

_SHORT_DTYPES = {"int64": "int32", "float64": "float32"}
_TAPE = "tensorflow.GradientTape"
_KEPT = WORDS["kept"] | {""}
_IN_DATASETS = tuple(map(TF.__add__, WORDS["datasets"]))
_TF_ROOTS = ("tensorflow", "tensorflow.compat.v1", "tensorflow.compat.v2")


def port_use(port: Port, node: ast.expr) -> None:
    """Ports a chain of names."""
    _port_learning_rate(port, node)
    _mark_values(port, node)
    full = port.full_name(node)
    root = full.split(".")[0]
    if root not in WORDS["roots"] or node in port.claimed:
        return
    is_step = port.is_step(node)
    if is_step and _port_value(port, node, full):
        return
    found = find_replacement(full, is_step=is_step)
    if found is None or (full.startswith(BACKEND) and not found[2]):
        _port_other(port, node, full)
        return
    prefix, text, is_mark = found
    is_kept = port.language(node) is Language.DATA and prefix in _IN_DATASETS
    if is_mark:
        port.mark(node, f"`{tables.short(prefix)}` {text}")
    elif not is_kept and not is_ported_import(normalize(_origin(port, node))):
        if prefix == _TAPE and not port.language(node):
            port.mark(port.names.parents[node], tables.TEXTS["tape"])
        _replace_prefix(port, node, full[len(prefix) :].count("."), text)


def is_ported_import(origin: str) -> bool:
    """Returns whether `from ... import X` of a full name stays, ported."""
    prefix, text, is_mark = find_replacement(origin) or ("", "", True)
    target = text + origin[len(prefix) :]
    is_name = target.rpartition(".")[2] == origin.rpartition(".")[2]
    return not is_mark and is_name and "." in target


def _origin(port: Port, node: ast.AST) -> str:
    """Returns the full name of the import that a chain begins with."""
    root = dotted_name(node).split(".")[0]
    return port.names.origin(root, port.names.scope_of[node])


def _replace_prefix(port: Port, node: ast.expr, count: int, text: str) -> None:
    """Replaces a chain without its last names."""
    port.claimed.add(node)
    for _ in range(count):
        assert isinstance(node, ast.Attribute)
        node = node.value
    port.replace(node, text)


def _port_learning_rate(port: Port, node: ast.AST) -> None:
    """Writes `optimizer.lr` in full."""
    while isinstance(node, ast.Attribute):
        owner = dotted_name(node.value).rpartition(".")[2].lower()
        if node.attr == "lr" and owner.endswith(tuple(WORDS["optimizers"])):
            end = port.source.span(node)[1]
            port.edit(node, (end - 2, end), ["learning_rate"])
        node = node.value


def _mark_values(port: Port, node: ast.expr) -> None:
    """Marks `.values` of distributed values in functions given to `run`."""
    text, parent = dotted_name(node), port.names.parents[node]
    is_value = text.endswith(".values") and not text.startswith("self.")
    is_value &= getattr(parent, "func", None) is not node
    if is_value and port.file.get_language(port.scope(node)) is Language.STEP:
        port.mark(node, tables.TEXTS["values"])


def _port_value(port: Port, node: ast.expr, full: str) -> bool:
    """Ports a dtype."""
    name = full.removeprefix(TF).removeprefix("dtypes.")
    if not full.startswith(TF) or name not in WORDS["dtypes"]:
        return False
    around = port.names.ancestors(node)
    calls = (port.full_name(getattr(each, "func", None)) for each in around)
    if any(call.endswith(".Variable") for call in calls):
        name = _SHORT_DTYPES.get(name, name)
    port.replace(node, f'"{name}"')
    return True


def _port_other(port: Port, node: ast.expr, full: str) -> None:
    language = port.language(node)
    rule = tables.find_operation(full)
    if language is Language.DATA and not full.startswith("keras."):
        return
    is_step, is_backend = language is Language.STEP, full.startswith(BACKEND)
    if (is_step or is_backend) and rule is not None and len(rule.new) == 1:
        port.replace(node, rule.function)
    elif is_backend and full.split(".")[2] not in WORDS["backend"]:
        port.mark(node, f"`{full}` is not in Keras 3: use `keras.ops`")
    elif full.startswith("keras"):
        if _origin(port, node) in _TF_ROOTS:
            _replace_prefix(port, node, full.count("."), "keras")
    elif is_step and full.partition(".")[2].split(".")[0] not in _KEPT:
        text = "has no known counterpart here"
        port.mark(node, f"`{tables.short(full)}` {text}")
