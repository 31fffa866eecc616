"""In which language each function's operations are: TensorFlow's or Keras's.

What datasets map stays TensorFlow. What reaches `run`, a step of a model, a
layer, a loss or a metric becomes `keras.ops`. The functions of several files
are followed together.
"""

import collections
import dataclasses
import enum

import libcst as cst

from keras_strategies.migrate import tables
from keras_strategies.migrate.chains import dotted_name
from keras_strategies.migrate.scopes import Names, Scope

_TF_DATA = "tensorflow.data."
_RUN_METHODS = ("run", "experimental_run_v2", "call_for_each_replica")
_FUNCTION = "tensorflow.function"
_PYTHON_CALLS = frozenset(
    {"tensorflow.py_function", "tensorflow.numpy_function"}
)
_OTHER_RUNNERS = frozenset({"app", "subprocess", "asyncio", "sess", "session"})
_OTHER_MAPS = ("jax.", "keras.", "tensorflow.", "functools.")
_INPUTS = frozenset(
    {"keras.Input", "keras.layers.Input", "keras.engine.input_layer.Input"}
)
_PARTS = ("Model", "Layer", "Loss", "Metric", "Callback", "Regularizer")


class Language(enum.Enum):
    """The language of a function's operations."""

    HOST = "host"
    STEP = "step"
    DATA = "data"
    BOTH = "both"


@dataclasses.dataclass(kw_only=True)
class File:
    """A file of a project, whose functions are followed with the others'.

    Attributes:
      module: Its dotted name as far as it is known: "project.losses".
      names: Its names.
      steps: The functions that certainly are computed in steps.
      data: Those that datasets call.
      around: The functions that call `run`.
      steps_elsewhere: Full names of imported functions that are computed in
        steps.
      data_elsewhere: The same for datasets.
    """

    module: str
    names: Names
    steps: set[Scope] = dataclasses.field(default_factory=set)
    data: set[Scope] = dataclasses.field(default_factory=set)
    around: set[Scope] = dataclasses.field(default_factory=set)
    steps_elsewhere: set[str] = dataclasses.field(default_factory=set)
    data_elsewhere: set[str] = dataclasses.field(default_factory=set)
    symbolic: set[cst.CSTNode] = dataclasses.field(default_factory=set)


def follow(files: list[File]) -> None:
    """Completes each file's `steps` and `data` by what their functions call."""
    for file in files:
        _find_roots(file)
        _find_symbolic(file)
    by_module = collections.defaultdict(list)
    for file in files:
        by_module[file.module.split(".")[-1]].append(file)
    while True:
        before = _count(files)
        for file in files:
            for kind in ("steps", "data"):
                _reach(file, kind)
                for name in getattr(file, f"{kind}_elsewhere"):
                    _enter_elsewhere(name, kind, by_module)
        if _count(files) == before:
            return


def language_of(file: File, scope: Scope) -> Language:
    """Returns the language of the code in a scope."""
    for each in scope.enclosing():
        is_step, is_data = each in file.steps, each in file.data
        if is_step and is_data:
            return Language.BOTH
        if is_step:
            return Language.STEP
        if is_data:
            return Language.DATA
    return Language.HOST


def is_around(file: File, scope: Scope) -> bool:
    """Returns whether code is in a `tf.function` that calls `run`."""
    return any(
        each in file.around and has_decorator(file.names, each, _FUNCTION)
        for each in scope.enclosing()
    )


def has_decorator(names: Names, scope: Scope, full_name: str) -> bool:
    """Returns whether a function has a decorator, with or without arguments."""
    if not isinstance(scope.node, cst.FunctionDef):
        return False
    for each in scope.node.decorators:
        node = each.decorator
        node = node.func if isinstance(node, cst.Call) else node
        if names.full_name(node) in (full_name, _OURS.get(full_name)):
            return True
    return False


_OURS = {_FUNCTION: "keras_strategies.function"}


def _count(files: list[File]) -> int:
    return sum(
        len(f.steps)
        + len(f.data)
        + len(f.steps_elsewhere)
        + len(f.data_elsewhere)
        for f in files
    )


