"""Calls of TensorFlow's other functions: strategies, devices, variables."""

import libcst as cst

from keras_strategies.migrate import tables
from keras_strategies.migrate.chains import dotted_name, target_names
from keras_strategies.migrate.edits import (
    expression,
    keep_parentheses,
    keyword,
    with_args,
)
from keras_strategies.migrate.languages import Language
from keras_strategies.migrate.rules import Port, replace_call
from keras_strategies.migrate.tables import TF

_LISTS = frozenset(
    f"{TF}config.{name}"
    for name in (
        "list_physical_devices",
        "list_logical_devices",
        "experimental.list_physical_devices",
        "experimental.list_logical_devices",
    )
)
_SPLITS = frozenset(
    f"{TF}config.{name}"
    for name in (
        "set_logical_device_configuration",
        "experimental.set_virtual_device_configuration",
    )
)
_PARTS = ("LogicalDeviceConfiguration", "VirtualDeviceConfiguration")
_GPU_TESTS = frozenset(
    {f"{TF}test.is_gpu_available", f"{TF}test.is_built_with_cuda"}
)
_SAVED_MODEL = f"{TF}saved_model.save"
_VARIABLE = frozenset({f"{TF}Variable", f"{TF}compat.v1.Variable"})
_VARIABLE_WORDS = frozenset(
    {"trainable", "name", "dtype", "aggregation", "synchronization"}
)
_SET_DISTRIBUTION = "keras.distribution.set_distribution"
_SHORT_DTYPES = {"int64": "int32", "float64": "float32"}


def port_call(port: Port, call: cst.Call, full: str) -> bool:
    """Ports a call by its function's full name; returns whether it did."""
    if full in tables.DROPPED:
        return _drop(port, call, full)
    if full in _LISTS:
        return _port_devices(port, call)
    if full in _SPLITS:
        return _port_split(port, call)
    if full in _GPU_TESTS:
        port.claimed.add(call.func)
        text = 'jax.default_backend() == "gpu"'
        port.edits.replace(call, lambda node: _parenthesize(expression(text)))
        return True
    if full.startswith(f"{TF}distribute."):
        return _port_strategy(port, call, full)
    if full in _VARIABLE and port.language(call) is not Language.DATA:
        return _port_variable(port, call)
    if full == f"{TF}function" and port.language(call) is not Language.DATA:
        return _port_function(port, call)
    if full == _SAVED_MODEL:
        return _port_export(port, call)
    if full == _SET_DISTRIBUTION:
        return _port_distribution(port, call)
    if full == "keras.distribution.initialize":
        port.mark(
            call,
            "`ks.MultiWorkerMirroredStrategy` starts the job: omit this call",
        )
        return True
    return False


def _parenthesize(node: cst.BaseExpression) -> cst.BaseExpression:
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def _drop(port: Port, call: cst.Call, full: str) -> bool:
    parent = port.file.names.parents.get(call)
    if isinstance(parent, cst.Expr):
        port.claimed.add(call.func)
        port.drop(parent)
        return True
    return False


def _has_workers(port: Port) -> bool:
    return any(
        "MultiWorkerMirroredStrategy" in (dotted_name(use) or "")
        for scope in port.file.names.scopes
        for use in scope.uses
    )


def _port_devices(port: Port, call: cst.Call) -> bool:
    names = port.file.names
    parent = names.parents.get(call)
    if isinstance(parent, cst.Assign) and _is_only_configured(port, parent):
        port.claimed.add(call.func)
        port.drop(parent)
        return True
    if any(
        isinstance(each, cst.Call) and port.full_name(each.func) in _SPLITS
        for each in names.ancestors(call)
    ):
        port.claimed.add(call.func)
        return True
    if _has_workers(port):
        port.mark(
            call,
            "`jax.devices()` lists devices, but not before "
            "MultiWorkerMirroredStrategy has started the job",
        )
        return True
    kind = _literal(call.args[0].value) if call.args else None
    if call.args and kind is None:
        port.mark(call, "`jax.devices()` lists the devices of the job")
        return True
    if kind is None:
        text = "jax.devices()"
    elif kind.upper() == "CPU":
        text = 'jax.devices("cpu")'
    else:
        text = (
            "[device for device in jax.devices() if device.platform == "
            f'"{kind.lower()}"]'
        )
    port.claimed.add(call.func)
    port.edits.replace(
        call,
        lambda node: keep_parentheses(node, expression(text)),
    )
    return True


