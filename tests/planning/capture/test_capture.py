"""`keras-strategies plan`: scripts are caught at their first training step."""

import contextlib
import io
import json
import runpy
import sys
import threading
import types

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.names import dry_run
from keras_strategies.planning.capture import script as script_lib
from keras_strategies.planning.capture.capture import Capture
from keras_strategies.planning.capture.errors import (
    PlanError,
    ScriptEnded,
    StepCaptured,
)
from keras_strategies.planning.capture.request import Request
from keras_strategies.planning.capture.worker import Worker
from keras_strategies.planning.compile import run_step
from keras_strategies.planning.compile.layouts import Layout, parse_layout
from tests.docs import test_notebooks
from tests.multi_process import epochs_with_manager
from tests.planning.capture.scripts import HEAD, MIRRORED, MODEL

DIVIDED = "variable_partitioner=ks.experimental."
LOOP = (
    MIRRORED
    + """
optimizer = keras.optimizers.SGD()
def step(batch):
    x, y = batch
    def loss():
        return keras.ops.mean((model(x) - y) ** 2)
    value, grads = ks.value_and_grad(loss, model.trainable_variables)()
    optimizer.apply(grads, model.trainable_variables)
    return value
"""
)


def caught(tmp_path, text, layout=None, **kwargs):
    """What is caught of a script, on a slice of eight CPU devices."""
    script = tmp_path / "script.py"
    script.write_text(text)
    capture = Capture(jax.devices()[:8], layout, **kwargs)
    with capture.install(), pytest.raises(StepCaptured):
        runpy.run_path(str(script), run_name="__main__")
    return capture


@pytest.mark.parametrize(
    ("call", "rows"),
    [
        ("model.fit(x, y, batch_size=24)", 24),
        ("model.fit(x, y)", 32),
        ("model.fit(x[:7], y[:7])", 7),
        ("model.fit(x[:30], y[:30], validation_split=0.5)", 15),
        ("model.train_on_batch(x[:16], y[:16])", 16),
        (
            "import tensorflow as tf\n"
            "data = tf.data.Dataset.from_tensor_slices((x, y)).batch(20)\n"
            "model.fit(data, shuffle=False)",
            20,
        ),
        (
            "model.fit(strategy.experimental_distribute_dataset("
            "strategy.experimental_make_numpy_dataset((x, y)).batch(40)))",
            40,
        ),
        (
            "model.fit(x, y, batch_size=2 * strategy.num_replicas_in_sync, "
            "callbacks=[keras.callbacks.ModelCheckpoint('/nowhere/a.keras')])",
            16,
        ),
    ],
)
def test_a_fit_is_caught_with_its_first_batch(tmp_path, call, rows):
    capture = caught(tmp_path, MIRRORED + call)
    step = capture.step
    assert step.rows == rows
    assert step.mesh.num_replicas == 8
    # A batch that the replicas cannot share evenly is divided by XLA.
    is_even = rows % 8 == 0
    assert ("all_reduce" in step.lower(rows).as_text()) == is_even
    assert capture.step._model.built


@pytest.mark.parametrize(
    "text",
    [
        "for size in (24, 16, 8):\n"
        "    try:\n        model.fit(x, y, batch_size=size)\n"
        "    except:\n        continue\n",
        "try:\n    model.fit(x, y, batch_size=24)\n"
        "finally:\n    model.get_weights()\n",
    ],
)
def test_the_first_step_counts_whatever_the_script_does_after(tmp_path, text):
    script = tmp_path / "script.py"
    script.write_text(MIRRORED + text)
    capture = Capture(jax.devices()[:8], None)
    request = Request(topology="", layout="replicated", script=str(script))
    assert script_lib.run_script(capture, request).step.rows == 24


MANY = MIRRORED.replace('"mse")', '"mse", steps_per_execution=64)')


@pytest.mark.parametrize(
    ("call", "steps"),
    [
        ("model.fit(x, y, batch_size=8)", 7),
        ("model.fit(x, y, batch_size=8, steps_per_epoch=3)", 3),
        ("model.fit(((x[:8], y[:8]) for _ in range(99)), shuffle=False)", 64),
        ("model.train_on_batch(x[:8], y[:8])", 1),
        (
            "model.fit(strategy.experimental_distribute_dataset("
            "strategy.experimental_make_numpy_dataset((x, y)).batch(8)))",
            7,
        ),
    ],
)
def test_steps_of_the_first_program(tmp_path, call, steps):
    step = caught(tmp_path, MANY + call).step
    assert step.steps == steps
    text = step.lower(8).as_text()
    shape = f"{steps}x8x40" if steps > 1 else "8x40"
    assert f"tensor<{shape}xf32>" in text


