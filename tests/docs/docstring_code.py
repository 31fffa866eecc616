"""Examples of docstrings: how they are found and run."""

import doctest
import inspect
import re
import textwrap

FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.M | re.S)
SECTION = re.compile(r"[A-Z][A-Za-z ]*:")


def list_examples(docstring):
    """The sources of a docstring's examples, in their order.

    They are fenced blocks of python, sessions that begin with `>>>`, and
    paragraphs that are indented by four columns outside of sections. Fenced
    blocks of another language, and literal text, are none.
    """
    text = inspect.cleandoc(docstring)
    found = [
        (match.start(), textwrap.dedent(match[2]))
        for match in FENCED.finditer(text)
        if match[1] == "python"
    ]
    rest = FENCED.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    found += _indented(rest)
    return [source for _, source in sorted(found)]


def _indented(text):
    """Places and sources of sessions, and of code outside of sections."""
    found, place, block, section = [], 0, "", ""
    for line in text.splitlines(keepends=True):
        if line.strip() and not line.startswith(" "):
            section = line if SECTION.fullmatch(line.strip()) else ""
        is_session = ">>>" in line or (">>>" in block and line.strip())
        is_code = not section and line.startswith("    ")
        if is_session or is_code or (block and not line.strip()):
            block += line
        elif block:
            found.append((place - len(block), block))
            block = ""
        place += len(line)
    found.append((place - len(block), block))
    return [(at, textwrap.dedent(code)) for at, code in found if code.strip()]


def run_example(source, names):
    """Runs an example with the names that it takes for granted.

    Raises:
      AssertionError: a session shows something else.
      Exception: whatever the code raises.
    """
    if ">>>" not in source:
        exec(compile(source, "<example>", "exec"), names)
        return
    parser = doctest.DocTestParser()
    test = parser.get_doctest(source, names, "example", None, 0)
    shown = []
    runner = doctest.DocTestRunner(verbose=False)
    result = runner.run(test, out=shown.append, clear_globs=False)
    assert result.attempted, "a session without a command"
    assert not result.failed, "".join(shown)
