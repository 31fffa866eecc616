"""Names of Keras 2, and what steps of models call."""

import libcst as cst

from keras_strategies.migrate import tables
from keras_strategies.migrate.chains import dotted_name, target_names
from keras_strategies.migrate.edits import (
    change_keywords,
    code_of,
    expression,
    find_argument,
    keyword,
    positional,
    text_of,
    with_args,
    word_of,
)
from keras_strategies.migrate.languages import Language
from keras_strategies.migrate.rules import Port

_SAVES = ("save", "save_model", "load_model")
_WEIGHTS = ("save_weights", "load_weights")
_RENAMED_METHODS = {
    "fit_generator": "fit",
    "evaluate_generator": "evaluate",
    "predict_generator": "predict",
    "reset_states": "reset_state",
}
_FITS = (*_RENAMED_METHODS, "fit", "evaluate", "predict")
_NO_ARGUMENTS = dict.fromkeys(tables.WORDS["fit_arguments"])
_BACKEND = 'os.environ["KERAS_BACKEND"]'
_OPTIMIZERS = ("optimizer", "opt", "optim")
_LOOP = """\
for metric in self.metrics:
    if metric.name == "loss":
        metric.update_state({loss})
    else:
        metric.update_state({arguments})
"""


def port_method(port: Port, call: cst.Call, full: str) -> None:
    """Ports a call of Keras by its class or its method's name."""
    is_method = isinstance(call.func, cst.Attribute)
    name = call.func.attr.value if is_method else full.rpartition(".")[2]
    if full.startswith(tables.TF):
        return
    if is_method and name in _RENAMED_METHODS:
        _rename_method(port, call, _RENAMED_METHODS[name])
    if is_method and name in _FITS:
        words = {"generator": "x", **_NO_ARGUMENTS}
        if any(word_of(arg) in words for arg in call.args):
            port.edits.replace(call, lambda node: change_keywords(node, words))
    if name in _RULES:
        _RULES[name](port, call)
    if full.startswith("keras.optimizers."):
        _port_optimizer(port, call)


def _rename_method(port: Port, call: cst.Call, name: str) -> None:
    port.edits.replace(
        call.func, lambda node: node.with_changes(attr=cst.Name(name))
    )


def port_attribute(port: Port, node: cst.CSTNode) -> None:
    """Ports an attribute by its name: `optimizer.lr`."""
    while isinstance(node, cst.Attribute):
        owner = (dotted_name(node.value) or "").rpartition(".")[2].lower()
        if node.attr.value == "lr" and owner.endswith(_OPTIMIZERS):
            port.edits.replace(
                node,
                lambda new: new.with_changes(attr=cst.Name("learning_rate")),
            )
        node = node.value


def port_backend(port: Port, value: cst.BaseExpression) -> None:
    """Sets the environment variable KERAS_BACKEND to JAX."""
    parent = port.file.names.parents.get(value)
    if isinstance(parent, cst.Assign) and text_of(value) is not None:
        target = code_of(parent.targets[0].target).replace("'", '"')
        if target == _BACKEND:
            port.edits.replace(value, lambda _: cst.SimpleString('"jax"'))


def _port_numpy(port: Port, call: cst.Call) -> None:
    """Converts what may be an array of JAX, which has no such method."""
    is_known = port.file.steps or port.file.around
    is_method = isinstance(call.func, cst.Attribute) and not call.args
    if is_method and is_known and port.language(call) is Language.HOST:
        function = expression("keras.ops.convert_to_numpy")
        port.edits.replace(
            call,
            lambda node: node.with_changes(
                func=function, args=[cst.Arg(node.func.value)]
            ),
        )


def _port_shape(port: Port, call: cst.Call) -> None:
    """Writes `x.get_shape()` and `x.shape.as_list()` with `x.shape`."""
    is_method = isinstance(call.func, cst.Attribute) and not call.args
    if is_method and port.is_step(call):
        is_list = call.func.attr.value == "as_list"
        port.edits.replace(
            call,
            lambda node: (
                cst.Call(cst.Name("list"), positional(node.func.value))
                if is_list
                else cst.Attribute(node.func.value, cst.Name("shape"))
            ),
        )