def _find_roots(file: File) -> None:
    for scope in file.names.scopes:
        if isinstance(scope.node, cst.ClassDef) and _is_keras_class(
            file.names, scope
        ):
            file.steps |= {
                method
                for name, method in scope.functions.items()
                if name in tables.WORDS["step_methods"]
            }
        if isinstance(scope.node, cst.FunctionDef):
            _find_root(file, scope)
        for call in scope.calls:
            _read_call(file, scope, call)


def _find_root(file: File, scope: Scope) -> None:
    params = scope.node.params.params
    names = [param.name.value for param in params]
    if {"y_true", "y_pred"} <= set(names):
        file.steps.add(scope)
    if scope.name == "input_fn":
        file.data.add(scope)


def _is_keras_class(names: Names, scope: Scope) -> bool:
    """Returns whether a class inherits from one of Keras, in this file."""
    for base in scope.node.bases:
        text = dotted_name(base.value) or ""
        full = names.full_name(base.value)
        if full is not None and full.split(".")[0] in ("keras", "keras_hub"):
            return True
        if full == "tensorflow.Module":
            return True
        for each in scope.parent.visible() if scope.parent else ():
            other = each.classes.get(text)
            if other is not None and other is not scope:
                return _is_keras_class(names, other)
        # Of another file of the project.
        if text.endswith(_PARTS) and (full or "").split(".")[0] not in (
            "torch",
            "tensorflow",
        ):
            return True
    return False


def _read_call(file: File, scope: Scope, call: cst.Call) -> None:
    names = file.names
    method = (
        call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
    )
    full = names.full_name(call.func) or ""
    is_method = method in tables.WORDS["data_methods"]
    is_data = full.startswith(_TF_DATA) or full in _PYTHON_CALLS
    if is_data or (is_method and not full.startswith(_OTHER_MAPS)):
        _add(file, "data", scope, [arg.value for arg in call.args])
    is_run = method in _RUN_METHODS and _is_run(call, full)
    if is_run and _add(file, "steps", scope, [call.args[0].value]):
        file.around.update(s for s in scope.enclosing() if s.is_function)
    for arg in call.args:
        word = arg.keyword.value if arg.keyword else ""
        if word in tables.WORDS["step_arguments"]:
            _add(file, "steps", scope, _elements(arg.value))
        if word == "input_fn":
            _add(file, "data", scope, [arg.value])
    if full in ("keras.layers.Lambda", "keras.metrics.MeanMetricWrapper"):
        _add(file, "steps", scope, [arg.value for arg in call.args])
    if method in ("merge_call", "add_loss"):
        _add(file, "steps", scope, [arg.value for arg in call.args[:1]])


def _is_run(call: cst.Call, full: str) -> bool:
    receiver = (dotted_name(call.func) or "").split(".")[-2:-1]
    words = set(full.split(".")) | set(receiver)
    return bool(call.args) and not words & _OTHER_RUNNERS


def _elements(node: cst.BaseExpression) -> list[cst.BaseExpression]:
    if isinstance(node, cst.List | cst.Tuple):
        return [v for e in node.elements for v in _elements(e.value)]
    if isinstance(node, cst.Dict):
        return [v for e in node.elements for v in _elements(e.value)]
    return [node]


def _add(
    file: File, kind: str, scope: Scope, values: list[cst.BaseExpression]
) -> bool:
    """Adds the functions that values name; returns whether there are any."""
    found: set[Scope] = getattr(file, kind)
    elsewhere: set[str] = getattr(file, f"{kind}_elsewhere")
    is_function = False
    for value in values:
        if isinstance(value, cst.Call) and value.args:
            # functools.partial(f, ...), tf.function(f), or a function of one.
            value = _unwrap(value)
        if isinstance(value, cst.Lambda):
            inner = [s for s in file.names.scopes if s.node is value]
            found.update(inner)
            is_function = True
            continue
        functions = _functions_of(file.names, scope, value)
        found.update(functions)
        origin = file.names.full_name(value)
        if not functions and origin and not origin.startswith(_LIBRARIES):
            elsewhere.add(origin)
            is_function = True
        is_function |= bool(functions)
    return is_function


