"""Calls: operations, and the tables' other calls."""

import ast
import re

from keras_strategies.migrate import special, tables
from keras_strategies.migrate.languages import Language
from keras_strategies.migrate.port import Port
from keras_strategies.migrate.scopes import FUNCTIONS, dotted_name
from keras_strategies.migrate.source import Argument, Source
from keras_strategies.migrate.tables import BACKEND, TEXTS, TF, Rule

# Names that TensorFlow's versions have for a first argument.
_FIRST = ("x", "input", "tensor")


def port_call(port: Port, call: ast.Call) -> None:
    """Ports a call by its function's full name, or by its method."""
    full, language = port.full_name(call.func), port.language(call)
    if language is Language.DATA:
        return
    parent = port.names.parents[call]
    if full in tables.DROPPED and isinstance(parent, ast.Expr):
        port.dropped.add(parent)
        port.claimed.add(call.func)
        return
    is_ours = full.startswith((TF, "keras."))
    method = "" if is_ours else f".{getattr(call.func, 'attr', '')}"
    root = full.rpartition(".")[0]
    words = (f"({dotted_name(arg)})" for arg in call.args[1:])
    for name in (full, f"{root}.*", method, dotted_name(call.func), *words):
        rows = tables.TEMPLATES.get(name, ())
        if any(_fill_template(port, call, row) for row in rows):
            return
        rule = tables.CALLS.get(name)
        is_left = rule and not _apply_rule(port, call, rule, full or name)
        if rule and rule.function and is_left:
            return
        if name in tables.SPECIAL:
            getattr(special, f"port_{tables.SPECIAL[name]}")(port, call)
    rule = tables.find_operation(full)
    if rule is None or not is_ours or port.claimed & {call.func}:
        return
    if language is Language.BOTH:
        port.claimed.add(call.func)
        nodes = [scope.node for scope in port.scope(call).enclosing()]
        node = next((n for n in nodes if isinstance(n, FUNCTIONS)), call)
        name = getattr(node, "name", "lambda")
        text = f"`{name}` serves a dataset and a step: write one for each"
        port.mark(node, text)
    elif language is Language.STEP or full.startswith(BACKEND):
        _apply_rule(port, call, rule, full)


def _apply_rule(port: Port, call: ast.Call, rule: Rule, name: str) -> bool:
    """Renames a call's function and arguments, or marks it."""
    args = port.source.arguments(call)
    new = [_parameter(arg, index, rule) for index, arg in enumerate(args)]
    problem = _find_problem(port.source, args, new, rule)
    if problem is not None:
        port.mark(call, f"`{tables.short(name)}`: {problem}")
        if rule.function:
            port.claimed.add(call.func)
        return False
    if rule.function.startswith("."):
        end = port.source.span(call.func)[1]
        dot = port.source.text.rindex(".", 0, end)
        port.edit(call, (dot, end), [rule.function])
    elif rule.function:
        port.replace(call.func, rule.function)
    is_in_order, given = True, set()
    words = dict(zip(args, new, strict=True))
    port.drop_arguments(call, [a for a in args if (words[a] or "x")[0] in "-!"])
    for arg, word in words.items():
        if word is None:
            continue
        if word[0] in "-!":
            is_in_order = False
            continue
        is_in_order &= not word.endswith("*")
        word, _, form = word.rstrip("*").partition(":")
        given.add(word)
        start, value = arg.span[0], port.source.span(arg.value)
        if arg.word and arg.word != word:
            port.edit(call, (start, start + len(arg.word)), [word])
        elif not arg.word and not is_in_order:
            port.edit(call, (start, start), [f"{word}="])
        if form:
            before, after = form.split("{}")
            port.edit(call, value, [port.alias(before), value, after], form)
        if word == "mode":
            text = port.source.code(arg.value).lower()
            port.edit(call, value, [text])
    word, text = rule.added
    if word and word not in given:
        first = port.source.code(args[0].value) if args else ""
        port.add_argument(call, word, text.format(first))
    return True


def _parameter(arg: Argument, index: int, rule: Rule) -> str | None:
    """Returns the new name of an argument; None if it stays as it is."""
    old, word = rule.old, arg.word
    if not word and not rule.is_open and index < len(old):
        return rule.new[index]
    if word not in old:
        word = tables.OLD_WORDS.get(word, word)
    if word not in old and word in _FIRST and not rule.is_open:
        word = "".join(old[:1])
    if word in old:
        return rule.new[old.index(word)]
    return None if rule.is_open else "-" if word == "name" else "!"


def _find_problem(
    source: Source, args: list[Argument], new: list[str | None], rule: Rule
) -> str | None:
    """Returns why a call's arguments cannot be ported, or None."""
    for index, (arg, word) in enumerate(zip(args, new, strict=True)):
        if arg.has_star and not rule.is_open:
            return TEXTS["starred"]
        code = source.code(arg.value)
        if word and word[0] == "!" and word[1:] not in (code, f"{code}.0"):
            text = f"Keras has no counterpart of `{arg.word or index + 1}`"
            return ": ".join([text, *tables.ARGUMENTS.get(arg.word, [])])
        form = tables.FORMS.get(word or "")
        if form and not re.fullmatch(form, code, re.DOTALL):
            return TEXTS[word]
    is_short = rule.function == "keras.ops.where" and len(args) == 1
    return TEXTS["where"] if is_short else None


def _fill_template(port: Port, call: ast.Call, row: list[str]) -> bool:
    """Replaces a call by a template's code; returns whether it fits."""
    where, parameters, code = row
    step, file = Language.STEP, port.file
    has_steps = file.found[step] or file.elsewhere[step]
    here = "step" if port.is_step(call) else "host" if has_steps else "any"
    if where not in ("any", here):
        return False
    names = [n.split("=")[0] for n in parameters.replace("*", "").split()]
    values = dict(re.findall(r"(\w+)=(\w+)", parameters))
    spans = {}
    for index, arg in enumerate(port.source.arguments(call)):
        word = arg.word or (names[index] if index < len(names) else "*")
        is_other = word not in names and "*" not in parameters
        value = port.source.code(arg.value)
        if arg.has_star or is_other or values.get(word, value) != value:
            return False
        spans[word] = (arg.start, arg.span[1])
    if not set(names) <= spans.keys():
        return False
    if isinstance(call.func, ast.Attribute):
        end = port.source.span(call.func)[1] - len(call.func.attr)
        dot = port.source.text.rindex(".", 0, end)
        spans["self"] = (port.source.span(call)[0], dot)
    port.claimed.add(call.func)
    port.replace(call, code, spans)
    return True
