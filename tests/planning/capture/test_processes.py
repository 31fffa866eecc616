"""Processes of `keras-strategies plan`: requests and answers."""

import io
import json
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from keras_strategies.cluster.user_code import make_command_line
from keras_strategies.planning.capture import processes, worker
from keras_strategies.planning.capture.capture import Capture
from keras_strategies.planning.capture.errors import PlanError
from keras_strategies.planning.capture.request import Request
from keras_strategies.planning.capture.script import run_script
from tests.planning.capture.scripts import HEAD, MODEL
from tests.planning.made import step as make_step
from tests.support.combinations import combine, few

REQUEST = Request(script="", topology="v5e:2x2", layout="replicated")


def test_a_request_is_what_it_was():
    request = Request(
        topology="v5e:4x4",
        layout="sharded",
        script="a b.py",
        arguments=("--x", '"'),
    )
    assert Request.from_text(request.to_text()) == request


@pytest.mark.tpu
@pytest.mark.parametrize("first", combine(["", "os.fork()"], every=2))
def test_a_process_ends_with_the_command(tmp_path, first):
    # In a session of its own with what its script starts.
    own = {"start_new_session": bool(first)}
    (tmp_path / "sleeper.py").write_text(
        "import os, pathlib, time\n"
        f"{first}\npathlib.Path('started').touch()\ntime.sleep(600)"
    )
    request = Request(topology="v5e:4x4", layout="slots", script="sleeper.py")
    worker_words = [*make_command_line(worker.__name__, "1", request.to_text())]
    command = (
        "import os, subprocess, time\n"
        f"subprocess.Popen([*{worker_words!r}, str(os.getpid())], **{own})\n"
        "while not os.path.exists('started'): time.sleep(0.1)"
    )
    # Whoever is left of them would hold the pipe open.
    subprocess.run(
        [sys.executable, "-c", command],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=60,
    )


@pytest.mark.slow
def test_a_child_of_the_process_says_nothing():
    code = """
import os, sys
from keras_strategies.planning.capture import script as script_lib
from keras_strategies.planning.capture import worker
from keras_strategies.planning.capture.request import Request
def plan(self):
    child = os.fork()
    if not child:
        self.send(step={"of": "the child"})
        os._exit(0)
    os.waitpid(child, 0)
    return {"of": "the process"}
worker.Worker.plan = plan
request = Request(script="", topology="", layout="")
worker.main("1", request.to_text(), str(os.getppid()))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True
    )
    assert json.loads(ended.stdout) == {"step": {"of": "the process"}}


def answers_of(tmp_path, text, layout="replicated"):
    """What the process of a script answers, which ends in time."""
    (tmp_path / "script.py").write_text(text)
    command = (
        "import json, sys\n"
        "from keras_strategies.planning.capture import processes\n"
        "from keras_strategies.planning.capture.request import Request\n"
        "request = Request.from_text(sys.argv[1])\n"
        "plan, is_complete = processes.plan_in_processes([request])\n"
        "assert is_complete\n"
        "print(json.dumps(plan.to_json()))\n"
    )
    given = {"topology": "v5e:2x2", "layout": layout}
    request = Request(script="script.py", **given)
    words = [sys.executable, "-c", command, request.to_text()]
    ended = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    (step,) = json.loads(ended.stdout)["steps"]
    return step


@pytest.mark.tpu
def test_what_a_script_forks_ends_with_it(tmp_path):
    text = (
        "import os, pathlib, time\n"
        "child = os.fork()\n"
        "if child == 0:\n    time.sleep(600)\n    os._exit(0)\n"
        "pathlib.Path('child').write_text(str(child))\n"
        "raise ValueError('of the script')\n"
    )
    step = answers_of(tmp_path, text)
    assert "of the script" in step["error"]
    child = pathlib.Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    # A zombie has ended, and waits for who has started it.
    assert not child.exists() or child.read_text().split()[2] == "Z"


@pytest.mark.tpu
def test_nothing_is_said_about_an_output_that_is_none(tmp_path):
    text = "import os\nos._exit(5)"
    step = answers_of(tmp_path, text)
    assert step["error"] == "The planning process ended with exit status 5."


@pytest.mark.tpu
def test_what_libtpu_writes_is_no_output_of_a_script(tmp_path):
    text = HEAD + "import sys\nsys.exit('need 32 replicas')"
    step = answers_of(tmp_path, text)
    assert step["error"] == (
        "The script exited with 'need 32 replicas' before it trained a model."
    )


THREADS = (
    HEAD
    + """
