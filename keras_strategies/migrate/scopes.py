"""The names of one file: what each refers to, and where functions are used."""

import dataclasses
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from keras_strategies.migrate.chains import (
    dotted_name,
    list_ancestors,
    module_of,
    normalize,
    target_names,
)

_COMPREHENSIONS = (cst.ListComp, cst.SetComp, cst.DictComp, cst.GeneratorExp)


@dataclasses.dataclass(eq=False, kw_only=True)
class Scope:
    """A module, class, function or comprehension, with the names it binds.

    Attributes:
      node: The node; None for the module.
      parent: The enclosing scope.
      imports: The full names of imported names, by name.
      others: The names that are bound otherwise.
      functions: The functions defined here, by name.
      uses: The chains of names that the scope reads, but not inner scopes.
      calls: Its calls, likewise.
      assigned: The assigned names and values, in order.
    """

    node: cst.CSTNode | None
    parent: "Scope | None"
    imports: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    others: set[str] = dataclasses.field(default_factory=set)
    functions: dict[str, "Scope"] = dataclasses.field(default_factory=dict)
    classes: dict[str, "Scope"] = dataclasses.field(default_factory=dict)
    uses: list[cst.BaseExpression] = dataclasses.field(default_factory=list)
    calls: list[cst.Call] = dataclasses.field(default_factory=list)
    assigned: list[tuple[list[str], cst.BaseExpression]] = dataclasses.field(
        default_factory=list
    )

    @property
    def name(self) -> str:
        """The name of the function or class, or ""."""
        node = self.node
        is_named = isinstance(node, cst.FunctionDef | cst.ClassDef)
        return node.name.value if is_named else ""

    @property
    def is_function(self) -> bool:
        """Whether this is a function or a lambda."""
        return isinstance(self.node, cst.FunctionDef | cst.Lambda)

    def enclosing(self) -> "list[Scope]":
        """Returns this scope and those around it, from the innermost."""
        found, scope = [], self
        while scope is not None:
            found.append(scope)
            scope = scope.parent
        return found

    def visible(self) -> "list[Scope]":
        """Returns the scopes whose names code here can read."""
        return [self] + [
            scope
            for scope in self.enclosing()[1:]
            if not isinstance(scope.node, cst.ClassDef)
        ]