def _is_only_configured(port: Port, assign: cst.Assign) -> bool:
    """Returns whether a list of devices is only passed to dropped calls."""
    names = port.file.names
    targets = {n for t in assign.targets for n in target_names(t.target)}
    uses = [
        use
        for scope in names.scopes
        for use in scope.uses
        if (dotted_name(use) or "").split(".")[0] in targets
    ]
    return bool(uses) and all(_is_configured(port, use) for use in uses)


def _is_configured(port: Port, node: cst.CSTNode) -> bool:
    return any(
        isinstance(each, cst.Call)
        and (
            port.full_name(each.func) in _SPLITS
            or port.full_name(each.func) in tables.DROPPED
        )
        for each in port.file.names.ancestors(node)
    )


def _literal(node: cst.BaseExpression) -> str | None:
    if isinstance(node, cst.SimpleString):
        value = node.evaluated_value
        return value if isinstance(value, str) else None
    return None


def _port_split(port: Port, call: cst.Call) -> bool:
    text = (
        _count_parts(port, call.args[1].value) if len(call.args) > 1 else None
    )
    if text is None:
        port.mark(
            call,
            "set the number of virtual devices with "
            '`jax.config.update("jax_num_cpu_devices", n)`; JAX sets no limit '
            "of memory for them",
        )
        port.claim_uses(call)
        return True
    port.claimed.add(call.func)
    port.claim_uses(call)
    new = f'jax.config.update("jax_num_cpu_devices", {text})'
    port.edits.replace(call, lambda node: expression(new))
    return True


def _count_parts(port: Port, node: cst.BaseExpression) -> str | None:
    """Returns the number of parts that a list of configurations has."""
    factor = ""
    if isinstance(node, cst.BinaryOperation) and isinstance(
        node.operator, cst.Multiply
    ):
        factor = cst.Module([]).code_for_node(node.right)
        node = node.left
    if not isinstance(node, cst.List):
        return None
    for element in node.elements:
        part = element.value
        if not isinstance(part, cst.Call) or part.args:
            return None
        if not port.full_name(part.func).endswith(_PARTS):
            return None
    count = len(node.elements)
    if not factor:
        return str(count)
    return factor if count == 1 else f"{count} * {factor}"


def _port_strategy(port: Port, call: cst.Call, full: str) -> bool:
    """Removes the arguments that XLA makes unnecessary; names are renamed."""
    name = full.rpartition(".")[2]
    if name == "MirroredStrategy":
        kept = [
            arg
            for index, arg in enumerate(call.args)
            if _word(arg) != "cross_device_ops"
            and not (index == 1 and arg.keyword is None)
        ]
        dropped = [arg for arg in call.args if arg not in kept]
        for arg in dropped:
            port.claim_uses(arg)
        if dropped:
            indexes = [call.args.index(arg) for arg in kept]
            port.edits.replace(
                call,
                lambda node: with_args(node, [node.args[i] for i in indexes]),
            )
    if name == "MultiWorkerMirroredStrategy":
        port.edits.replace(call, _wrap_communication)
    if name in ("CentralStorageStrategy",):
        port.edits.replace(call, lambda node: node.with_changes(args=[]))
    return False


def _word(arg: cst.Arg) -> str:
    return arg.keyword.value if arg.keyword else ""


def _wrap_communication(node: cst.Call) -> cst.Call:
    """Writes `communication=X` as options, as MultiWorker... takes them."""
    args = []
    for arg in node.args:
        if _word(arg) == "communication":
            text = "ks.experimental.CommunicationOptions()"
            options = cst.ensure_type(expression(text), cst.Call)
            options = options.with_changes(
                args=[keyword("implementation", arg.value)]
            )
            new = keyword("communication_options", options)
            arg = arg.with_changes(keyword=new.keyword, value=options)
        args.append(arg)
    return with_args(node, args) if args else node