def test_a_thread_of_a_script_may_train(tmp_path, monkeypatch):
    text = MIRRORED + (
        "import threading\n"
        "def call():\n"
        "    try:\n        model.fit(x, y, batch_size=24)\n"
        "    except BaseException:\n        pass\n"
        "threads = [threading.Thread(target=call) for _ in range(3)]\n"
        "[thread.start() for thread in threads]\n"
        "import meeting\n"
        "assert meeting.planning.wait(60)\n"
        "meeting.ended.set()\n"
    )
    meeting = types.ModuleType("meeting")
    meeting.planning, meeting.ended = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "meeting", meeting)
    seen = []

    def plan(step, layout):
        seen.append(step)
        meeting.planning.set()
        # The script has ended then, or does so soon.
        assert meeting.ended.wait(60)

    script = tmp_path / "script.py"
    script.write_text(text)
    request = Request(topology="", layout="replicated", script=str(script))
    capture = Capture(jax.devices()[:8], None, plan=plan)
    script_lib.run_script(capture, request)
    assert [step.rows for step in seen] == [24]


def test_rows_of_each_replica(tmp_path):
    text = MIRRORED + "model.fit(x, y, batch_size=24)"
    assert caught(tmp_path, text, is_per_replica=True).step.rows == 24 * 8


def test_weights_of_a_caught_model_have_no_values(tmp_path):
    capture = caught(tmp_path, MIRRORED + "model.fit(x, y)")
    with pytest.raises(RuntimeError, match="has a shape and no value"):
        capture.step._model.get_weights()


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        (
            "strategy.experimental_distribute_dataset("
            "strategy.experimental_make_numpy_dataset((x, y)).batch(20))",
            # As many as all replicas share evenly.
            24,
        ),
        (
            "strategy.distribute_datasets_from_function(lambda context: "
            "iter([(x[:3], y[:3])]))",
            24,
        ),
        (
            "strategy.distribute_datasets_from_function(lambda context: "
            "((x[:n], y[:n]) for n in "
            "[context.get_per_replica_batch_size(16)]))",
            16,
        ),
    ],
)
def test_a_loop_is_caught_at_its_first_run(tmp_path, data, rows):
    loop = f"\nfor batch in {data}:\n    strategy.run(step, args=(batch,))\n"
    step = caught(tmp_path, LOOP + loop).step
    assert step.rows == rows
    small, large = (step.lower(n).as_text() for n in (rows, 2 * rows))
    assert f"tensor<{rows}x40xf32>" in small
    assert f"tensor<{2 * rows}x40xf32>" in large
    assert "all_reduce" in small
    held = step.state_bytes()
    assert held["weights"] == 4 * (40 * 30 + 30)


def test_slots_on_the_host_are_counted_for_run(tmp_path):
    kind = f"{DIVIDED}SlotsOnly(min_size=1, offload='optimizer')"
    text = LOOP.replace("MirroredStrategy()", f"MirroredStrategy({kind})")
    text = text.replace("SGD()", "Adam()")
    text += "\nwith strategy.scope():\n    "
    text += "optimizer.build(model.trainable_variables)"
    text += "\nstrategy.run(step, args=((x[:4], y[:4]),))"
    step = caught(tmp_path, text).step
    # For each device, an eighth of the kernel's slots and those of the bias.
    assert step.host_bytes() == 2 * 4 * (40 * 30 / 8 + 30)
    assert step.state_bytes()["slots"] == 0


def test_components_of_a_planned_batch_are_their_shapes(tmp_path):
    loop = """
data = strategy.experimental_make_numpy_dataset((x, y)).batch(20)
data = strategy.experimental_distribute_dataset(data)
for batch in data:
    parts = strategy.experimental_local_results(batch)
    assert len(parts) == strategy.num_replicas_in_sync
    assert parts[0][0].shape == batch[0].values[0].shape == (3, 40)
    strategy.run(step, args=(batch,))
"""
    assert caught(tmp_path, LOOP + loop).step.rows == 24