@dataclasses.dataclass(kw_only=True)
class Names:
    """The names of a file.

    Attributes:
      module: The parsed file.
      root: The module's scope.
      scopes: All scopes.
      scope_of: The scope that each use, call, import and statement is in.
      inner: The scope that each function or class makes.
      parents: The parent of each node.
      imports: The import statements in their order.
      wrapper: Resolves positions.
    """

    module: cst.Module
    root: Scope
    scopes: list[Scope]
    scope_of: dict[cst.CSTNode, Scope]
    inner: dict[cst.CSTNode, Scope]
    parents: dict[cst.CSTNode, cst.CSTNode]
    imports: list[cst.Import | cst.ImportFrom]
    wrapper: MetadataWrapper

    def full_name(self, node: cst.CSTNode) -> str | None:
        """Returns the full name that a chain refers to, or None.

        "tensorflow.keras" is "keras", as for Keras's own imports.
        """
        text = dotted_name(node)
        if text is None:
            return None
        root, dot, rest = text.partition(".")
        origin = self.origin(root, self.scope_of.get(node, self.root))
        return None if origin is None else normalize(origin + dot + rest)

    def origin(self, name: str, scope: Scope) -> str | None:
        """Returns the import that a name refers to in a scope, or None."""
        for each in scope.visible():
            if name in each.imports and name not in each.others:
                return _choose(each.imports[name])
            if name in each.others or name in each.functions:
                return None
        return None

    def find_function(self, name: str, scope: Scope) -> Scope | None:
        """Returns the function of this file that a name refers to."""
        for each in scope.visible():
            if name in each.functions:
                return each.functions[name]
        return None

    def statement_of(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Returns the statement that a node is in, which has leading lines."""
        while node is not None and not _has_lines(node):
            node = self.parents.get(node)
        return node

    def line_of(self, node: cst.CSTNode) -> int:
        """Returns the line that a node begins in."""
        positions = self.wrapper.resolve(PositionProvider)
        return positions[node].start.line

    def ancestors(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """Returns the nodes around a node, from the innermost."""
        return list_ancestors(node, self.parents)


def read_names(module: cst.Module) -> Names:
    """Returns the names of a parsed file."""
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    reader = _Reader()
    module.visit(reader)
    return Names(
        module=module,
        root=reader.root,
        scopes=reader.scopes,
        scope_of=reader.scope_of,
        inner=reader.inner,
        parents=reader.parents,
        imports=reader.imports,
        wrapper=wrapper,
    )


def _has_lines(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement)


def _choose(origins: set[str]) -> str:
    """Returns the import of several that is TensorFlow's, if one is."""
    ordered = sorted(origins)
    ours = [o for o in ordered if o.split(".")[0] == "tensorflow"]
    return (ours or ordered)[0]


class _Reader(cst.CSTVisitor):
    """Collects scopes, names and calls in one pass."""

    def __init__(self) -> None:
        self.root = Scope(node=None, parent=None)
        self.scopes = [self.root]
        self.scope_of: dict[cst.CSTNode, Scope] = {}
        self.parents: dict[cst.CSTNode, cst.CSTNode] = {}
        self.imports: list[cst.Import | cst.ImportFrom] = []
        self._scope = self.root
        self._outer: list[Scope] = []
        self.inner: dict[cst.CSTNode, Scope] = {}
        self._stack: list[cst.CSTNode] = []
        self._globals: dict[Scope, set[str]] = {}

    def on_visit(self, node: cst.CSTNode) -> bool:
        if self._stack:
            self.parents[node] = self._stack[-1]
        self._stack.append(node)
        self.scope_of[node] = self._scope
        read = _READERS.get(type(node))
        if read is not None:
            read(self, node)
        return type(node) not in _LEAVES

    def on_leave(self, original_node: cst.CSTNode) -> None:
        self._stack.pop()
        if type(original_node) in _COMPREHENSIONS:
            self._scope = self._outer.pop()

    def on_visit_attribute(self, node: cst.CSTNode, attribute: str) -> None:
        if _is_scoped(node, attribute):
            self._outer.append(self._scope)
            outer = self._scope.parent or self._scope
            self._scope = self.inner.get(node, outer)

    def on_leave_attribute(
        self, original_node: cst.CSTNode, attribute: str
    ) -> None:
        if _is_scoped(original_node, attribute):
            self._scope = self._outer.pop()

    def _add_scope(self, node: cst.CSTNode) -> Scope:
        scope = Scope(node=node, parent=self._scope)
        self.scopes.append(scope)
        self.inner[node] = scope
        return scope

    def _bind(self, names: list[str]) -> None:
        outside = self._globals.get(self._scope, set())
        self._scope.others.update(set(names) - outside)

    def _read_function(self, node: cst.FunctionDef) -> None:
        self._scope.functions[node.name.value] = self._add_scope(node)

    def _read_class(self, node: cst.ClassDef) -> None:
        self._scope.classes[node.name.value] = self._add_scope(node)
        self._bind([node.name.value])

    def _read_lambda(self, node: cst.Lambda) -> None:
        self._add_scope(node)

    def _read_comprehension(self, node: cst.CSTNode) -> None:
        self._outer.append(self._scope)
        self._scope = self._add_scope(node)

    def _read_param(self, node: cst.Param) -> None:
        self._bind([node.name.value])

    def _read_global(self, node: cst.Global | cst.Nonlocal) -> None:
        names = self._globals.setdefault(self._scope, set())
        names.update(item.name.value for item in node.names)

    def _read_target(self, node: Any) -> None:
        self._bind(target_names(node.target))

    def _read_assign(self, node: cst.Assign) -> None:
        names = [n for t in node.targets for n in target_names(t.target)]
        self._scope.assigned.append((names, node.value))
        # `tf = None`, where the import failed, does not shadow the import.
        if dotted_name(node.value) != "None":
            self._bind(names)

    def _read_asname(self, node: cst.AsName) -> None:
        self._bind(target_names(node.name))

    def _read_import(self, node: cst.Import) -> None:
        self.imports.append(node)
        for alias in node.names:
            self.parents[alias] = node
            name = dotted_name(alias.name) or ""
            if alias.asname is not None:
                self._import(_name_of(alias.asname.name), name)
            else:
                root = name.split(".")[0]
                self._import(root, root)

    def _read_import_from(self, node: cst.ImportFrom) -> None:
        self.imports.append(node)
        if isinstance(node.names, cst.ImportStar):
            return
        for alias in node.names:
            self.parents[alias] = node
            name = _name_of(alias.name)
            asname = _name_of(alias.asname.name) if alias.asname else name
            self._import(asname, f"{module_of(node)}.{name}")

    def _import(self, name: str, origin: str) -> None:
        self._scope.imports.setdefault(name, set()).add(origin)

    def _read_call(self, node: cst.Call) -> None:
        self._scope.calls.append(node)

    def _read_chain(self, node: cst.Attribute | cst.Name) -> None:
        parent = self._stack[-2] if len(self._stack) > 1 else None
        is_part = isinstance(parent, cst.Attribute) and (
            parent.attr is node or dotted_name(parent) is not None
        )
        if is_part or dotted_name(node) is None or _is_bare_name(parent, node):
            return
        self._scope.uses.append(node)


def _name_of(node: cst.CSTNode) -> str:
    return dotted_name(node) or ""


def _is_scoped(node: cst.CSTNode, attribute: str) -> bool:
    """Returns whether a part of a node is in another scope than the node."""
    return attribute in _SCOPED.get(type(node), ())


def _is_bare_name(parent: cst.CSTNode | None, node: cst.CSTNode) -> bool:
    """Returns whether a name binds a name or is a keyword."""
    if isinstance(parent, cst.Arg):
        return parent.keyword is node
    if isinstance(parent, _TARGETED):
        return parent.target is node and isinstance(node, cst.Name)
    is_name = isinstance(parent, _NAMED)
    return is_name and getattr(parent, "name", None) is node


_TARGETED = (
    cst.AssignTarget,
    cst.For,
    cst.CompFor,
    cst.AugAssign,
    cst.AnnAssign,
    cst.NamedExpr,
)
_NAMED = (cst.Param, cst.FunctionDef, cst.ClassDef, cst.AsName, cst.NameItem)
_SCOPED = {
    cst.FunctionDef: ("params", "body"),
    cst.Lambda: ("params", "body"),
    cst.ClassDef: ("body",),
    cst.Param: ("default", "annotation"),
}
# Nothing in them is read.
_LEAVES = frozenset(
    {
        cst.Import,
        cst.ImportFrom,
        cst.SimpleWhitespace,
        cst.ParenthesizedWhitespace,
        cst.TrailingWhitespace,
        cst.EmptyLine,
        cst.Comma,
        cst.Dot,
        cst.SimpleString,
    }
)
_READERS = {
    cst.Name: _Reader._read_chain,
    cst.Attribute: _Reader._read_chain,
    cst.Call: _Reader._read_call,
    cst.FunctionDef: _Reader._read_function,
    cst.ClassDef: _Reader._read_class,
    cst.Lambda: _Reader._read_lambda,
    cst.Param: _Reader._read_param,
    cst.Global: _Reader._read_global,
    cst.Nonlocal: _Reader._read_global,
    cst.Assign: _Reader._read_assign,
    cst.AsName: _Reader._read_asname,
    cst.Import: _Reader._read_import,
    cst.ImportFrom: _Reader._read_import_from,
    **dict.fromkeys(_COMPREHENSIONS, _Reader._read_comprehension),
    **dict.fromkeys(_TARGETED[1:], _Reader._read_target),
}
