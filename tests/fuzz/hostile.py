"""Texts that anybody may have written, and a watch on what is done for them."""

import contextlib
import json
import random
import sys

# What JSON may say in place of what is expected.
VALUES = [
    None,
    True,
    False,
    0,
    -1,
    2**31,
    2**63,
    2**64,
    -(10**400),
    1.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "0",
    "\ud800",
    "\0",
    "e\u0301\u202e",
    "os:system",
    "__import__('os')",
    "../../etc/passwd",
    "x" * 70_000,
    [],
    [[]],
    [None],
    ["a", "a"],
    [0] * 100,
    {},
    {"a": {}},
    {"__array__": "0"},
    {"__class__": "os"},
]
PIECES = [
    "[",
    "]",
    "{",
    "}",
    ",",
    ":",
    '"',
    "'",
    "\\",
    "\n",
    "-",
    "-1",
    "1e999",
    "NaN",
    "-Infinity",
    "null",
    "true",
    "9" * 5000,
    "9" * 400,
    "[" * 3000,
    '{"a":' * 300,
    "\0",
    "\ud800",
    "\u202e",
    "\u0663",
    "x" * 5000,
    "(2,)f4",
    "\\ud800",
    "=",
    ";",
    "$(id)",
    " ",
]
WHOLE = [
    "",
    " ",
    "\n",
    "\ufeff{}",
    "null",
    "[" * 100_000,
    '{"a":' * 20_000,
    "[" * 500 + "]" * 500,
    "9" * 100_000,
    '"' + "x" * 2_000_000 + '"',
    "[" + "0," * 200_000 + "0]",
    '{"a": 1, "a": 2}',
    "NaN",
    '"\\ud800"',
]


def inputs(documents, count, seed, *, is_text=True):
    """Yields texts, each made of a valid one or of nothing.

    Args:
      documents: Valid texts.
      count: How many to yield.
      seed: Of what is drawn.
      is_text: Whether they are str; bytes otherwise, UTF-8 or not.
    """
    draw = random.Random(seed)
    for number in range(count):
        text = _text(draw, draw.choice(documents), number)
        if is_text:
            yield text
            continue
        data = text.encode("utf-8", "surrogatepass")
        if draw.random() < 0.2:
            data = _with_bytes(draw, data)
        yield data


def _text(draw, text, number):
    kind = draw.random()
    # Those are slow to make and to read, so each comes a few times only.
    if number < len(WHOLE):
        return WHOLE[number]
    if kind < 0.05:
        size = draw.randrange(200)
        return "".join(map(chr, draw.choices(range(1, 0x3000), k=size)))
    if kind < 0.5:
        with contextlib.suppress(ValueError):
            value = _changed(draw, json.loads(text))
            return json.dumps(value, ensure_ascii=draw.random() < 0.9)
    for _ in range(draw.randint(1, 4)):
        start = draw.randint(0, len(text))
        stop = min(len(text), start + draw.choice((0, 0, 1, 3, 12, 60)))
        letter = chr(draw.randint(1, 255))
        pieces = (draw.choice(PIECES), "", text[start:stop] * 2, letter)
        piece = draw.choice(pieces)
        text = text[:start] + piece + text[stop:]
    return text


def _changed(draw, value):
    """A value of JSON with one inner value changed, moved, or left out."""
    places = list(_places(value))
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        if not places:
            return draw.choice(VALUES)
        holder, key = draw.choice(places)
        if isinstance(holder, dict):
            if key not in holder:
                continue
        elif key >= len(holder):
            continue
        act = draw.random()
        if act < 0.15:
            del holder[key]
        elif act < 0.25 and isinstance(holder, dict):
            holder[draw.choice(("", "x", "__array__", "\ud800"))] = holder.pop(
                key
            )
        elif act < 0.35:
            other, index = draw.choice(places)
            with contextlib.suppress(LookupError):
                # A copy: a value in itself is no JSON.
                holder[key] = json.loads(json.dumps(other[index]))
        elif act < 0.4:
            for _ in range(draw.choice((2, 60, 80))):
                holder[key] = draw.choice(([holder[key]], {"a": holder[key]}))
        else:
            holder[key] = json.loads(json.dumps(draw.choice(VALUES)))
    return value


def _places(value):
    keys = ()
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = range(len(value))
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _with_bytes(draw, data):
    start = draw.randint(0, len(data))
    known = (b"\xff", b"\xc3", b"\x00", b"\xed\xa0\x80", b"\x80PK")
    junk = draw.choice((*known, draw.randbytes(9)))
    if draw.random() < 0.1:
        return data.decode("utf-8", "ignore").encode("utf-16")
    return data[:start] + junk + data[start + draw.randrange(4) :]


# What nobody does for the sake of a text.
_EVENTS = (
    *("compile", "exec", "import", "ctypes.", "code.__new__", "os.", "pickle."),
    *("marshal.", "pty.", "shutil.", "socket.", "subprocess."),
    *("tempfile.", "urllib.", "webbrowser."),
)
_HARMLESS = ("os.listdir", "os.scandir", "os.putenv", "os.unsetenv")
_seen = None


def _hook(event, args):
    if _seen is None:
        return
    if event == "open":
        # (path, mode, flags): written to, or made.
        if args[2] & 0o3 or (args[1] and set(args[1]) & set("wax+")):
            _seen.append((event, args[0]))
    elif event.startswith(_EVENTS) and event not in _HARMLESS:
        _seen.append((event, args[:1]))


_has_hook = []


@contextlib.contextmanager
def watched():
    """Yields a list of what was run, imported or written meanwhile."""
    global _seen
    if not _has_hook:
        # It stays for as long as the process; outside of here it does nothing.
        sys.addaudithook(_hook)
        _has_hook.append(True)
    found = []
    before = set(sys.modules)
    _seen = found
    try:
        yield found
    finally:
        _seen = None
    found += [("modules", name) for name in set(sys.modules) - before]
