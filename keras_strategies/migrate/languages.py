"""In which language each function's operations are: TensorFlow's or Keras's.

What datasets map stays TensorFlow. What reaches `run`, a step of a model, a
layer, a loss or a metric becomes `keras.ops`. The functions of several files
are followed together.
"""

import ast
import collections
import enum
import itertools
from collections.abc import Iterable

from keras_strategies.migrate.scopes import (
    FUNCTIONS,
    Names,
    Scope,
    dotted_name,
)
from keras_strategies.migrate.tables import WORDS

_RUN_METHODS = ("run", "experimental_run_v2", "call_for_each_replica")
_TF_FUNCTIONS = ("tensorflow.function", "keras_strategies.function")
_LIBRARIES = ("keras.", "tensorflow.", "jax.", "numpy.", "keras_strategies.")


class Language(enum.Flag):
    """The language of a function's operations; both, if it serves both."""

    HOST = 0
    STEP = enum.auto()
    DATA = enum.auto()
    BOTH = STEP | DATA


class File:
    """A file of a project, whose functions are followed with the others'.

    Attributes:
      module: Its dotted name as far as it is known: "project.losses".
      names: Its names.
      found: The functions that certainly are computed in steps, and those that
        datasets call.
      elsewhere: The full names of imported functions that are, likewise.
      around: The `tf.function`s that call `run`.
      symbolic: The calls with tensors of a functional model.
    """

    def __init__(self, *, module: str, names: Names) -> None:
        self.module, self.names = module, names
        self.found: dict[Language, set[Scope]] = {k: set() for k in Language}
        self.elsewhere: dict[Language, set[str]] = {k: set() for k in Language}
        self.around: set[Scope] = set()
        self.symbolic: set[ast.AST] = set()

    def get_language(self, scope: Scope) -> Language:
        """Returns the language of the code in a scope."""
        for each in scope.enclosing():
            found = [kind for kind in self.found if each in self.found[kind]]
            if found:
                return found[0] | found[-1]
        return Language.HOST

    def count(self) -> int:
        """Returns how many functions are known."""
        return sum(map(len, [*self.found.values(), *self.elsewhere.values()]))


def follow(files: list[File]) -> None:
    """Completes what each file's functions are by what they call."""
    by_name = collections.defaultdict(list)
    for file in files:
        for scope in file.names.scopes.values():
            _find_roots(file, scope)
            _find_symbolic(file, scope)
        for name, scope in file.names.root.functions.items():
            by_name[name].append((f".{file.module}.{name}", file, scope))
    count = -1
    while count != (count := sum(file.count() for file in files)):
        for file, kind in itertools.product(files, Language):
            _reach(file, kind)
            for name in file.elsewhere[kind]:
                name = f".{name.lstrip('.')}"
                for full, other, scope in by_name[name.rpartition(".")[2]]:
                    if full.endswith(name) or name.endswith(full):
                        other.found[kind].add(scope)


def _find_roots(file: File, scope: Scope) -> None:
    node = scope.node
    if isinstance(node, ast.ClassDef) and _is_keras_class(file.names, scope):
        names = WORDS["step_methods"] & scope.functions.keys()
        file.found[Language.STEP] |= {scope.functions[name] for name in names}
    if isinstance(node, FUNCTIONS):
        if {"y_true", "y_pred"} <= {arg.arg for arg in node.args.args}:
            file.found[Language.STEP].add(scope)
        if node.name == "input_fn":
            file.found[Language.DATA].add(scope)
    for call in scope.calls:
        _read_call(file, scope, call)


def _is_keras_class(names: Names, scope: Scope, *inner: Scope) -> bool:
    """Returns whether a class inherits from one of Keras, in this file."""
    for base in getattr(scope.node, "bases", ()):
        text, full = dotted_name(base), names.full_name(base)
        root = full.split(".")[0]
        if root in ("keras", "keras_hub") or full == "tensorflow.Module":
            return True
        for each in scope.parent.visible() if scope.parent else ():
            other = each.classes.get(text, scope)
            if other not in (scope, *inner):
                return _is_keras_class(names, other, scope, *inner)
        # Of another file of the project.
        is_part = text.endswith(tuple(WORDS["parts"]))
        if is_part and root not in ("torch", "tensorflow"):
            return True
    return False


