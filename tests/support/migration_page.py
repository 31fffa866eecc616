"""The generated parts of docs/migration.md and docs/migration_names.md.

`./run names` writes them, from examples/migration and the data of `migrate`.
"""

import collections
import difflib
import re

from keras_strategies.migrate import tables
from keras_strategies.migrate.porting import port_sources


def make_page(text, script):
    """Returns a page with its generated part: the diff, or the tables.

    Args:
      text: The page.
      script: The script for tf.distribute whose port it shows.
    """
    parts = {"diff": make_diff(script), "names": "\n".join(list_tables())}
    for name, part in parts.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, mark, rest = text.partition(start)
        if mark:
            text = f"{before}{start}{part}\n{end}{rest.partition(end)[2]}"
    return text


def make_diff(script):
    ported = port_sources({"custom_loop.py": ("custom_loop", script)})
    lines = difflib.unified_diff(
        script.splitlines(), ported["custom_loop.py"].code.splitlines(), n=1
    )
    body = [line.rstrip() for line in list(lines)[2:] if line[:2] != "@@"]
    return "\n".join(["```diff", *body, "```"])


def list_tables():
    """Yields the lines of the tables."""
    yield from list_replaced()
    yield from list_removed()
    yield from list_left()
    yield from list_operations()


def list_replaced():
    yield "## Names that are replaced\n"
    yield "| in a tf script | here |\n|---|---|"
    modules = collections.defaultdict(list)
    for module in tables.DOCUMENT["moved"]:
        names = [f"`{name}`" for name in module["names"].split()]
        modules[module["from"], module["to"]] += names
    for (old, new), names in modules.items():
        place = f"`{new}`, the same name"
        yield f"| `{tables.short(old)}`: {', '.join(names)} | {place} |"
    groups = collections.defaultdict(list)
    for old, new in tables.DOCUMENT["renamed"].items():
        word = 'its word, such as `"sum"`'
        new = word if new.startswith('"') else f"`{new}`"
        groups[new].append(f"`{tables.short(old)}`")
    for name, rows in tables.TEMPLATES.items():
        for _, parameters, code in rows:
            words = parameters.replace("*", "...").replace(" ", ", ")
            code = re.sub(r"\{(\w+)\}", r"\1", code)
            groups[f"`{code}`"].append(f"`{tables.short(name)}({words})`")
    for new, old in groups.items():
        yield f"| {', '.join(old)} | {new} |"
    yield ""


def list_removed():
    yield "## Calls that are removed\n"
    yield "| in a tf script | because |\n|---|---|"
    groups = collections.defaultdict(list)
    for name, reason in tables.DROPPED.items():
        groups[reason].append(f"`{tables.short(name)}`")
    for reason, names in groups.items():
        yield f"| {', '.join(names)} | {reason} |"
    yield ""


def list_left():
    yield "## Names that are left\n"
    yield "| in a tf script | what to do |\n|---|---|"
    groups = collections.defaultdict(list)
    for name, text in tables.DOCUMENT["marked"].items():
        groups[text].append(f"`{tables.short(name)}`")
    for name, text in tables.MARKED_IN_STEPS.items():
        groups[f"in steps: {text}"].append(f"`{tables.short(name)}`")
    for text, names in groups.items():
        yield f"| {', '.join(names)} | {text} |"
    yield ""


def list_operations():
    yield "## Operations in steps\n"
    same, others = [], []
    for name, rule in tables.OPERATIONS.items():
        short = f"`{name if name.startswith('keras.') else f'tf.{name}'}`"
        if rule.function == f"keras.ops.{name.rpartition('.')[2]}":
            same.append(short)
        else:
            others.append(f"{short}: `{rule.function}`")
    yield "| in Keras | operations |\n|---|---|"
    yield f"| the same name in `keras.ops` | {', '.join(same)} |"
    yield f"| another name | {', '.join(others)} |"