def _port_variable(port: Port, call: cst.Call) -> bool:
    words = [_word(arg) for arg in call.args]
    unknown = set(words) - _VARIABLE_WORDS - {"", "initial_value"}
    if unknown or words.count("") > 2 or not call.args:
        names = ", ".join(f"`{word}`" for word in sorted(unknown))
        reason = f"has no {names}" if names else "takes these by keyword"
        port.mark(call, f"`keras.Variable` {reason}: its shape is fixed")
        return True
    first = call.args[0].value
    if isinstance(first, cst.Lambda) or _literal(first) is not None:
        port.mark(call, "`keras.Variable` takes a value, or an initializer")
        return True
    port.file.symbolic.add(call)
    replace_call(port, call, "keras.Variable")
    dtypes = {
        id(arg): port.full_name(arg.value).removeprefix(TF) for arg in call.args
    }
    enums = [_enum_text(port, arg) for arg in call.args]
    for arg, text in zip(call.args, enums, strict=True):
        if text is not None:
            port.claimed.add(arg.value)
    kinds = [dtypes[id(arg)] for arg in call.args]
    is_whole = isinstance(first, cst.Integer)

    def edit(node: cst.Call) -> cst.Call:
        args = []
        for index, arg in enumerate(node.args):
            if _word(arg) == "initial_value":
                arg = arg.with_changes(keyword=cst.Name("initializer"))
            if index == 1 and arg.keyword is None:
                new = keyword("trainable", arg.value)
                arg = arg.with_changes(keyword=new.keyword, equal=new.equal)
            if enums[index] is not None:
                arg = arg.with_changes(value=cst.SimpleString(enums[index]))
            elif (
                _word(arg) == "dtype" and kinds[index] in tables.WORDS["dtypes"]
            ):
                short = _SHORT_DTYPES.get(kinds[index], kinds[index])
                arg = arg.with_changes(value=cst.SimpleString(f'"{short}"'))
            args.append(arg)
        given = {_word(arg) for arg in args}
        is_int = is_whole and not any(k.startswith("float") for k in kinds)
        if is_int and "dtype" not in given:
            args.append(keyword("dtype", cst.SimpleString('"int32"')))
        if is_int and "trainable" not in given:
            args.append(keyword("trainable", cst.Name("False")))
        return with_args(node, args)

    port.edits.replace(call, edit)
    return True


def _enum_text(port: Port, arg: cst.Arg) -> str | None:
    """Returns Keras's word for a value of TensorFlow's enumerations."""
    full = port.full_name(arg.value)
    for kind in ("VariableSynchronization.", "VariableAggregation."):
        if full.startswith(f"{TF}{kind}"):
            return f'"{full.rpartition(".")[2].lower()}"'
    return None


def _port_function(port: Port, call: cst.Call) -> bool:
    parent = port.file.names.parents.get(call)
    for arg in call.args:
        if arg.keyword is not None:
            port.claim_uses(arg)
    if isinstance(parent, cst.Decorator):
        port.edits.replace(call, lambda node: node.func)
    else:
        port.edits.replace(
            call,
            lambda node: with_args(
                node, [arg for arg in node.args if arg.keyword is None][:1]
            ),
        )
    return False


def _port_export(port: Port, call: cst.Call) -> bool:
    if len(call.args) < 2 or any(arg.star for arg in call.args):
        return False
    port.claimed.add(call.func)
    for arg in call.args[2:]:
        port.claim_uses(arg)

    def edit(node: cst.Call) -> cst.Call:
        path = node.args[1].with_changes(
            keyword=None, equal=cst.MaybeSentinel.DEFAULT
        )
        export = cst.Attribute(node.args[0].value, cst.Name("export"))
        return with_args(node.with_changes(func=export), [path])

    port.edits.replace(call, edit)
    return True


def _port_distribution(port: Port, call: cst.Call) -> bool:
    inner = call.args[0].value if call.args else None
    full = port.full_name(inner.func) if isinstance(inner, cst.Call) else ""
    if full != "keras.distribution.DataParallel":
        port.mark(
            call,
            "use `ks.experimental_set_strategy(ks.TPUStrategy(layout_map=...))`"
            ", or `ks.MirroredStrategy()` for data parallelism",
        )
        return True
    replace_call(port, call, "ks.experimental_set_strategy")
    port.claim_uses(call.args[0])
    port.edits.replace(inner, lambda node: expression("ks.MirroredStrategy()"))
    return True