def _read_call(file: File, scope: Scope, call: ast.Call) -> None:
    """Finds the functions that a call computes in steps or in datasets."""
    full = file.names.full_name(call.func)
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    values = get_values(call)
    is_other = full.startswith(("jax.", "keras.", "tensorflow.", "functools."))
    is_data = method in WORDS["data_methods"] and not is_other
    is_data |= full.startswith("tensorflow.data.")
    if is_data or full in WORDS["python_calls"]:
        _add(file, Language.DATA, scope, values)
    owners = {*full.split("."), *dotted_name(call.func).split(".")[-2:-1]}
    is_run = method in _RUN_METHODS and not owners & WORDS["other_runners"]
    named = [word.value for word in call.keywords if word.arg == "fn"]
    if is_run and _add(file, Language.STEP, scope, named or call.args[:1]):
        for each in scope.enclosing():
            for node in getattr(each.node, "decorator_list", ()):
                name = file.names.full_name(getattr(node, "func", node))
                file.around |= {each} if name in _TF_FUNCTIONS else set()
    for word in call.keywords:
        if word.arg in WORDS["step_arguments"]:
            _add(file, Language.STEP, scope, _elements(word.value))
        if word.arg == "input_fn":
            _add(file, Language.DATA, scope, [word.value])
    if full in WORDS["step_calls"]:
        _add(file, Language.STEP, scope, values)
    if method in ("merge_call", "add_loss"):
        _add(file, Language.STEP, scope, call.args[:1])


def get_values(call: ast.Call) -> list[ast.expr]:
    """Returns the values of a call's arguments."""
    return [*call.args, *(word.value for word in call.keywords)]


def _elements(node: ast.expr) -> list[ast.expr]:
    parts = getattr(node, "elts", ()) or getattr(node, "values", ())
    return [each for part in parts for each in _elements(part)] or [node]


def _add(
    file: File, kind: Language, scope: Scope, values: Iterable[ast.expr]
) -> bool:
    """Adds the functions that values name; returns whether there are any."""
    is_function = False
    for value in values:
        if isinstance(value, ast.Call) and value.args:
            # functools.partial(f, ...), tf.function(f), or a function of one.
            word = dotted_name(value.func).split(".")[-1]
            is_wrapper = word in ("partial", "function")
            value = value.args[0] if is_wrapper else value.func
        functions = find_functions(file.names, scope, value)
        origin = file.names.full_name(value)
        is_known = origin.startswith(_LIBRARIES)
        if not functions and origin and not is_known:
            file.elsewhere[kind].add(origin)
        file.found[kind].update(functions)
        is_function |= bool(functions) or bool(origin and not is_known)
    return is_function


def find_functions(names: Names, scope: Scope, node: ast.AST) -> list[Scope]:
    """Returns the functions of this file that a name or a method is."""
    if isinstance(node, ast.Lambda):
        return [names.scopes[node]]
    root, _, rest = dotted_name(node).partition(".")
    if not rest:
        for each in scope.visible():
            if root in each.functions:
                return [each.functions[root]]
            for targets, value in each.assigned:
                if root in targets and isinstance(value, ast.Lambda):
                    return [names.scopes[value]]
            if root in each.classes:
                inner = each.classes[root].functions
                return [f for n, f in inner.items() if n != "__init__"]
        return []
    if names.origin(root, scope) or "." in rest:
        return []
    is_self = root in ("self", "cls")
    classes = [
        each
        for each in names.scopes.values()
        if isinstance(each.node, ast.ClassDef) and rest in each.functions
    ]
    around = set(scope.enclosing() if is_self else ())
    chosen = [each for each in classes if each in around][-1:] or classes
    is_known = is_self or len(chosen) == 1
    return [each.functions[rest] for each in chosen] if is_known else []


def _reach(file: File, kind: Language) -> None:
    """Adds the functions that those of a kind name."""
    found, other = file.found[kind], file.found[Language.BOTH ^ kind]
    waiting = list(found)
    while waiting:
        scope = waiting.pop()
        for each in scope.within():
            if each is not scope and each in other and each not in found:
                continue
            before = set(found)
            # A decorator of an inner function is no call of it.
            uses = [u for u in each.uses if not is_decorator(file.names, u)]
            _add(file, kind, each, uses)
            waiting += found - before


def is_decorator(names: Names, node: ast.AST) -> bool:
    """Returns whether a node decorates a function or a class."""
    decorators = getattr(names.parents.get(node), "decorator_list", ())
    return any(node is each for each in decorators)


def _find_symbolic(file: File, scope: Scope) -> None:
    """Finds operations on the tensors of a functional model.

    Their values come from `keras.Input`, in the scope that calls it.
    """
    full_name, inputs = file.names.full_name, WORDS["inputs"]
    if not any(full_name(call.func) in inputs for call in scope.calls):
        return
    tensors: set[str] = set()

    def is_symbolic(value: ast.expr) -> bool:
        return any(
            (isinstance(node, ast.Name) and node.id in tensors)
            or (isinstance(node, ast.Call) and full_name(node.func) in inputs)
            for node in ast.walk(value)
        )

    for targets, value in scope.assigned:
        if is_symbolic(value):
            tensors |= targets
    for call in scope.calls:
        if any(map(is_symbolic, get_values(call))):
            file.symbolic.add(call)
            _add(file, Language.STEP, scope, [call.func])
