"""Calls that need more than a table, by the kinds of names.toml."""

import ast
import builtins
import json
import re
from typing import Any

from keras_strategies.migrate.languages import Language, find_functions
from keras_strategies.migrate.port import Port
from keras_strategies.migrate.scopes import dotted_name
from keras_strategies.migrate.tables import ENDINGS, TEXTS, WORDS

# `[X(), X()]`, `[X()] * n` and `[X() for _ in range(n)]`.
_SPLIT = r"\[((?:[\w.]+\(\),? ?)+)(?:for \w+ in range\((\w+)\))?\](?: \* (.+))?"
# How far the values of names are followed.
_MAX_STEPS = 8
# The first parameters of Keras 2's `add_weight`.
_WEIGHT = ("name", "shape", "dtype", "initializer", "regularizer", "trainable")


def port_devices(port: Port, call: ast.Call) -> None:
    """Writes a list of TensorFlow's devices as one of JAX's."""
    args = port.source.arguments(call)
    kind = getattr(args[0].value, "value", None) if args else ""
    uses = (use for scope in port.names.scopes.values() for use in scope.uses)
    if any("MultiWorkerMirroredStrategy" in dotted_name(use) for use in uses):
        port.mark(call, TEXTS["devices_of_workers"])
    elif not isinstance(kind, str):
        port.mark(call, TEXTS["devices"])
    elif kind.upper() in ("", "CPU"):
        port.replace(call, 'jax.devices("cpu")' if kind else "jax.devices()")
    else:
        test = f'device.platform == "{kind.lower()}"'
        port.replace(call, f"[device for device in jax.devices() if {test}]")


def port_split(port: Port, call: ast.Call) -> None:
    """Writes virtual devices as JAX's, if they have no limit of memory."""
    code = ast.unparse(call.args[-1]) if call.args else ""
    match = re.fullmatch(_SPLIT, code)
    if match is None:
        port.mark(call, TEXTS["split"])
        return
    number = str(match[1].count("()"))
    factors = filter(None, [number, match[2], match[3]])
    count = " * ".join(factors).removeprefix("1 * ")
    port.replace(call, f'jax.config.update("jax_num_cpu_devices", {count})')


def port_variable(port: Port, call: ast.Call) -> None:
    """Makes a whole number an int32 that is not trained."""
    args = port.source.arguments(call)
    words = {arg.word: arg.value for arg in args}
    is_float = "float" in port.full_name(words.get("dtype"))
    value = getattr(args[0].value, "value", None) if args else None
    port.file.symbolic.add(call)
    if type(value) is int and not is_float:
        if "dtype" not in words:
            port.add_argument(call, "dtype", '"int32"')
        if "trainable" not in words and (len(args) < 2 or args[1].word):
            port.add_argument(call, "trainable", "False")


def port_range(port: Port, call: ast.Call) -> None:
    """Writes a loop over `tf.range` as Python's."""
    is_loop = getattr(port.names.parents[call], "iter", None) is call
    if is_loop and not call.keywords:
        port.replace(call.func, "range")


def port_print(port: Port, call: ast.Call) -> None:
    """Writes `tf.print` as JAX's in steps, and as Python's around them."""
    args = port.source.arguments(call)
    is_step = port.file.get_language(port.scope(call)) is Language.STEP
    port.replace(call.func, "jax.debug.print" if is_step else "print")
    if not is_step:
        port.drop_arguments(call, [arg for arg in args if arg.word])
    words, values = [], []
    for arg in args:
        value = getattr(arg.value, "value", None)
        if not arg.word and isinstance(value, str):
            words.append(re.sub("([{}])", r"\1\1", value))
        elif not arg.word:
            words.append("{}")
            values += [", ", arg.span]
    if is_step and args:
        text = json.dumps(" ".join(words), ensure_ascii=False)
        span = (args[0].span[0], args[-1].span[1])
        port.edit(call, span, [text, *values])