import queue, threading
def fit():
    {first}
    strategy = ks.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    results.put(model.fit(np.zeros((8, 4)), np.zeros((8, 3))))
results, ends = queue.Queue(), threading.Event()
threading.Thread(target=fit).start()
{last}
"""
)


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("first", "last"),
    few(
        [
            # The main thread waits for what is not to come.
            ("", "results.get()"),
            # The script ends before its thread trains.
            ("ends.wait()", "ends.set()"),
        ],
        every=2,
    ),
)
def test_scripts_that_train_in_a_thread_are_planned(tmp_path, first, last):
    text = THREADS.format(first=first, last=last)
    step = answers_of(tmp_path, text)
    assert step["error"] is None
    assert step["rows"] == 8


@pytest.mark.tpu
@pytest.mark.parametrize(
    "code", combine(["raise SystemExit(3)", "print(1 / 0)", ""], every=3)
)
def test_a_child_of_the_script_answers_nothing(tmp_path, code):
    text = (
        HEAD
        + "import os\nchild = os.fork()\n"
        + f"if not child:\n    {code or 'model = None'}\n"
        + "else:\n"
        + "    os.waitpid(child, 0)\n"
        + "    strategy = ks.MirroredStrategy()\n"
        + MODEL.replace("\n", "\n    ")
        + "\n    model.fit(x, y)\n"
    )
    step = answers_of(tmp_path, text)
    assert step["error"] is None
    assert step["rows"] == 32


@pytest.mark.tpu
def test_an_error_of_a_thread_is_reported(tmp_path):
    text = THREADS.format(first="raise ValueError('of the thread')", last="")
    step = answers_of(tmp_path, text)
    assert "ValueError (line 8 of script.py): of the thread" in step["error"]


@pytest.mark.tpu
def test_a_warning_about_the_step_is_part_of_the_advice(tmp_path):
    loss = "def loss(y, p):\n    return keras.ops.mean(p) ** 2\n"
    model = MODEL.replace('"mse"', "loss")
    text = HEAD + loss + "strategy = ks.MirroredStrategy()\n" + model
    # 52 rows, so that the replicas can share them evenly.
    text = text.replace("(50, ", "(52, ") + "model.fit(x, y, batch_size=52)"
    step = answers_of(tmp_path, text)
    assert step["error"] is None
    start = "This step runs over the global batch instead of replica by replica"
    assert step["advice"].startswith(start)
    assert step["advice"].count(start) == 1


@pytest.mark.tpu
def test_an_error_of_the_step_names_the_line(tmp_path):
    layer = """
class Noise(keras.layers.Layer):
    def call(self, x, training=None):
        # Keras refuses random operations without a seed in a compiled step.
        return x + keras.random.normal((40,)) if training else x
"""
    model = MODEL.replace("keras.layers.Dense(30)", "Noise()")
    text = HEAD + layer + "strategy = ks.MirroredStrategy()\n" + model
    step = answers_of(tmp_path, text + "model.fit(x, x)")
    assert step["error"].startswith(
        "ValueError (line 9 of script.py): Exception encountered when calling "
        "Noise.call()."
    )
    assert "use seeded random ops" in step["error"]
    assert "\x1b" not in step["error"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("ValueError('x')", r"^ValueError \(line 4 of {}\): x$"),
        ("PlanError('x')", "^Line 4 of {}: x$"),
    ],
)
@pytest.mark.parametrize("is_module", [False, True])
def test_an_error_names_the_line(
    tmp_path, monkeypatch, error, expected, is_module
):
    (tmp_path / "package").mkdir()
    text = f"""from keras_strategies.planning.capture.errors import PlanError

