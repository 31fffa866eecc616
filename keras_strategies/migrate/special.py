"""Calls that need more than a table: devices, variables, paths, losses."""

import ast
import re

from keras_strategies.migrate.languages import Language
from keras_strategies.migrate.port import Port
from keras_strategies.migrate.scopes import dotted_name
from keras_strategies.migrate.tables import TF

DEVICE_LISTS = ("list_physical_devices", "list_logical_devices")
OPTIMIZERS = ("optimizer", "opt", "optim")
_ENDINGS = {
    ".save": (".keras", ".h5", ".hdf5"),
    ".weights": (".weights.h5", ".h5", ".keras"),
    ".checkpoint": (".weights.h5",),
}


def _port_devices(port: Port, call: ast.Call) -> None:
    """Writes a list of TensorFlow's devices as one of JAX's."""
    args = port.source.arguments(call)
    kind = getattr(args[0].value, "value", None) if args else ""
    uses = (use for scope in port.names.scopes.values() for use in scope.uses)
    if any("MultiWorkerMirroredStrategy" in dotted_name(use) for use in uses):
        text = (
            "`jax.devices()` lists devices, but not before "
            "MultiWorkerMirroredStrategy has started the job"
        )
        port.mark(call, text)
    elif not isinstance(kind, str):
        port.mark(call, "`jax.devices()` lists the devices of the job")
    elif kind.upper() in ("", "CPU"):
        port.replace(call, 'jax.devices("cpu")' if kind else "jax.devices()")
    else:
        test = f'device.platform == "{kind.lower()}"'
        port.replace(call, f"[device for device in jax.devices() if {test}]")


def _port_split(port: Port, call: ast.Call) -> None:
    """Writes virtual devices as JAX's, if they have no limit of memory."""
    node, factor = call.args[-1] if call.args else call, ""
    if isinstance(node, ast.BinOp):
        node, factor = node.left, port.source.code(node.right)
    parts = node.elts if isinstance(node, ast.List) else []
    if not parts or any(ast.unparse(part)[-2:] != "()" for part in parts):
        text = (
            "set the number of virtual devices with "
            '`jax.config.update("jax_num_cpu_devices", n)`; JAX sets no limit '
            "of memory for them"
        )
        port.mark(call, text)
        return
    count = " * ".join([str(len(parts))] * (len(parts) > 1 or not factor))
    count = f"{count} * {factor}" if count and factor else count or factor
    port.replace(call, f'jax.config.update("jax_num_cpu_devices", {count})')


def _port_variable(port: Port, call: ast.Call) -> None:
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


def _port_function(port: Port, call: ast.Call) -> None:
    """Removes the options of a `tf.function`."""
    args = [arg for arg in port.source.arguments(call) if not arg.word]
    code = "ks.function({f})" if args else "ks.function"
    port.claimed.add(call.func)
    port.replace(call, code, {"f": args[0].span} if args else {})


def _port_range(port: Port, call: ast.Call) -> None:
    """Writes a loop over `tf.range` as Python's."""
    if getattr(port.names.parents[call], "iter", None) is not call:
        return
    port.replace(call.func, "range")
    for arg in port.source.arguments(call):
        if arg.word == "dtype":
            port.drop_argument(call, arg)
        else:
            port.edit(call, (arg.span[0], arg.start), [])


def _port_print(port: Port, call: ast.Call) -> None:
    """Writes `tf.print` as JAX's in steps, and as Python's around them."""
    args = port.source.arguments(call)
    is_step = port.file.language_of(port.scope(call)) is Language.STEP
    port.replace(call.func, "jax.debug.print" if is_step else "print")
    words, values = [], []
    for arg in args:
        value = getattr(arg.value, "value", None)
        if arg.word and not is_step:
            port.drop_argument(call, arg)
        elif not arg.word and isinstance(value, str):
            words.append(re.sub("([{}])", r"\1\1", value))
        elif not arg.word:
            words.append("{}")
            values += [", ", arg.span]
    if is_step and args:
        text = repr(" ".join(words))[1:-1]
        text = text.replace('"', '\\"').replace("\\'", "'")
        span = (args[0].span[0], args[-1].span[1])
        port.edit(call, span, [f'"{text}"', *values])


def _port_minimize(port: Port, call: ast.Call) -> None:
    """Marks what is left of an optimizer's `minimize`."""
    owner = dotted_name(getattr(call.func, "value", None)).lower()
    if owner.endswith(OPTIMIZERS):
        text = (
            "`minimize` is not in Keras 3: use `ks.GradientTape` and "
            "`optimizer.apply_gradients`"
        )
        port.mark(call, text)


def _port_path(port: Port, call: ast.Call) -> None:
    """Adds the ending that Keras 3 asks for to the literal name of a file."""
    *owners, name = dotted_name(call.func).lower().split(".")
    args = port.source.arguments(call)
    words = {arg.word: arg.value for arg in args}
    is_model = any("model" in word or word == "self" for word in owners)
    is_keras = port.full_name(call.func).startswith("keras.")
    kind = ".weights" if name.endswith("_weights") else ".save"
    if "save_weights_only" in words:
        is_only = ast.unparse(words["save_weights_only"]) == "True"
        kind = ".checkpoint" if is_only else kind
    if kind == ".save" and not is_model and not is_keras:
        return
    known = _ENDINGS[kind]
    places = [arg.value for arg in args if not arg.word]
    value = words.get("filepath") or [*places, call, call][name == "save_model"]
    code = port.source.code(value)
    match = re.fullmatch(r"""([bru]?['"]+)(.*?)(['"]+)""", code, re.S)
    if match is None or match[2].endswith(known):
        return
    body = re.sub(r"(\.h5|\.hdf5|\.ckpt|/+)$", "", match[2])
    span = port.source.span(value)
    port.edit(value, span, [match[1] + body + known[0] + match[3]])


def _port_compiled_loss(port: Port, call: ast.Call) -> None:
    """Updates the metric of the loss, as Keras 2 did."""
    parent = port.names.parents[call]
    targets = getattr(parent, "targets", [])
    loss = dotted_name(targets[0]) if len(targets) == 1 else ""
    start, end = port.source.span(parent)
    if isinstance(parent, ast.Expr):
        loss = "loss"
        port.edit(call, (start, start), ["loss = "])
    if not loss:
        port.mark(call, "update the metric of this loss, `self.metrics[0]`")
        return
    indent = port.source.indent(port.source.line_start(start))
    line = f"{indent}self.metrics[0].update_state({loss})"
    port.edit(call, (end, end), [port.source.newline + line])


_CONFIG = (f"{TF}config.", f"{TF}config.experimental.")
SPECIAL = {
    f"{TF}Variable": _port_variable,
    f"{TF}compat.v1.Variable": _port_variable,
    f"{TF}function": _port_function,
    f"{TF}range": _port_range,
    f"{TF}print": _port_print,
    "self.compiled_loss": _port_compiled_loss,
    ".minimize": _port_minimize,
    ".save": _port_path,
    ".save_weights": _port_path,
    ".load_weights": _port_path,
    "keras.models.save_model": _port_path,
    "keras.models.load_model": _port_path,
    "keras.callbacks.ModelCheckpoint": _port_path,
    **{c + name: _port_devices for c in _CONFIG for name in DEVICE_LISTS},
    f"{TF}config.set_logical_device_configuration": _port_split,
    f"{TF}config.experimental.set_virtual_device_configuration": _port_split,
}
"""Functions for calls, by their names in the tables."""
