"""Texts of programs without what only names something, to be compared.

What names a program, a function in it, an argument or a line of source is left
out: two programs that compute the same in the same way have one text.
"""

import difflib
import re

SHOWN = 40


def normal_stablehlo(text):
    """A lowered program without names of functions and arguments."""
    text = re.sub(r"(?m)^#loc.*\n", "", text)
    text = re.sub(r" loc\((?:[^()]|\([^()]*\))*\)", "", text)
    text = re.sub(r'jax\.(result_info|arg_info) = "[^"]*",? ?', "", text)
    text = re.sub(r", (?=\})", "", text)
    text = re.sub(r"(?<=>) \{\}", "", text)
    return renamed(text, r"@[\w.\-<>]+", "@f")


def normal_hlo(text):
    """A compiled program without metadata and names."""
    text = re.sub(r", metadata=\{[^{}]*(\{[^{}]*\}[^{}]*)*\}", "", text)
    text = re.sub(
        r"(?m)^(FileNames|FunctionNames|FileLocations|StackFrames)"
        r"\n(.+\n)*",
        "",
        text,
    )
    text = re.sub(r"^HloModule [^,\n]*", "HloModule m", text)
    # a computation's parameters, `(param.7: f32[8], ...)`
    text = re.sub(r"[\w.\-]+(?=: (?:/\*index=\d+\*/)?[\w(])", "a", text)
    return renamed(text, r"%[\w.\-]+", "%v")


def differences(before, after):
    """Says of each file that is not as it was."""
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if old is None or new is None:
            yield f"{name}: {'new' if old is None else 'gone'}"
            continue
        lines = difflib.unified_diff(
            old.splitlines(), new.splitlines(), "before", "after", n=1
        )
        shown = [line[:160] for line in lines][:SHOWN]
        yield "\n".join([f"{name}: another", *shown])


def renamed(text, pattern, prefix):
    """Names replaced by the order of their first use."""
    known = {}

    def name(found):
        return known.setdefault(found.group(), f"{prefix}{len(known)}")

    return re.sub(pattern, name, text)
