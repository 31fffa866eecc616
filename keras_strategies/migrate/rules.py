"""The port of one file: which rule applies to each name and call."""

import dataclasses

import libcst as cst

from keras_strategies.migrate import tables
from keras_strategies.migrate.chains import dotted_name, normalize
from keras_strategies.migrate.edits import (
    Edits,
    expression,
    keep_parentheses,
)
from keras_strategies.migrate.languages import (
    File,
    Language,
    is_around,
    language_of,
)
from keras_strategies.migrate.scopes import Scope
from keras_strategies.migrate.tables import BACKEND, TF, find_operation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Left:
    """A line that is left to a person.

    Attributes:
      line: The line number in the original file.
      text: What is left, and the way out.
    """

    line: int
    text: str


@dataclasses.dataclass(kw_only=True)
class Port:
    """The edits of a file, as rules add them.

    Attributes:
      file: The file.
      edits: Its edits.
      left: The lines that are left.
      claimed: The nodes that a rule has decided about.
    """

    file: File
    edits: Edits = dataclasses.field(default_factory=Edits)
    left: list[Left] = dataclasses.field(default_factory=list)
    claimed: set[cst.CSTNode] = dataclasses.field(default_factory=set)

    def full_name(self, node: cst.CSTNode) -> str:
        """Returns the full name of a chain, or ""."""
        return self.file.names.full_name(node) or ""

    def scope(self, node: cst.CSTNode) -> Scope:
        """Returns the scope that a node is in; of a decorator, its function."""
        names = self.file.names
        for each in [node, *names.ancestors(node)[:3]]:
            if isinstance(each, cst.Decorator):
                return names.inner[names.parents[each]]
        return names.scope_of[node]

    def language(self, node: cst.CSTNode) -> Language:
        """Returns the language of the code that a node is in."""
        language = language_of(self.file, self.scope(node))
        if language is not Language.HOST:
            return language
        if is_around(self.file, self.scope(node)):
            return Language.STEP
        around = [node, *self.file.names.ancestors(node)]
        is_symbolic = any(each in self.file.symbolic for each in around)
        return Language.STEP if is_symbolic else Language.HOST

    def is_step(self, node: cst.CSTNode) -> bool:
        """Returns whether operations here become those of `keras.ops`."""
        return self.language(node) is Language.STEP

    def mark(self, node: cst.CSTNode, text: str) -> None:
        """Leaves the line of a node, with a comment and a row."""
        statement = self.file.names.statement_of(node)
        self.claimed.add(node)
        if statement is None:
            return
        line = self.file.names.line_of(node)
        left = Left(line=line, text=text)
        if left not in self.left:
            self.left.append(left)
            self.edits.mark(statement, text)

    def rename(self, node: cst.CSTNode, text: str) -> None:
        """Replaces a name by another expression."""
        self.claimed.add(node)
        self.edits.replace(
            node, lambda updated: keep_parentheses(updated, expression(text))
        )

    def claim_uses(self, node: cst.CSTNode) -> None:
        """Claims the names in a part that is replaced or removed."""
        names = self.file.names
        self.claimed.update(
            use
            for scope in names.scopes
            for use in scope.uses
            if node is use or node in names.ancestors(use)
        )

    def drop(self, statement: cst.CSTNode) -> None:
        """Removes a simple statement."""
        self.edits.dropped.add(statement)


def port_use(port: Port, node: cst.CSTNode) -> None:
    """Ports a chain of names that no rule of its call has ported."""
    full = port.full_name(node)
    if full.split(".")[0] not in ("tensorflow", "keras"):
        return
    if node in port.claimed or _port_dtype(port, node, full):
        return
    found = find_replacement(full)
    if found is not None:
        prefix, text, is_mark = found
        if is_mark:
            port.mark(node, f"`{_short(prefix)}` {text}")
        else:
            _replace_prefix(port, node, full, prefix, text)
        return
    if full.startswith(BACKEND) and _port_function(port, node, full):
        return
    if full.split(".")[0] == "keras":
        _port_keras(port, node, full)
        return
    _port_tensorflow(port, node, full)


def find_replacement(full: str) -> tuple[str, str, bool] | None:
    """Finds the longest beginning of a name that a table has.

    Returns:
      The beginning, its text, and whether it is left; None if no table has it.
    """
    words = full.split(".")
    for count in range(len(words), 0, -1):
        prefix = ".".join(words[:count])
        if prefix in tables.RENAMED:
            return prefix, tables.RENAMED[prefix], False
        if prefix in tables.MARKED and not _is_module(full):
            return prefix, tables.MARKED[prefix], True
    return None