def _port_minimize(port: Port, call: cst.Call) -> None:
    """Writes `minimize(loss, variables, tape=tape)` as its two parts."""
    if not isinstance(call.func, cst.Attribute):
        return
    parts = [
        find_argument(call, name, index)
        for index, name in enumerate(("loss", "var_list", "tape"))
    ]
    indexes = [call.args.index(part) for part in parts if part is not None]
    if not len(indexes) == len(call.args) == 3 or word_of(parts[2]) != "tape":
        owner = (dotted_name(call.func.value) or "").rpartition(".")[2].lower()
        if owner.endswith(_OPTIMIZERS):
            port.mark(
                call,
                "`minimize` is not in Keras 3: use `ks.GradientTape` and "
                "`optimizer.apply_gradients`",
            )
        return

    def edit(node: cst.Call) -> cst.Call:
        loss, variables, tape = (node.args[index].value for index in indexes)
        gradient = cst.Call(
            cst.Attribute(tape, cst.Name("gradient")),
            positional(loss, variables),
        )
        pairs = cst.Call(cst.Name("zip"), positional(gradient, variables))
        func = node.func.with_changes(attr=cst.Name("apply_gradients"))
        return cst.Call(func, positional(pairs))

    port.edits.replace(call, edit)


def _port_compiled_loss(port: Port, call: cst.Call) -> None:
    """Writes `self.compiled_loss(y, y_pred)` as `self.compute_loss`."""
    if dotted_name(call.func) != "self.compiled_loss" or len(call.args) < 2:
        return
    parent = port.file.names.parents.get(call)
    loss = _find_loss(port, call)
    if loss is None:
        port.mark(
            call,
            "`compiled_loss` is not in Keras 3: use `self.compute_loss(y=y, "
            "y_pred=y_pred)`, and update the metric of the loss",
        )
        return

    def edit(node: cst.Call) -> cst.Call:
        names = ("y", "y_pred", "sample_weight")
        args = []
        for arg, name in zip(node.args, names, strict=False):
            new = keyword(word_of(arg) or name, arg.value)
            args.append(arg.with_changes(keyword=new.keyword, equal=new.equal))
        call = node.with_changes(func=expression("self.compute_loss"))
        words = {"y_true": "y", "regularization_losses": None}
        return change_keywords(with_args(call, args), words)

    port.edits.replace(call, edit)
    if isinstance(parent, cst.Expr):
        target = cst.AssignTarget(cst.Name(loss))
        port.edits.replace(
            parent, lambda node: cst.Assign([target], node.value)
        )
    calls = port.scope(call).calls
    if not any(dotted_name(c.func) == _UPDATE for c in calls):
        update = cst.parse_statement(f"self.metrics[0].update_state({loss})")
        port.edits.replace(
            port.file.names.statement_of(call),
            lambda node: cst.FlattenSentinel([node, update]),
        )


_LOSSES = ("self.compiled_loss", "self.compute_loss")
_UPDATE = "self.compiled_metrics.update_state"


def _find_loss(port: Port, call: cst.Call) -> str | None:
    """Returns the name of the loss, if the call is a whole statement."""
    parent = port.file.names.parents.get(call)
    if isinstance(parent, cst.Expr):
        return "loss"
    if isinstance(parent, cst.Assign) and len(parent.targets) == 1:
        names = target_names(parent.targets[0].target)
        return names[0] if len(names) == 1 else None
    return None


def _port_compiled_metrics(port: Port, call: cst.Call) -> None:
    """Writes an update of `self.compiled_metrics` as a loop over metrics."""
    if dotted_name(call.func) != _UPDATE:
        return
    losses = [
        _find_loss(port, other)
        for other in port.scope(call).calls
        if dotted_name(other.func)
        in ("self.compiled_loss", "self.compute_loss")
    ]
    line = port.file.names.statement_of(call)
    is_line = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
    if len(losses) != 1 or losses[0] is None or not is_line:
        port.mark(
            call,
            "`compiled_metrics` is not in Keras 3: update each of "
            "`self.metrics`",
        )
        return

    def edit(node: cst.SimpleStatementLine) -> cst.BaseCompoundStatement:
        args = node.body[0].value.args
        loop = cst.parse_statement(
            _LOOP.format(
                loss=losses[0],
                arguments=", ".join(
                    code_of(arg.with_changes(comma=cst.MaybeSentinel.DEFAULT))
                    for arg in args
                ),
            ),
            config=port.file.names.module.config_for_parsing,
        )
        return loop.with_changes(leading_lines=node.leading_lines)

    port.edits.replace(line, edit)


