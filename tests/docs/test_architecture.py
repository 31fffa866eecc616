"""Walks, decisions and file names of docs/, compared with the code."""

import functools
import gc
import inspect
import io
import json
import pathlib
import re
import sys
import threading

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.cli.main import main
from keras_strategies.hooks import metric_rules
from keras_strategies.passes.row_kinds import marks
from keras_strategies.planning.capture import processes
from keras_strategies.planning.capture.request import Request
from keras_strategies.planning.capture.worker import Worker

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "architecture.md"
DECISIONS = sorted((PAGE.parent / "decisions").glob("[0-9]*.md"))
INDEX = PAGE.parent / "decisions" / "index.md"
PACKAGE = pathlib.Path(ks.__file__).parent
ENTRY = re.compile(r"^\d+\. `([\w/.]+)`", re.M)
NAMED = re.compile(r"`([\w/]+\.py)`")


def section(title):
    """The text below a heading of the page."""
    _, _, rest = PAGE.read_text("utf-8").partition(f"\n### {title}\n")
    assert rest, f"no section {title!r}"
    return re.split(r"\n##+ ", rest)[0]


def walk(title):
    """A walk's files in their order."""
    return ENTRY.findall(section(title))


# What a strategy with several cores a replica patches, for the whole process.
PATCH = "passes/constrained_operations.py"


# Names, types, attributes and containers of objects are no steps of a walk.
HELPERS = (
    "names/",
    "_types.py",
    "keras_bridge/step_context.py",
    "passes/specs.py",
    "spmd/identity.py",
    PATCH,
)
# What interprets a trace calls a rule for each equation: it is one file here.
INTERPRETER = "passes/row_kinds"
KERAS = str(pathlib.Path(keras.__file__).parent)


class Recorder:
    """Files of the package in the order of their first call.

    Args:
      first: The file and the function with which it begins; None for at once.
      last: The file before which it ends; None for never.
      parts: The files and functions while which entries are recorded, in the
        order of their first calls.

    Attributes:
      files: The files, in the order of their first call.
      threads: The thread of each file's first call.
      entries: Pairs of files, in the order of their first call: the second was
        called by the first. "" is Keras. Calls by JAX and by other libraries
        are those of the file that called these. Equal pairs are recorded once:
        a loop over variables or equations goes one way. Helpers, properties and
        what `INTERPRETER` calls are not recorded.
      begun: The parts that were called.
    """

    def __init__(self, first=None, last=None, parts=()):
        self.files, self.threads, self.entries = [], {}, {}
        self._first, self._last = first, last
        self._has_begun, self._has_ended = first is None, False
        self._parts, self._stacks = list(parts), {}
        self.begun = set()

    def __enter__(self):
        # A generator that is collected is called once more, to be closed.
        gc.disable()
        threading.setprofile(self._look)
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        threading.setprofile(None)
        gc.enable()

    @property
    def returns(self):
        """The entries into files that earlier entries had entered."""
        entered = [called for _, called in self.entries]
        return [
            entry
            for k, entry in enumerate(self.entries)
            if entry[1] in entered[:k]
        ]

    def _look(self, frame, event, _):
        if self._parts and event in ("call", "return"):
            self._follow(frame, event)
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(PACKAGE)):
            return
        if code.co_name == "<module>" or self._has_ended:
            return
        file = pathlib.Path(code.co_filename).relative_to(PACKAGE).as_posix()
        if file == PATCH:
            return
        self._has_begun |= (file, code.co_name) == self._first
        self._has_ended |= self._has_begun and file == self._last
        if self._has_begun and not self._has_ended and file not in self.files:
            self.files.append(file)
            self.threads[file] = threading.current_thread()

    def _follow(self, frame, event):
        """Records an entry if a call goes to another file.

        For each thread there is a stack of what its frames belong to: a file,
        the file that called this one, and whether a part has begun.
        """
        thread = threading.get_ident()
        if thread not in self._stacks:
            # Its first call is one by the file that waits for the thread.
            callers = [s[-1] for s in self._stacks.values() if s]
            self._stacks[thread] = callers[-1:]
        stack = self._stacks[thread]
        if event == "return":
            del stack[-1:]
            return
        caller, before, is_in = stack[-1] if stack else ("", "", False)
        code = frame.f_code
        name = find_file(code.co_filename)
        part = name, getattr(code, "co_qualname", code.co_name)
        if part in self._parts and self._parts.index(part) <= len(self.begun):
            if caller and (not self.begun or caller == name):
                # It begins where Keras, or another file, calls this one.
                self.entries[before, caller] = None
            self.begun.add(part)
            is_in = True
        elif name is None or is_apart(name, frame):
            stack.append((caller, before, is_in))
            return
        name = INTERPRETER if name.startswith(INTERPRETER) else name
        if caller == INTERPRETER and name:
            name = caller
        self._has_ended |= name == self._last
        if is_in and name and name != caller and not self._has_ended:
            self.entries[caller, name] = None
        stack.append((name, caller if name != caller else before, is_in))