def port_left(port: Port, call: ast.Call) -> None:
    """Marks a method that Keras 3 lacks: `minimize` of an optimizer."""
    func: Any = call.func
    owner = dotted_name(func.value).lower()
    if func.attr != "minimize" or owner.endswith(tuple(WORDS["optimizers"])):
        port.mark(call, TEXTS[func.attr])


def port_training(port: Port, call: ast.Call) -> None:
    """Passes `training` to a layer by keyword, as Keras 3 asks."""
    last = port.source.arguments(call)[len(call.args) - 1]
    functions = find_functions(port.names, port.scope(call), call.func)
    name = getattr(call.func, "attr", dotted_name(call.func))
    is_other = name == "call" or hasattr(builtins, name)
    if functions or is_other or port.full_name(call.func):
        return
    if dotted_name(last.value) == "training":
        port.edit(call, (last.start, last.start), ["training="])
    else:
        port.mark(call, TEXTS["training"])


def port_path(port: Port, call: ast.Call) -> None:
    """Adds the ending that Keras 3 asks for to the literal name of a file."""
    *owners, name = dotted_name(call.func).lower().split(".")
    args = port.source.arguments(call)
    words = {arg.word: arg.value for arg in args}
    is_model = any("model" in word or word == "self" for word in owners)
    is_keras = port.full_name(call.func).startswith("keras.")
    kind = "weights" if name.endswith("_weights") else "save"
    if ast.unparse(words.get("save_weights_only", call)) == "True":
        kind = "checkpoint"
    if kind == "save" and not is_model and not is_keras:
        return
    places = [arg.value for arg in args if not arg.word]
    value = words.get("filepath") or [*places, call, call][name == "save_model"]
    value = _find_end(port, value)
    code = port.source.code(value)
    match = re.fullmatch(r"""([bfru]*['"]+)(.*?)(['"]+)""", code, re.S)
    if match is None and value is not call and "load" not in name:
        port.mark(call, TEXTS["path"])
    if match is None or match[2].endswith(tuple(ENDINGS[kind])):
        return
    body = re.sub(r"(\.h5|\.hdf5|\.ckpt|\.tf|/+)$", "", match[2])
    span = port.source.span(value)
    port.edit(value, span, [match[1] + body + ENDINGS[kind][0] + match[3]])


def _find_end(port: Port, value: ast.expr) -> ast.expr:
    """Returns the expression that the text of a path ends with."""
    for _ in range(_MAX_STEPS):
        name, scopes = dotted_name(value), list(port.names.scopes.values())
        if isinstance(value, ast.Name):
            visible = port.names.scope_of[value].visible()
            scopes = [each for each in visible if name in each.others][:1]
        found = [v for s in scopes for names, v in s.assigned if name in names]
        if isinstance(value, ast.BinOp):
            is_format = isinstance(value.op, ast.Mod)
            value = value.left if is_format else value.right
        elif isinstance(value, ast.Call) and value.args:
            is_join = getattr(value.func, "attr", "") == "join"
            value = value.args[-1] if is_join else value
        elif len(found) == 1:
            value = found[0]
    return value


def port_weight(port: Port, call: ast.Call) -> None:
    """Passes the arguments of Keras 2's `add_weight` by keywords."""
    args = port.source.arguments(call)[: len(call.args)]
    is_name = args and isinstance(getattr(args[0].value, "value", None), str)
    for arg, word in zip(args if is_name else (), _WEIGHT, strict=False):
        port.edit(call, (arg.span[0], arg.span[0]), [f"{word}="])


def port_compiled_loss(port: Port, call: ast.Call) -> None:
    """Updates the metric of the loss, as Keras 2 did."""
    parent = port.names.parents[call]
    targets = getattr(parent, "targets", [])
    loss = dotted_name(targets[0]) if len(targets) == 1 else ""
    start, end = port.source.span(parent)
    if isinstance(parent, ast.Expr):
        loss = "loss"
        port.edit(call, (start, start), ["loss = "])
    if not loss:
        port.mark(call, TEXTS["loss"])
        return
    indent = port.source.indent(port.source.line_start(start))
    line = f"{indent}self.metrics[0].update_state({loss})"
    port.edit(call, (end, end), [port.source.newline + line])