_LIBRARIES = ("keras.", "tensorflow.", "jax.", "numpy.", "keras_strategies.")


def _unwrap(call: cst.Call) -> cst.BaseExpression:
    word = (dotted_name(call.func) or "").split(".")[-1]
    return call.args[0].value if word in ("partial", "function") else call.func


def _functions_of(names: Names, scope: Scope, node: cst.CSTNode) -> list[Scope]:
    """Returns the functions of this file that a name or a method is."""
    text = dotted_name(node)
    if text is None:
        return []
    if "." not in text:
        function = names.find_function(text, scope)
        if function is not None:
            return [function]
        for each in scope.visible():
            for targets, value in each.assigned:
                if text in targets and isinstance(value, cst.Lambda):
                    return [s for s in names.scopes if s.node is value]
            if text in each.classes:
                inner = each.classes[text].functions
                return [f for n, f in inner.items() if n != "__init__"]
        return []
    root, _, rest = text.partition(".")
    if names.origin(root, scope) is not None or "." in rest:
        return []
    if root in ("self", "cls"):
        for each in scope.enclosing():
            if rest in each.functions and isinstance(each.node, cst.ClassDef):
                return [each.functions[rest]]
    methods = [
        s.functions[rest]
        for s in names.scopes
        if isinstance(s.node, cst.ClassDef) and rest in s.functions
    ]
    return methods if len(methods) == 1 or root in ("self", "cls") else []


def _reach(file: File, kind: str) -> None:
    """Adds the functions that those of a kind name."""
    found: set[Scope] = getattr(file, kind)
    other = file.data if kind == "steps" else file.steps
    waiting = list(found)
    while waiting:
        scope = waiting.pop()
        for each in _within(file.names, scope):
            if each is not scope and each in other and each not in found:
                continue
            before = set(found)
            _add(file, kind, each, [u for u in each.uses if _is_load(file, u)])
            waiting += found - before


def _is_load(file: File, node: cst.CSTNode) -> bool:
    # A decorator of an inner function is no call of it.
    return not isinstance(file.names.parents.get(node), cst.Decorator)


def _within(names: Names, scope: Scope) -> list[Scope]:
    return [s for s in names.scopes if scope in s.enclosing()]


def _enter_elsewhere(
    name: str, kind: str, by_module: dict[str, list[File]]
) -> None:
    module, _, function = name.rpartition(".")
    for file in by_module.get(module.split(".")[-1], ()):
        own = file.module.split(".")
        parts = [part for part in module.split(".") if part]
        if own[-len(parts) :] == parts[-len(own) :]:
            scope = file.names.root
            if function in scope.functions:
                getattr(file, kind).add(scope.functions[function])


def _find_symbolic(file: File) -> None:
    """Finds operations on the tensors of a functional model.

    Their values come from `keras.Input`, in the scope that calls it.
    """
    names = file.names
    for scope in names.scopes:
        if not any(
            names.full_name(call.func) in _INPUTS for call in scope.calls
        ):
            continue
        tensors: set[str] = set()
        for targets, value in scope.assigned:
            if _mentions(names, value, tensors):
                tensors.update(targets)
        for call in scope.calls:
            if any(_mentions(names, arg.value, tensors) for arg in call.args):
                file.symbolic.add(call)
                _add(file, "steps", scope, [call.func])


class _Mentions(cst.CSTVisitor):
    def __init__(self, names: Names, tensors: set[str]) -> None:
        self.names, self.tensors, self.found = names, tensors, False

    def visit_Name(self, node: cst.Name) -> None:
        self.found |= node.value in self.tensors

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        node.value.visit(self)
        return False

    def visit_Call(self, node: cst.Call) -> None:
        self.found |= self.names.full_name(node.func) in _INPUTS


def _mentions(
    names: Names, node: cst.BaseExpression, tensors: set[str]
) -> bool:
    reader = _Mentions(names, tensors)
    node.visit(reader)
    return reader.found