def _port_path(port: Port, call: cst.Call) -> None:
    """Adds the ending that Keras 3 asks for to the name of a file."""
    *owners, name = (dotted_name(call.func) or "").lower().split(".")
    is_model = any("model" in word or word == "self" for word in owners)
    is_keras = port.full_name(call.func).startswith("keras.")
    if name in _WEIGHTS:
        _end_path(port, call, 0, ".weights.h5", (".h5", ".keras"))
    elif is_model or is_keras:
        index = 1 if name == "save_model" else 0
        _end_path(port, call, index, ".keras", (".keras", ".h5", ".hdf5"))


def _end_path(
    port: Port, call: cst.Call, index: int, ending: str, known: tuple[str, ...]
) -> None:
    """Ends a literal path by `ending`, unless its ending is known."""
    arg = find_argument(call, "filepath", index)
    text = text_of(arg.value) if arg is not None else None
    if arg is None or text is None or text.endswith(known):
        return
    old = next((e for e in (".h5", ".hdf5", ".ckpt") if text.endswith(e)), "")

    def edit(node: cst.SimpleString) -> cst.SimpleString:
        body = node.value[: -len(node.quote)].removesuffix(old).rstrip("/")
        return node.with_changes(value=body + ending + node.quote)

    port.edits.replace(arg.value, edit)


def _port_checkpoint(port: Port, call: cst.Call) -> None:
    """Ports the arguments of `ModelCheckpoint`."""
    period = find_argument(call, "period", -1)
    if period is not None and code_of(period.value) == "1":
        port.edits.replace(
            call, lambda node: change_keywords(node, {"period": None})
        )
    elif period is not None:
        port.mark(
            call,
            "`period` is not in Keras 3: use `save_freq`, a number of batches",
        )
    weights = find_argument(call, "save_weights_only", -1)
    if weights is not None and dotted_name(weights.value) == "True":
        _end_path(port, call, 0, ".weights.h5", (".weights.h5",))
    else:
        _end_path(port, call, 0, ".keras", (".keras", ".h5"))


def _port_input_layer(port: Port, call: cst.Call) -> None:
    words = {"input_shape": "shape"}
    if any(word_of(arg) in words for arg in call.args):
        port.edits.replace(call, lambda node: change_keywords(node, words))


def _port_embedding(port: Port, call: cst.Call) -> None:
    if find_argument(call, "weights", -1) is not None:
        port.mark(
            call,
            "`weights` is not in Keras 3: call `layer.set_weights` once it is "
            "built, or pass "
            "`embeddings_initializer=keras.initializers.Constant(matrix)`",
        )


def _port_optimizer(port: Port, call: cst.Call) -> None:
    """Writes `decay` as the schedule that it was, and `lr` in full."""
    decay = find_argument(call, "decay", -1)
    rate = find_argument(call, "lr", 0) or find_argument(
        call, "learning_rate", 0
    )
    words: dict[str, str | None] = {"lr": "learning_rate"}
    if decay is None and (rate is None or word_of(rate) != "lr"):
        return
    is_zero = decay is not None and code_of(decay.value) in ("0", "0.0", "0.")
    if decay is not None and rate is None and not is_zero:
        port.mark(
            call,
            "`decay` is not in Keras 3: use "
            "`keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay)`",
        )
        return
    if decay is not None:
        words["decay"] = None
    port.edits.replace(call, lambda node: change_keywords(node, words))
    if decay is not None and rate is not None and not is_zero:
        schedule = expression("keras.optimizers.schedules.InverseTimeDecay")
        port.edits.replace(
            rate.value,
            lambda node: cst.Call(
                schedule, positional(node, cst.Integer("1"), decay.value)
            ),
        )


_RULES = {
    "numpy": _port_numpy,
    "as_list": _port_shape,
    "get_shape": _port_shape,
    "minimize": _port_minimize,
    "compiled_loss": _port_compiled_loss,
    "update_state": _port_compiled_metrics,
    "ModelCheckpoint": _port_checkpoint,
    "InputLayer": _port_input_layer,
    "Embedding": _port_embedding,
    **dict.fromkeys((*_SAVES, *_WEIGHTS), _port_path),
}
"""The rule for each class and method, by its name."""