def test_two_batches_keep_their_shares(tmp_path):
    loop = """
data = strategy.experimental_make_numpy_dataset((x, y))
one, two = (
    next(iter(strategy.experimental_distribute_dataset(data.batch(n))))
    for n in (16, 48)
)
strategy.run(lambda one, two: (step(one), step(two)), args=(one, two))
"""
    step = caught(tmp_path, LOOP + loop).step
    assert step.rows == 48
    text = step.lower(56).as_text()
    # All replicas share each evenly.
    assert "tensor<56x40xf32>" in text
    assert "tensor<24x40xf32>" in text


def test_a_run_that_trains_nothing_is_reported(tmp_path):
    call = "\nstrategy.run(lambda: keras.ops.sum(model.weights[0]))"
    capture = caught(tmp_path, LOOP + call)
    capture.step.lower(8)
    assert "'<lambda>', which does not write" in capture.step.note
    trained = "\nstrategy.run(step, args=((x[:4], y[:4]),))"
    capture = caught(tmp_path, LOOP + trained)
    capture.step.lower(8)
    assert not capture.step.note


def test_reasons_about_attention_stay_beside_it(tmp_path, monkeypatch):
    reasons = {"a reason": None}
    monkeypatch.setattr(
        run_step, "collect_reasons", lambda: contextlib.nullcontext(reasons)
    )
    call = "\nstrategy.run(lambda: keras.ops.sum(model.weights[0]))"
    capture = caught(tmp_path, LOOP + call)
    capture.step.lower(8)
    assert "where it has a reason." in capture.step.note
    assert "'<lambda>', which does not write" in capture.step.note


def test_a_step_is_planned_in_the_contexts_of_its_script(tmp_path):
    def text_of(call):
        texts = []
        caught(
            tmp_path,
            HEAD + "import jax\n" + MIRRORED + call,
            plan=lambda step, layout: texts.append(
                step.lower(step.rows).as_text()
            ),
        )
        return texts[0]

    highest = "with jax.default_matmul_precision('highest'):\n"
    assert "HIGHEST" in text_of(f"{highest}    model.fit(x, y)")
    assert "HIGHEST" not in text_of("model.fit(x, y)")


def test_an_error_while_planning_is_not_the_scripts(tmp_path, monkeypatch):
    def fail(worker, step, layout):
        raise ValueError("of the plan")

    monkeypatch.setattr(Worker, "_plan_step", fail)
    script = tmp_path / "script.py"
    text = "try:\n    model.fit(x, y)\nexcept Exception:\n    print(1 / 0)"
    script.write_text(MIRRORED + text)
    request = Request(topology="", layout="replicated", script=str(script))
    answers = io.StringIO()
    Worker(request, answers).plan_script(jax.devices()[:8])
    (answer,) = answers.getvalue().splitlines()
    assert "ValueError: of the plan" in json.loads(answer)["error"]


def test_arrays_are_passed_whole(tmp_path):
    call = "\nstrategy.run(step, args=((x[:4], y[:4]),))"
    text = caught(tmp_path, LOOP + call).step.lower(8).as_text()
    assert "tensor<4x40xf32>" in text


@pytest.mark.parametrize(
    ("layout", "partitioner", "expected"),
    [
        (None, "", "replicated"),
        (None, "FullySharded()", "sharded"),
        (None, "FullySharded(8)", "sharded"),
        (None, "FullySharded(4)", "sharded:4"),
        (None, "FullySharded(min_size=1)", "FullySharded(min_size=1)"),
        (parse_layout("slots"), "", "slots"),
        (Layout(), "FullySharded()", "replicated"),
    ],
)
def test_the_layout_is_the_scripts_or_the_one_that_is_named(
    tmp_path, layout, partitioner, expected
):
    given = partitioner and f"{DIVIDED}{partitioner}"
    text = HEAD + f"strategy = ks.MirroredStrategy({given})\n" + MODEL
    capture = caught(tmp_path, text + "model.fit(x, y)", layout)
    assert capture.layout == expected


@pytest.mark.parametrize(
    "strategy",
    [
        "ks.MirroredStrategy(['cpu:0'])",
        "ks.MultiWorkerMirroredStrategy()",
        "ks.TPUStrategy()",
        "ks.OneDeviceStrategy('cpu:0')",
    ],
)
def test_every_strategy_becomes_the_slices(tmp_path, strategy, monkeypatch):
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    text = HEAD + f"strategy = {strategy}\n" + MODEL + "model.fit(x, y)"
    capture = caught(tmp_path, text, parse_layout("sharded:4"))
    mesh = capture.step.mesh
    assert (mesh.num_replicas, mesh.shards) == (8, 4)