def call(*args):
    raise {error}
call()
"""
    path = tmp_path / "package" / "train_it.py"
    path.write_text(text)
    monkeypatch.chdir(tmp_path)
    script = "package.train_it" if is_module else str(path)
    request = Request(
        topology="", layout="", script=script, is_module=is_module
    )
    with pytest.raises(Exception, match="x") as raised:
        run_script(Capture(jax.devices()[:8], None), request)
    text = worker._describe_error(raised.value, request)
    assert re.match(expected.format(re.escape(script)), text)


def test_the_refusal_is_reported_without_the_words_that_were_added():
    try:
        try:
            raise PlanError("the reason")
        except PlanError as error:
            raise RuntimeError(f"in a layer: {error}") from None
    except RuntimeError as error:
        text = worker._describe_error(error, REQUEST)
    assert text == "the reason"


def test_a_cycle_of_errors_is_described():
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first
    text = worker._describe_error(first, REQUEST)
    assert text == "ValueError: first"


@pytest.mark.tpu
def test_a_model_axis_needs_one_run_even_of_a_script_with_threads(tmp_path):
    model = (
        "model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])"
    )
    transformer = """x = inputs = keras.Input((8, 16))
        x = keras.layers.MultiHeadAttention(4, 4, name="attention")(x, x)
        x = keras.layers.Dense(64, "gelu", name="up")(x)
        model = keras.Model(inputs, keras.layers.Dense(16, name="down")(x))"""
    text = THREADS.format(first="open('runs', 'a').write('.')", last="")
    text = text.replace(model, transformer)
    text = text.replace("(8, 4)", "(8, 8, 16)").replace("(8, 3)", "(8, 8, 16)")
    step = answers_of(tmp_path, text, layout="model:2")
    assert step["error"] is None
    assert step["num_replicas"] == 2
    weights = 4 * (4 * 16 * 16 + 4 * 16 + 2 * 16 * 64 + 64 + 16)
    assert step["memory"]["weights"] < 0.6 * weights
    assert (tmp_path / "runs").read_text() == "."


def test_a_long_error_is_cut(tmp_path):
    file = io.StringIO()

    def fail():
        raise ValueError("\x1b[1mwords\x1b[0m" + "x" * 2_000_000)

    worker.Worker(REQUEST, file).answer(fail)
    answer = json.loads(file.getvalue())
    assert answer["error"].startswith("ValueError: wordsxxx")
    assert answer["error"].endswith("x ...")
    assert len(answer["error"]) < 2100


def test_a_crash_of_the_compiler_is_named():
    lines = [
        "*** SIGABRT received by PID 8251 (TID 8351) on cpu 0 ***",
        "F1126 17:42:08.038623    8351 spmd_partitioner.cc:560] Check failed: "
        "target.IsManualSubgroup() (0 vs. 1) ",
        "E1126 17:42:09.225166    8351 process_state.cc:708] RAW: Raising",
    ]
    text = processes._explain_end(-6, lines, {})
    assert "spmd_partitioner.cc:560] Check failed: target." in text
    assert "SIGABRT" not in text


def test_a_script_s_layout_that_is_also_a_default_is_shown_once():
    names = ["sharded", "slots", "sharded"]
    steps = [make_step(layout=name) for name in names]
    steps += [None, make_step(topology="v5e:8x8", layout="sharded")]
    found = processes._drop_duplicates(steps)
    assert [(x.topology, x.layout) for x in found] == [
        ("v5e:4x4", "sharded"),
        ("v5e:4x4", "slots"),
        ("v5e:8x8", "sharded"),
    ]