def _is_module(full: str) -> bool:
    return full in ("tensorflow.distribute", "tensorflow.estimator")


def _short(full: str) -> str:
    return "tf." + full.removeprefix(TF) if full.startswith(TF) else full


def _replace_prefix(
    port: Port, node: cst.CSTNode, full: str, prefix: str, text: str
) -> None:
    if port.language(node) is Language.DATA and prefix in (
        "tensorflow.function",
        "tensorflow.GradientTape",
    ):
        return
    if _is_imported_as_it_is(port, node, full, prefix, text):
        return
    rest = full[len(prefix) :]
    count = rest.count(".")
    inner = node
    for _ in range(count):
        inner = inner.value
    port.claimed.add(node)
    port.rename(inner, text)


def _is_imported_as_it_is(
    port: Port, node: cst.CSTNode, full: str, prefix: str, text: str
) -> bool:
    """Returns whether the import of a name is ported, and the name stays."""
    root = (dotted_name(node) or "").split(".")[0]
    origin = port.file.names.origin(root, port.scope(node)) or ""
    if not is_ported_import(normalize(origin)):
        return False
    port.claimed.add(node)
    return True


def is_ported_import(origin: str) -> bool:
    """Returns whether `from ... import X` of a full name stays, ported."""
    found = find_replacement(origin)
    if found is None or found[2]:
        return False
    prefix, text, _ = found
    target = text + origin[len(prefix) :]
    is_name = target.rpartition(".")[2] == origin.rpartition(".")[2]
    return is_name and text[0] not in "\"'" and "." in target


def _port_dtype(port: Port, node: cst.CSTNode, full: str) -> bool:
    name = full.removeprefix(TF).removeprefix("dtypes.")
    if (
        full.startswith(TF)
        and name in tables.WORDS["dtypes"]
        and port.is_step(node)
    ):
        port.rename(node, f'"{name}"')
        return True
    if full == "tensorflow.newaxis" and port.is_step(node):
        port.rename(node, "None")
        return True
    return False


def _port_function(port: Port, node: cst.CSTNode, full: str) -> bool:
    """Ports an operation that is passed on as a function."""
    operation = find_operation(full)
    is_plain = operation is not None and len(operation.parameters) == 1
    if not is_plain or port.language(node) is Language.DATA:
        return False
    port.rename(node, operation.function)
    return True


def _port_keras(port: Port, node: cst.CSTNode, full: str) -> None:
    if (
        full.startswith(BACKEND)
        and full.split(".")[2] not in tables.WORDS["backend"]
    ):
        if port.language(node) is not Language.DATA:
            port.mark(node, f"`{full}` is not in Keras 3: use `keras.ops`")
        return
    text = dotted_name(node) or ""
    root = text.split(".")[0]
    origin = port.file.names.origin(root, port.scope(node)) or ""
    if origin in ("tensorflow", "tensorflow.compat.v1", "tensorflow.compat.v2"):
        inner, rest = node, full.split(".")[1:]
        for _ in rest:
            inner = inner.value
        port.claimed.add(node)
        port.rename(inner, "keras")


def _port_tensorflow(port: Port, node: cst.CSTNode, full: str) -> None:
    name = full.removeprefix(TF)
    if name.startswith("nn.") and _port_function(port, node, full):
        return
    if not port.is_step(node) or name.split(".")[0] in tables.WORDS["kept"]:
        return
    if _is_annotation(port, node):
        return
    for prefix, text in tables.MARKED_IN_STEPS.items():
        if f"{full}.".startswith(f"{prefix}."):
            port.mark(node, f"`{_short(prefix)}`: {text}")
            return
    if _port_function(port, node, full):
        return
    if "." in full:
        port.mark(node, f"`{_short(full)}` has no known counterpart here")


def _is_annotation(port: Port, node: cst.CSTNode) -> bool:
    around = port.file.names.ancestors(node)
    return any(isinstance(each, cst.Annotation) for each in around)


def replace_call(port: Port, call: cst.Call, function: str) -> None:
    """Claims the function of a call, and names another one."""
    port.claimed.add(call.func)
    port.edits.replace(
        call.func,
        lambda updated: keep_parentheses(updated, expression(function)),
    )