@functools.cache
def find_file(path):
    """The file of the package, "" for one of Keras, or None for others."""
    if path.startswith(str(PACKAGE)):
        return pathlib.Path(path).relative_to(PACKAGE).as_posix()
    return "" if path.startswith(KERAS) else None


def is_apart(name, frame):
    """Whether a call is one of a helper, or reads an attribute."""
    if name.startswith(HELPERS):
        return True
    owner = type(frame.f_locals.get("self"))
    attribute = inspect.getattr_static(owner, frame.f_code.co_name, None)
    return isinstance(attribute, property | functools.cached_property)


def strategy_of(replicas=2):
    return ks.MirroredStrategy(devices=jax.devices()[:replicas])


def compiled():
    with strategy_of().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("adam", "mse", metrics=["mae"])
    return model


def fit(model, **arguments):
    x, y = np.ones((16, 4), "float32"), np.ones((16, 3), "float32")
    return model.fit(x, y, batch_size=8, verbose=0, **arguments)


def check(title, files):
    """The page's files were all recorded, in their order, among others."""
    listed = walk(title)
    assert len(listed) > 3
    assert [file for file in files if file in listed] == listed


# The maximum numbers of entries and of returns. They may only fall.
COUNTS = {"A row of data": (30, 11), "A gradient": (8, 1), "A loss": (8, 1)}


def check_counts(title, recorder):
    """The page's table has the numbers of a walk, and they have not grown."""
    entries, returns = COUNTS[title]
    assert len(recorder.entries) <= entries, list(recorder.entries)
    assert len(recorder.returns) <= returns, recorder.returns
    row = rf"^\| {title.lower()} \| .* \| {entries} / {returns} \|$"
    assert re.search(row, PAGE.read_text("utf-8"), re.M)


def rooms_left(listed):
    """The room of each file whose next one is in another room."""
    rooms = [file.rpartition("/")[0] for file in listed]
    pairs = zip(rooms, [*rooms[1:], ""], strict=True)
    return [room for room, after in pairs if room != after]


def test_the_walk_of_a_row():
    model = compiled()
    parts = [
        ("fit/binding.py", "Binding._make_feed"),
        ("step/step_functions.py", "_read_execution"),
    ]
    with Recorder(last="spmd/dispatch.py", parts=parts) as recorder:
        fit(model)
    rooms = ("fit", "data", "spmd", "step")
    check("A row of data", [f for f in recorder.files if f.startswith(rooms)])
    check_counts("A row of data", recorder)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("title", "maximum"), [("A row of data", 15), ("A plan", 14)]
)
def test_a_walk_goes_back_to_no_room_and_is_short(title, maximum):
    listed = walk(title)
    assert len(listed) <= maximum
    left = rooms_left(listed)
    assert len(left) == len(set(left)), left


@pytest.mark.quick
def test_a_return_to_a_room_is_seen():
    assert rooms_left(["a/x.py", "b/y.py", "b/z.py", "a/w.py"]) == [
        *("a", "b", "a")
    ]


@pytest.mark.quick
@pytest.mark.parametrize("change", [list.reverse, lambda files: files.pop()])
def test_a_walk_in_another_order_is_seen(change):
    files = walk("A variable")
    check("A variable", ["spmd/other.py", *files])
    change(files)
    with pytest.raises(AssertionError):
        check("A variable", files)


def test_the_walk_of_a_variable():
    with strategy_of().scope(), Recorder() as recorder:
        layer = keras.layers.Dense(3)
        layer.build((None, 4))
        optimizer = keras.optimizers.Adam()
        optimizer.build(layer.trainable_variables)
    check("A variable", recorder.files)


PARTS = {
    "A gradient": [
        ("hooks/optimizer_hooks.py", "stateless_apply"),
        ("step/traced.py", "Traced.combine_sums"),
        ("spmd/buffers.py", "with_combined_sums.<locals>.compute"),
    ],
    "A loss": [
        ("hooks/loss_hooks.py", "compute_loss"),
        ("step/router.py", "Router._analyze"),
        ("step/route.py", "decide"),
    ],
}


@pytest.mark.parametrize("title", PARTS)
def test_the_walk_through_a_step(title):
    model = compiled()
    with Recorder(parts=PARTS[title]) as recorder:
        fit(model)
    assert recorder.begun == set(PARTS[title])
    assert [file for _, file in recorder.entries] == walk(title)
    check_counts(title, recorder)


def test_a_recorder_counts_entries_and_returns(monkeypatch):
    """A call that a file gets back from another one is a return."""

    def mixes_rows(*args):
        marks.mark_both_ways(1.0, marks.VALUES)
        return original(*args)

    original = metric_rules.mixes_rows
    monkeypatch.setattr(metric_rules, "mixes_rows", mixes_rows)
    with Recorder(parts=PARTS["A loss"][:1]) as recorder:
        fit(compiled())
    calls = {("hooks/loss_hooks.py", INTERPRETER)}
    calls.add(("hooks/metric_rules.py", INTERPRETER))
    assert calls < set(recorder.entries)
    assert len(calls.intersection(recorder.returns)) == 1


