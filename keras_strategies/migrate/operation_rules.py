"""Calls of TensorFlow's operations that become `keras.ops`."""

import libcst as cst

from keras_strategies.migrate.edits import (
    expression,
    keep_parentheses,
    keyword,
    with_args,
)
from keras_strategies.migrate.languages import Language, language_of
from keras_strategies.migrate.rules import Port, replace_call
from keras_strategies.migrate.tables import (
    BACKEND,
    TF,
    Operation,
    find_operation,
)

_V1 = "compat.v1."
_OLD_WORDS = {
    "reduction_indices": "axis",
    "keep_dims": "keepdims",
    "dim": "axis",
    "dimension": "axis",
    "input_tensor": "input",
}
_RANGE = "range"
_PRINTS = frozenset({"print"})


def port_operation(port: Port, call: cst.Call, full: str) -> bool:
    """Ports a call of an operation; returns whether it was one."""
    name = full.removeprefix(TF).removeprefix(_V1)
    if not full.startswith((TF, BACKEND)):
        return False
    language = port.language(call)
    if language is Language.DATA:
        return False
    if name == _RANGE and _is_loop(port, call):
        return _port_loop(port, call)
    if name == "print":
        is_traced = language_of(port.file, port.scope(call)) is Language.STEP
        return _port_print(port, call, is_step=is_traced)
    if name == "add_n":
        replace_call(port, call, "sum")
        port.edits.replace(call, lambda node: with_args(node, node.args[:1]))
        return True
    operation = find_operation(full)
    is_step = language is Language.STEP or full.startswith(BACKEND)
    if language is Language.BOTH and (operation or name in _SPECIAL):
        _mark_both(port, call)
        return True
    if not is_step:
        return False
    if name in _SPECIAL:
        _SPECIAL[name](port, call)
        return True
    if operation is None:
        return False
    problem = find_problem(call, operation, name)
    if problem is not None:
        port.mark(call, f"`tf.{name}`: {problem}")
        port.claimed.add(call.func)
        return True
    replace_call(port, call, operation.function)
    port.edits.replace(call, lambda node: convert(node, operation))
    return True


def _mark_both(port: Port, call: cst.Call) -> None:
    scope = port.scope(call)
    while scope.parent and not isinstance(scope.node, cst.FunctionDef):
        scope = scope.parent
    port.claimed.add(call.func)
    if scope.node is not None:
        port.mark(
            scope.node,
            f"`{scope.name}` serves a dataset and a step: write one for each",
        )


def _is_loop(port: Port, call: cst.Call) -> bool:
    parent = port.file.names.parents.get(call)
    return isinstance(parent, cst.For | cst.CompFor) and parent.iter is call


def _port_loop(port: Port, call: cst.Call) -> bool:
    replace_call(port, call, "range")
    port.edits.replace(
        call,
        lambda node: with_args(
            node,
            [
                arg.with_changes(keyword=None, equal=cst.MaybeSentinel.DEFAULT)
                for arg in node.args
                if arg.keyword is None or arg.keyword.value not in ("dtype",)
            ],
        ),
    )
    return True


def _port_print(port: Port, call: cst.Call, *, is_step: bool) -> bool:
    def edit(node: cst.Call) -> cst.Call:
        args = [arg for arg in node.args if arg.keyword is None]
        if not is_step:
            return with_args(node, args)
        words, values = [], []
        for arg in args:
            value = arg.value
            if isinstance(value, cst.SimpleString) and not value.prefix:
                text = str(value.evaluated_value)
                words.append(text.replace("{", "{{").replace("}", "}}"))
            else:
                words.append("{}")
                values.append(arg)
        text = cst.Arg(cst.SimpleString(_quote(" ".join(words))))
        return with_args(node, [text, *values])

    replace_call(port, call, "jax.debug.print" if is_step else "print")
    port.edits.replace(call, edit)
    return True


def _quote(text: str) -> str:
    escaped = repr(text)[1:-1].replace('"', '\\"').replace("\\'", "'")
    return f'"{escaped}"'


def _unwrap(port: Port, call: cst.Call) -> None:
    """Replaces a call by its first argument."""
    port.claimed.add(call.func)
    port.edits.replace(
        call, lambda node: keep_parentheses(node, node.args[0].value)
    )


def _port_einsum(port: Port, call: cst.Call) -> None:
    replace_call(port, call, "keras.ops.einsum")


def _port_get_static_value(port: Port, call: cst.Call) -> None:
    port.mark(call, "`tf.get_static_value`: use `x.shape` and Python numbers")


_SPECIAL = {
    "identity": _unwrap,
    "einsum": _port_einsum,
    "linalg.einsum": _port_einsum,
    "get_static_value": _port_get_static_value,
}


def find_problem(call: cst.Call, operation: Operation, name: str) -> str | None:
    """Returns why a call's arguments cannot be ported, or None."""
    for index, arg in enumerate(call.args):
        if arg.star:
            return "its arguments are in a list or dict: write them one by one"
        word = _parameter(arg, index, operation)
        if word is None:
            return f"has no argument `{_word(arg) or index + 1}` in Keras"
        if word == "!":
            return f"Keras has no counterpart of `{_word(arg) or index + 1}`"
        if word == "indices_or_sections" and not _is_number(arg.value):
            return (
                "for sizes, `keras.ops.split` takes the indices between the "
                "parts"
            )
        if word == "mode" and not isinstance(arg.value, cst.SimpleString):
            return "`mode` must be a literal"
        if name.endswith("where") and len(call.args) == 1:
            return "use `keras.ops.nonzero`, or three arguments"
    return None


def _is_number(node: cst.BaseExpression) -> bool:
    if isinstance(node, cst.Name):
        return node.value.lower().startswith(("n", "k"))
    return isinstance(node, cst.Integer)


def _word(arg: cst.Arg) -> str:
    return arg.keyword.value if arg.keyword else ""


def _parameter(arg: cst.Arg, index: int, operation: Operation) -> str | None:
    """Returns Keras's name of an argument; "-" and "!" as in the table."""
    names = operation.tf_parameters
    word = _word(arg)
    if word == "name":
        return "-"
    if not word:
        return operation.parameters[index] if index < len(names) else None
    if word not in names:
        word = _OLD_WORDS.get(word, word)
    if word not in names and word in ("x", "input", "tensor"):
        word = names[0]
    return operation.parameters[names.index(word)] if word in names else None


def convert(call: cst.Call, operation: Operation) -> cst.Call:
    """Returns a call with Keras's arguments."""
    args, given, is_in_order = [], set(), True
    for index, arg in enumerate(call.args):
        word = _parameter(arg, index, operation) or "-"
        if word == "-":
            is_in_order = False
            continue
        given.add(word)
        if word == "mode":
            arg = arg.with_changes(value=_lower(arg.value))
        if arg.keyword is not None:
            arg = arg.with_changes(keyword=cst.Name(word))
        elif not is_in_order or word in operation.by_keyword:
            is_in_order = False
            new = keyword(word, arg.value)
            arg = arg.with_changes(keyword=new.keyword, equal=new.equal)
        args.append(arg)
    word, text = operation.added
    if word and word not in given:
        first = cst.Module([]).code_for_node(args[0].value) if args else ""
        args.append(keyword(word, expression(text.format(first))))
    return with_args(call, args)


def _lower(node: cst.BaseExpression) -> cst.BaseExpression:
    if isinstance(node, cst.SimpleString):
        return cst.SimpleString(node.value.lower())
    return node