def test_sequences_that_cores_share_are_planned_so(tmp_path):
    strategy = """
topology = ks.tpu.experimental.initialize_tpu_system()
strategy = ks.TPUStrategy(
    device_assignment=ks.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=[4, 1, 1, 1], num_replicas=2
    ),
    context_parallel=True,
    variable_partitioner=ks.experimental.FullySharded(),
)
"""
    script = HEAD + strategy + MODEL + "model.fit(x, y)"
    capture = caught(tmp_path, script)
    mesh = capture.step.mesh
    assert (mesh.num_replicas, mesh.context_parallel) == (2, True)
    assert capture.layout == "sharded"


def of_processes(directory):
    sys.argv = [
        "train.py",
        json.dumps({"directory": directory, "killed_in": None}),
    ]
    epochs_with_manager.main()


@pytest.mark.parametrize(
    "notebook",
    [
        lambda directory: test_notebooks.custom_training(8, directory),
        lambda directory: test_notebooks.distributed_training(8),
        lambda directory: test_notebooks.save_and_load(8, directory),
        of_processes,
    ],
    ids=["custom training", "training", "save and load", "own loop"],
)
def test_ports_of_tfs_notebooks_are_caught(notebook, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    capture = Capture(jax.devices()[:8], None)
    with capture.install(), pytest.raises(StepCaptured):
        notebook(str(tmp_path))
    step = capture.step
    is_even = step.rows % 8 == 0
    text = step.lower(step.rows).as_text()
    assert ("all_reduce" in text) == is_even
    assert not list(tmp_path.rglob("*"))


def test_checkpoints_are_neither_read_nor_written(tmp_path):
    text = (
        MIRRORED
        + f"""
checkpoint = ks.checkpoint.Checkpoint(model=model)
with ks.checkpoint.CheckpointManager(checkpoint, {str(tmp_path)!r}) as manager:
    assert manager.restore_or_initialize() is None
    assert manager.latest_checkpoint is None
    checkpoint.restore("/nowhere/ckpt").assert_consumed().expect_partial()
    model.fit(x, y, callbacks=[ks.callbacks.Checkpoint({str(tmp_path)!r})])
"""
    )
    assert caught(tmp_path, text).step.rows == 32
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_everything_is_restored_after_the_script(tmp_path):
    before = keras.Model.make_train_function, jax.distributed.initialize
    caught(tmp_path, MIRRORED + "model.fit(x, y)")
    after = keras.Model.make_train_function, jax.distributed.initialize
    assert after == before
    assert dry_run.get() is None
    strategy = ks.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    model.fit(np.zeros((4, 3)), np.zeros((4, 2)), verbose=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            HEAD
            + "model = keras.Sequential([keras.layers.Dense(2)])\n"
            + "model.compile('sgd', 'mse')\n"
            + "model.fit(np.zeros((4, 3)), np.zeros((4, 2)))",
            "not created or compiled",
        ),
        (
            HEAD
            + "import jax\n"
            + "from keras_strategies.spmd.mesh import ReplicaMesh\n"
            + "strategy = ks.Strategy(ReplicaMesh(devices=jax.devices()[:2]))\n"
            + MODEL
            + "model.fit(x, y)",
            "uses another one .*, on 2 x 'cpu'",
        ),
        (HEAD + "ks.get_strategy().run(lambda: 1)", "on 1 x 'cpu'"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(tmp_path, text, message):
    script = tmp_path / "script.py"
    script.write_text(text)
    capture = Capture(jax.devices()[4:], None)
    with capture.install(), pytest.raises(PlanError, match=message):
        runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("is_module", [False, True])
def test_a_planned_script_imports_what_python_would(
    tmp_path, monkeypatch, is_module
):
    directory, elsewhere = tmp_path / "directory", tmp_path / "elsewhere"
    for one in (directory, elsewhere):
        one.mkdir()
        (one / "beside_it.py").write_text(f"IN = {one.name!r}")
        (one / "train_it.py").write_text(
            "import sys\nimport beside_it\nraise SystemExit(beside_it.IN)"
        )
    monkeypatch.chdir(directory)
    before = sys.path[:]
    script = "train_it" if is_module else str(elsewhere / "train_it.py")
    request = Request(
        topology="", layout="", script=script, is_module=is_module
    )
    expected = "directory" if is_module else "elsewhere"
    with pytest.raises(ScriptEnded, match=expected):
        script_lib.run_script(Capture(jax.devices()[:8], None), request)
    assert sys.path == before
    del sys.modules["beside_it"]