def test_the_walk_of_a_checkpoint(tmp_path):
    model = compiled()
    begins = ("callbacks/checkpoint.py", "_save")
    with Recorder(begins) as recorder:
        fit(model, callbacks=[ks.callbacks.Checkpoint(tmp_path)])
    rooms = ("callbacks", "checkpoint", "fit/callbacks")
    check("A checkpoint", [f for f in recorder.files if f.startswith(rooms)])
    main = threading.current_thread()
    listed = walk("A checkpoint")
    in_thread = [recorder.threads[file] is not main for file in listed]
    assert "The last two files run in a background thread" in " ".join(
        section("A checkpoint").split()
    )
    assert in_thread == [False] * (len(listed) - 2) + [True] * 2


def test_the_walk_of_a_plan(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(
        "import keras, numpy as np, keras_strategies as ks\n"
        "with ks.MirroredStrategy().scope():\n"
        "    model = keras.Sequential([keras.Input((4,))]\n"
        "        + [keras.layers.Dense(4) for _ in range(4)])\n"
        "    model.compile('sgd', 'mse')\n"
        "model.fit(np.ones((8, 4)), np.ones((8, 4)))\n"
    )
    request = Request(topology="", layout="replicated", script=str(script))
    with Recorder() as command, pytest.raises(SystemExit, match="2"):
        main(["plan", str(script)])
    assert "required: --topology" in capsys.readouterr().err
    with Recorder() as parent:
        (failed,) = processes.plan_in_processes([request])[0].steps
    assert "Received: ''" in failed.error
    answers = io.StringIO()
    child = Worker(request, answers)
    with Recorder() as worker:
        child.plan_script(jax.devices()[:2])
    step = json.loads(answers.getvalue().splitlines()[-1])["step"]
    assert step["error"] is None
    with Recorder() as report:
        str(ks.Plan(steps=[failed]))
    files = [
        *command.files,
        *(f for f in parent.files if f.startswith("planning/capture")),
        *worker.files,
        *report.files,
    ]
    rooms = ("cli", "planning")
    check("A plan", [f for f in dict.fromkeys(files) if f.startswith(rooms)])


def test_a_recorder_sees_threads():
    with Recorder() as recorder:
        thread = threading.Thread(target=ks.has_strategy)
        thread.start()
        thread.join()
    assert recorder.threads["strategy/current.py"] is thread


@pytest.mark.quick
def test_a_change_begins_in_three_files_at_most():
    text = PAGE.read_text("utf-8").partition("## Where to change things")[2]
    pattern = r"^\| (.*) \| (`.*) \| `(.*)` \|$"
    rows = re.findall(pattern, text.split("\n## ")[0], re.M)
    assert len(rows) >= 25
    for change, files, tests in rows:
        assert (PAGE.parents[1] / "tests" / tests).exists(), change
        named = NAMED.findall(files)
        assert 1 <= len(named) <= 3, change
        assert all((PACKAGE / file).exists() for file in named), change


def missing_files(text):
    """Returns the files that a page names and that do not exist."""
    files = [p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py")]
    root = PAGE.parents[1]
    return [
        name
        for name in sorted(set(NAMED.findall(text)))
        if not any(f"/{file}".endswith(f"/{name}") for file in files)
        and not (root / name).exists()
        and not any(root.glob(f"*/**/{name}"))
    ]


@pytest.mark.quick
@pytest.mark.parametrize(
    "page", [PAGE, INDEX, *DECISIONS], ids=lambda page: page.name
)
def test_files_that_a_page_names_exist(page):
    assert missing_files(page.read_text("utf-8")) == []


@pytest.mark.quick
def test_missing_files_are_found():
    text = "`spmd/mesh.py`, `spmd/no.py`, `tests/test_layers.py`, `tests/no.py`"
    assert missing_files(text) == ["spmd/no.py", "tests/no.py"]


@pytest.mark.quick
def test_pages_name_many_files():
    pages = [PAGE, *DECISIONS]
    texts = [page.read_text("utf-8") for page in pages]
    named = [set(NAMED.findall(text)) for text in texts]
    assert len(named[0]) > 60
    assert sum(map(len, named[1:])) > 60


@pytest.mark.quick
@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.name)
def test_a_decision_has_its_sections(page):
    lines = page.read_text("utf-8").splitlines()
    assert [line for line in lines if line.startswith("#")][1:] == [
        *("## Context", "## Decision", "## Alternatives", "## Reopen when")
    ]
    assert lines[0].startswith("# ")


@pytest.mark.quick
def test_the_index_lists_each_decision_once_in_order():
    text = INDEX.read_text("utf-8")
    rows = re.findall(r"^\| \[(\d+)\]\((.+?)\) \| .* \| `(.+)` \|$", text, re.M)
    assert [file for _, file, _ in rows] == [page.name for page in DECISIONS]
    numbers = [f"{number:02}" for number in range(1, len(DECISIONS) + 1)]
    assert [number for number, _, _ in rows] == numbers
    assert [page.name[:2] for page in DECISIONS] == numbers
    for _, file, module in rows:
        assert (PACKAGE / module / "__init__.py").exists(), file
