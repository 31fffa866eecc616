"""The names of one file: what each refers to, and where functions are used."""

import ast
import re
from collections.abc import Callable

from keras_strategies.migrate.source import Source

_SHARED = re.compile(
    r"^tensorflow(_estimator|\.compat\.v2"
    r"|\.compat\.v1(?=\.(keras|distribute|estimator)\b))(?=\.|$)"
)
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
IMPORTS = ast.Import | ast.ImportFrom
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class Scope:
    """A module, class, function or comprehension, with the names it binds.

    Attributes:
      node: The node; None for the module.
      parent: The enclosing scope.
      inner: The scopes in it.
      imports: The full names of imported names, by name.
      others: The names that are bound otherwise.
      outside: The names that are declared global or nonlocal.
      functions: The functions defined here, by name.
      classes: The classes, likewise.
      uses: The chains of names that the scope reads, but not inner scopes.
      calls: Its calls, likewise.
      assigned: The assigned names and values, in order.
    """

    def __init__(
        self, node: ast.AST | None = None, parent: "Scope | None" = None
    ) -> None:
        self.node, self.parent = node, parent
        self.inner: list[Scope] = []
        self.imports: dict[str, set[str]] = {}
        self.others: set[str] = set()
        self.outside: set[str] = set()
        self.functions: dict[str, Scope] = {}
        self.classes: dict[str, Scope] = {}
        self.uses: list[ast.expr] = []
        self.calls: list[ast.Call] = []
        self.assigned: list[tuple[set[str], ast.expr]] = []

    def enclosing(self) -> "list[Scope]":
        """Returns this scope and those around it, from the innermost."""
        return [self, *(self.parent.enclosing() if self.parent else ())]

    def visible(self) -> "list[Scope]":
        """Returns the scopes whose names code here can read."""
        around, kind = self.enclosing()[1:], ast.ClassDef
        return [self, *(s for s in around if not isinstance(s.node, kind))]

    def within(self) -> "list[Scope]":
        """Returns this scope and all in it."""
        return [self, *(each for i in self.inner for each in i.within())]


class Names:
    """The names of a file.

    Attributes:
      source: The parsed file.
      root: The module's scope.
      scopes: All scopes, by their node.
      scope_of: The scope that each node is in.
      parents: The parent of each node.
      imports: The import statements in their order.
      hidden: The nodes whose place in the text is unknown.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.root = Scope()
        self.scopes: dict[ast.AST | None, Scope] = {None: self.root}
        self.scope_of: dict[ast.AST | None, Scope] = {source.tree: self.root}
        self.parents: dict[ast.AST, ast.AST] = {}
        self.imports: list[ast.Import | ast.ImportFrom] = []
        self.hidden: set[ast.AST] = set()
        self._visit_parts(source.tree, self.root)

    def full_name(self, node: ast.AST | None) -> str:
        """Returns the full name that a chain refers to, or "".

        "tensorflow.keras" is "keras", as for Keras's own imports.
        """
        text = dotted_name(node)
        root, dot, rest = text.partition(".")
        scope = self.scope_of.get(node, self.root)
        origin = root and self.origin(root, scope)
        return normalize(origin + dot + rest) if origin else ""

    def origin(self, name: str, scope: Scope) -> str:
        """Returns the import that a name refers to in a scope, or ""."""
        for each in scope.visible():
            if name in each.imports and name not in each.others:
                found = sorted(each.imports[name])
                ours = [o for o in found if o.split(".")[0] == "tensorflow"]
                return [*ours, *found][0]
            if name in each.others or name in each.functions:
                return ""
        return ""

    def find_uses(
        self, keeps: Callable[[int], bool] = lambda offset: True
    ) -> set[tuple[str, str]]:
        """Returns the names that are read, with the imports they refer to.

        Args:
          keeps: Returns whether to take a name at an offset of the text.
        """
        return {
            (root, origin)
            for scope in self.scopes.values()
            for use in scope.uses
            for root in [dotted_name(use).split(".")[0]]
            if keeps(self.source.span(use)[0])
            for each in scope.visible()
            for origin in each.imports.get(root, {""})
        }

    def ancestors(self, node: ast.AST) -> list[ast.AST]:
        """Returns the nodes around a node, from the innermost."""
        found = [node]
        while (parent := self.parents.get(found[-1])) is not None:
            found.append(parent)
        return found[1:]

    def _visit_parts(
        self, node: ast.AST, scope: Scope, inner: Scope | None = None
    ) -> None:
        """Visits the parts of a node, whose body may be in another scope."""
        for name, value in ast.iter_fields(node):
            place = inner if inner and name in ("body", "args") else scope
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST):
                    self.parents[part] = node
                    self._visit(part, place)

    def _visit(self, node: ast.AST, scope: Scope) -> None:
        self.scope_of[node] = scope
        inner = None
        if isinstance(node, FUNCTIONS | ast.Lambda | ast.ClassDef):
            inner = self._add_scope(node, scope)
        elif isinstance(node, _COMPREHENSIONS):
            scope = self._add_scope(node, scope)
        elif isinstance(node, ast.Call):
            scope.calls.append(node)
        elif isinstance(node, ast.JoinedStr):
            kinds = ast.Call | ast.Attribute | ast.Name
            self.hidden.update(
                each
                for each in ast.walk(node)
                if isinstance(each, kinds) and not self.source.is_located(each)
            )
        else:
            self._bind(node, scope)
        if not isinstance(node, ast.expr) or not dotted_name(node):
            self._visit_parts(node, scope, inner)
            return
        if not isinstance(node, ast.Name) or isinstance(node.ctx, ast.Load):
            scope.uses.append(node)
        while isinstance(node, ast.Attribute):
            self.parents[node.value] = node
            node = node.value
            self.scope_of[node] = scope

    def _add_scope(self, node: ast.AST, scope: Scope) -> Scope:
        inner = self.scopes[node] = Scope(node, scope)
        scope.inner.append(inner)
        if isinstance(node, FUNCTIONS):
            scope.functions[node.name] = inner
        elif isinstance(node, ast.ClassDef):
            scope.classes[node.name] = inner
            scope.others.add(node.name)
        return inner

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        names: set[str] = set()
        if isinstance(node, IMPORTS):
            self.imports.append(node)
            for name, origin in bindings(node):
                scope.imports.setdefault(name, set()).add(origin)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            scope.outside.update(node.names)
        elif isinstance(node, ast.Assign):
            targets = set().union(*map(_targets, node.targets))
            scope.assigned.append((targets, node.value))
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            names = {node.name} if node.name else set()
        elif isinstance(node, ast.arg):
            names = {node.arg}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            # `tf = None`, where the import failed, does not shadow the import.
            value = getattr(self.parents[node], "value", node)
            is_none = isinstance(value, ast.Constant) and value.value is None
            names = set() if is_none else {node.id}
        scope.others |= names - scope.outside


def dotted_name(node: ast.AST | None) -> str:
    """Returns the text of a chain of names, or "" for another node."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted_name(node.value)
        return owner and f"{owner}.{node.attr}"
    return ""


def normalize(name: str) -> str:
    """Returns the full name without the parts that several names share."""
    full = _SHARED.sub("tensorflow", name)
    return re.sub(r"^tensorflow\.keras\b", "keras", full)


def get_module(node: ast.ImportFrom) -> str:
    """Returns the module that a statement imports from, with its dots."""
    return "." * node.level + (node.module or "")


def bindings(node: ast.Import | ast.ImportFrom) -> list[tuple[str, str]]:
    """Returns the names that an import binds, with their full names."""
    if isinstance(node, ast.ImportFrom):
        return [
            (a.asname or a.name, f"{get_module(node)}.{a.name}")
            for a in node.names
        ]
    return [
        (alias.asname, alias.name) if alias.asname else (root, root)
        for alias in node.names
        for root in [alias.name.split(".")[0]]
    ]


def _targets(node: ast.expr) -> set[str]:
    """Returns the names that a target of an assignment binds."""
    if isinstance(node, ast.Tuple | ast.List):
        return set().union(*map(_targets, node.elts))
    return {dotted_name(node)} - {""}
