"""Checkpoints of loops of one's own: what is kept, and what is refused."""

import json
import logging
import os
import shutil
import sys

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.checkpoint.directory import manifest
from keras_strategies.checkpoint.directory.lock import LOCK
from keras_strategies.checkpoint.directory.names import find_steps
from keras_strategies.checkpoint.directory.verify import verify
from keras_strategies.testing import assert_replicated
from tests.support.checkpoint import damages
from tests.support.combinations import combine
from tests.support.commands import python
from tests.support.models import chain
from tests.support.plain_keras import mirrored

ROWS = np.arange(40, dtype="float32").reshape(10, 4)


class Noted:
    """An object with a state of its own."""

    def __init__(self, state=None):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def parts(replicas, units=3):
    """A model, its optimizer and an iterator of a strategy, by name."""
    strategy = mirrored(replicas)
    with strategy.scope():
        model = chain(
            (4,),
            keras.layers.Dense(units),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
        )
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    dataset = strategy.experimental_make_numpy_dataset(ROWS).batch(3)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    return {"model": model, "optimizer": optimizer, "data": iterator}


def values(found):
    variables = [*found["model"].variables, *found["optimizer"].variables]
    return [np.asarray(variable.value) for variable in variables]


def scramble(found):
    for variable in [*found["model"].variables, *found["optimizer"].variables]:
        value = np.asarray(variable.value)
        variable.assign(value + np.ones((), value.dtype))


def save(directory, found, step=5, **kwargs):
    checkpoint = ks.checkpoint.Checkpoint(**found)
    with ks.checkpoint.CheckpointManager(checkpoint, directory) as manager:
        manager.save(step, **kwargs)
    return checkpoint


def make_manager(directory, found, **kwargs):
    checkpoint = ks.checkpoint.Checkpoint(**found)
    return ks.checkpoint.CheckpointManager(checkpoint, directory, **kwargs)


@pytest.mark.parametrize("replicas", combine([1, 2, 3, 8], every=2))
def test_all_is_restored_on_any_number_of_replicas(tmp_path, replicas):
    first = parts(2)
    scramble(first)
    next(first["data"])
    save(tmp_path, first)
    second = parts(replicas)
    with make_manager(tmp_path, second) as manager:
        assert manager.restore_or_initialize() == 5
    for actual, expected in zip(values(second), values(first), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert second["data"].get_state() == first["data"].get_state()
    assert second["data"].get_state()["step"] == 1
    assert_replicated(second["model"])


def test_an_empty_directory_restores_nothing(tmp_path):
    found = parts(2)
    before = values(found)
    with make_manager(tmp_path / "new", found) as manager:
        assert manager.restore_or_initialize() is None
        assert manager.latest_checkpoint is None
        assert manager.checkpoints == []
    for actual, expected in zip(values(found), before, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_the_newest_are_kept_and_the_best(tmp_path):
    found = parts(1)
    keep = ks.checkpoint.Keep(last=2, best="loss")
    with make_manager(tmp_path, found, keep=keep) as manager:
        for step, loss in enumerate([3.0, 1.0, 2.0, float("nan"), 4.0]):
            manager.save(step, metrics={"loss": loss})
        manager.wait()
        names = [os.path.basename(path) for path in manager.checkpoints]
        assert names == ["1", "3", "4"]
        assert manager.latest_checkpoint == str(tmp_path / "4")
        with pytest.raises(ValueError, match="saved once.*Received: step=4"):
            manager.save(4)
    assert ks.checkpoint.latest_checkpoint(tmp_path) == str(tmp_path / "4")


def test_steps_are_saved_in_their_order(tmp_path):
    """Of a lower one a restart would know nothing."""
    found = parts(1)
    with make_manager(tmp_path, found, keep=2) as manager:
        manager.save(jnp.int32(5))
        with pytest.raises(ValueError, match="saved once.*Received: step=5"):
            manager.save(5)
        manager.save(np.int64(7))
        with pytest.raises(ValueError, match="step=6, but .* contains step 7"):
            manager.save(6)
        manager.wait()
        names = [os.path.basename(path) for path in manager.checkpoints]
        assert names == ["5", "7"]


def test_states_alone_are_kept(tmp_path):
    with make_manager(tmp_path, {"noted": Noted({"a": 1})}) as manager:
        manager.save(1)
    noted = Noted()
    with make_manager(tmp_path, {"noted": noted}) as manager:
        assert manager.restore_or_initialize() == 1
    assert noted.state == {"a": 1}


def test_values_are_those_of_the_call_of_save(tmp_path):
    """Writing goes on while the variables get other values."""
    found = parts(2)
    with make_manager(tmp_path, found) as manager:
        expected = values(found)
        manager.save(1)
        scramble(found)
        manager.wait()
        manager.restore(1)
    for actual, value in zip(values(found), expected, strict=True):
        np.testing.assert_array_equal(actual, value)


def test_states_keep_their_types(tmp_path):
    state = {
        "number": 1 / 3,
        "nothing": None,
        "is_so": True,
        "inf": float("inf"),
        "pair": (1, [2.5, "text"]),
        "array": np.arange(6, dtype="int16").reshape(2, 3),
        "empty": np.zeros((0, 3), "float32"),
        "numpy": np.float32(0.1),
    }
    save(tmp_path, {"noted": Noted(state), "variable": keras.Variable(1.0)})
    noted = Noted()
    variable = keras.Variable(0.0)
    with make_manager(tmp_path, {"noted": noted, "variable": variable}) as m:
        m.restore_or_initialize()
    restored = noted.state
    for name in ("array", "empty"):
        array = restored.pop(name)
        np.testing.assert_array_equal(array, state[name])
        assert array.dtype == state.pop(name).dtype
    assert restored == state | {"numpy": float(np.float32(0.1))}
    assert float(variable) == 1.0


def test_what_is_kept_in_lists_and_dicts(tmp_path):
    def made(value):
        return {
            "nets": {"a": [keras.Variable(value), keras.Variable(2 * value)]},
            "metric": keras.metrics.Mean(),
            "seed": keras.random.SeedGenerator(int(value)),
            "layer": keras.layers.Dense(2),
        }

    first, second = made(3.0), made(0.0)
    first["metric"].update_state(7.0)
    for found in (first, second):
        found["layer"].build((None, 2))
    save(tmp_path, first)
    with make_manager(tmp_path, second) as manager:
        manager.restore_or_initialize()
    assert [float(v) for v in second["nets"]["a"]] == [3.0, 6.0]
    assert float(second["metric"].result()) == 7.0
    assert np.asarray(second["seed"].state.value).tolist() == [3, 0]
    np.testing.assert_array_equal(
        second["layer"].get_weights()[0], first["layer"].get_weights()[0]
    )


def test_another_model_is_refused_and_its_differences_are_listed(tmp_path):
    save(tmp_path, parts(2))
    wider = parts(2, units=5)
    before = values(wider)
    with make_manager(tmp_path, wider) as manager:
        match = r"float32\[4, 3\] in the checkpoint, float32\[4, 5\] here"
        with pytest.raises(ValueError, match=match):
            manager.restore_or_initialize()
    for actual, expected in zip(values(wider), before, strict=True):
        np.testing.assert_array_equal(actual, expected)
    fewer = {"model": parts(2)["model"]}
    with (
        make_manager(tmp_path, fewer) as manager,
        pytest.raises(ValueError, match="optimizer adam.*not in the model"),
    ):
        manager.restore_or_initialize()
    more = parts(2) | {"noted": Noted({})}
    with (
        make_manager(tmp_path, more) as manager,
        pytest.raises(ValueError, match="without a state of 'noted'"),
    ):
        manager.restore_or_initialize()


def test_a_damaged_checkpoint_is_put_aside_and_its_step_saved_again(
    tmp_path, caplog
):
    found = parts(2)
    with make_manager(tmp_path, found) as manager:
        manager.save(1)
        scramble(found)
        manager.save(2)
        expected = values(found)
    damages.DAMAGES[0](tmp_path / "2")
    with (
        caplog.at_level(logging.WARNING),
        make_manager(tmp_path, found) as manager,
    ):
        assert manager.restore_or_initialize() == 1
        with pytest.raises(
            ks.checkpoint.DamagedCheckpoint, match="2 is damaged"
        ):
            manager.restore(2)
        scramble(found)
        manager.save(2)
    assert "It was renamed to 2.damaged-" in caplog.text
    again = parts(2)
    with make_manager(tmp_path, again) as manager:
        assert manager.restore_or_initialize() == 2
    for actual, value in zip(values(again), expected, strict=True):
        np.testing.assert_array_equal(actual, value)


@pytest.mark.parametrize("has_manifest", [False, True])
def test_a_save_killed_around_its_manifest_leaves_nothing(
    tmp_path, caplog, monkeypatch, has_manifest
):
    found = parts(2)
    write = manifest.write_manifest

    def copy(path, step, facts):
        # As a process leaves it that is killed here.
        if step == 2 and not has_manifest:
            shutil.copytree(tmp_path / "run", tmp_path / "killed")
        written = write(path, step, facts)
        if step == 2 and has_manifest:
            shutil.copytree(tmp_path / "run", tmp_path / "killed")
        return written

    with (
        monkeypatch.context() as patch,
        make_manager(tmp_path / "run", found) as manager,
    ):
        patch.setattr(manifest, "write_manifest", copy)
        for step in (1, 2):
            manager.save(step)
        manager.wait()
    assert find_steps(tmp_path / "run") == [1, 2]
    with make_manager(tmp_path / "killed", found) as manager:
        assert manager.restore_or_initialize() == 1
        manager.save(2)
    assert set(os.listdir(tmp_path / "killed")) == {LOCK, "1", "2"}
    assert caplog.text == ""


def test_a_save_writes_a_deleted_lock_again(tmp_path):
    with make_manager(tmp_path, parts(1)) as manager:
        (tmp_path / LOCK).unlink()
        manager.save(1)
        assert (tmp_path / LOCK).exists()


def test_an_error_in_the_background_is_raised_at_the_next_call(tmp_path):
    found = parts(1)
    with make_manager(tmp_path, found) as manager:
        manager.save(1)
        manager.wait()
        manager.save(2)
        manager._storage._finished.wait()
        manager._storage._error = OSError("no space")
        with pytest.raises(OSError, match="no space"):
            manager.save(3)
        manager.save(3)
    assert manager.restore(3) is None


@pytest.mark.parametrize(
    ("made", "error", "match"),
    [
        (lambda: ks.checkpoint.Checkpoint(a=3), TypeError, "type int"),
        (
            lambda: ks.checkpoint.CheckpointManager(3, "x"),
            TypeError,
            "must be a `ks.checkpoint.Checkpoint`",
        ),
    ],
)
def test_wrong_arguments(made, error, match):
    with pytest.raises(error, match=match):
        made()


def test_what_no_checkpoint_can_hold_is_refused(tmp_path):
    found = {"noted": Noted({"a": {1, 2}}), "v": keras.Variable(1.0)}
    with (
        make_manager(tmp_path, found) as manager,
        pytest.raises(TypeError, match=r"type set at \['noted'\]\['a'\]"),
    ):
        manager.save(1)


def test_weights_are_loaded_and_exported(tmp_path):
    strategy = mirrored(2)

    def build():
        return chain((4,), keras.layers.Dense(2), keras.layers.Dropout(0.1))

    with strategy.scope():
        model = build()
        model.compile("adam", "mse")
    directory = tmp_path / "run"
    model.fit(
        ROWS,
        ROWS[:, :2],
        batch_size=5,
        epochs=2,
        verbose=0,
        callbacks=[ks.callbacks.Checkpoint(directory)],
    )
    expected = model.predict(ROWS, verbose=0)
    plain = build()
    assert ks.checkpoint.load_weights(plain, directory) == 4
    np.testing.assert_allclose(plain(ROWS), expected, rtol=1e-5, atol=1e-6)
    assert ks.checkpoint.load_weights(plain, directory / "2") == 2
    assert not np.allclose(plain(ROWS), expected)
    assert ks.checkpoint.load_weights(plain, directory, step=4) == 4
    plain.save_weights(tmp_path / "model.weights.h5")
    plain.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(ROWS), plain(ROWS))
    with pytest.raises(FileNotFoundError, match="no valid checkpoint"):
        ks.checkpoint.load_weights(plain, tmp_path)
    text = "3 is damaged: the directory does not exist"
    with pytest.raises(ks.checkpoint.DamagedCheckpoint, match=text):
        ks.checkpoint.load_weights(plain, directory, step=3)
    with pytest.raises(ks.checkpoint.DamagedCheckpoint, match=text):
        ks.checkpoint.load_weights(plain, directory / "3")
    with pytest.raises(TypeError, match="must be a Keras model"):
        ks.checkpoint.load_weights(directory, plain)
    unbuilt = keras.Sequential([keras.layers.Dense(2)], name="late")
    with pytest.raises(ValueError, match="'late', which is not built"):
        ks.checkpoint.load_weights(unbuilt, directory)
    other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    with pytest.raises(ValueError, match="with another model"):
        ks.checkpoint.load_weights(other, directory)


_PLAIN_ORBAX = """
import json, sys
import jax
import numpy as np
import orbax.checkpoint as ocp

path = sys.argv[1]
reader = ocp.PyTreeCheckpointer()
as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
names = reader.metadata(path).item_metadata.tree
arrays = reader.restore(
    path, restore_args=jax.tree.map(lambda _: as_numpy, names)
)
assert "keras_strategies" not in sys.modules
print(json.dumps(jax.tree.map(lambda a: float(a.sum()), arrays["model"])))
"""


def test_plain_orbax_reads_the_arrays(tmp_path):
    """As docs/checkpoints.md says; with one device, saved on two."""
    found = parts(2)
    save(tmp_path, found)
    done = python(
        "-c",
        _PLAIN_ORBAX,
        str(tmp_path / "5" / "state"),
        env=os.environ | {"XLA_FLAGS": ""},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    sums = json.loads(done.stdout.splitlines()[-1])
    kernel = next(name for name in sums if name.endswith("kernel"))
    expected = float(jax.numpy.sum(found["model"].layers[0].kernel.value))
    assert sums[kernel] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_nobody_holds_the_arrays_after_a_save(tmp_path, replicas):
    """The next step would copy the whole state first."""
    found = parts(replicas)
    kernel = found["model"].layers[0].kernel
    kernel.assign(kernel.value + 1)
    before = sys.getrefcount(kernel.value)
    with make_manager(tmp_path, found) as manager:
        manager.save(1)
        during = sys.getrefcount(kernel.value)
    assert during == before


@pytest.mark.parametrize(
    ("replicas", "units"), combine([1, 2], [3, 300_000], every=2)
)
def test_saved_is_what_was_there_before_the_next_step(
    tmp_path, units, replicas
):
    with mirrored(replicas).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units)])
        model.compile("sgd", "mse")
    rows = np.zeros((10, units), "float32")
    model.fit(ROWS, rows, batch_size=2, verbose=0)
    kernel = model.layers[0].kernel
    with make_manager(tmp_path, {"model": model}) as manager:
        kept = np.array(kernel.value)
        manager.save(1)
        # Its steps take the buffers.
        model.fit(ROWS, rows, batch_size=2, verbose=0)
        assert not np.array_equal(kernel.value, kept)
        manager.restore(1)
    np.testing.assert_array_equal(kernel.value, kept)


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", "float16", "float8_e4m3fn", "float32", "int8", "uint32"]
    + ["int32", "bool"],
)
def test_each_dtype_is_restored(tmp_path, dtype):
    with mirrored(2).scope():
        variable = keras.Variable(
            np.arange(6).reshape(2, 3), dtype=dtype, trainable=False
        )
    expected = np.array(variable.value)
    assert expected.any()
    with make_manager(tmp_path, {"only": variable}) as manager:
        manager.save(1)
        variable.assign(np.zeros((2, 3)))
        manager.restore(1)
    assert str(variable.value.dtype) == dtype
    np.testing.assert_array_equal(np.asarray(variable.value), expected)


def ended(script, *args):
    """A script that ended without an error, and what it printed."""
    done = python("-c", script, *map(str, args), timeout=120)
    assert done.returncode == 0, done.stderr
    return done


_WITHOUT_CLOSE = """
import sys
import keras
import numpy as np
import keras_strategies as ks

class Best:
    def get_state(self):
        return {"best": np.ones(3)}

    def set_state(self, state):
        pass

with ks.MirroredStrategy().scope():
    variable = keras.Variable(np.ones((100, 1000)))
checkpoint = ks.checkpoint.Checkpoint(variable=variable, best=Best())
manager = ks.checkpoint.CheckpointManager(checkpoint, sys.argv[1])
if sys.argv[2] == "is lost":
    def fail(*args, **kwargs):
        raise OSError("the disk is gone")
    manager._storage._checkpointer.save = fail
manager.save(1)
"""


@pytest.mark.multi_process
@pytest.mark.parametrize("case", combine(["is kept", "is lost"], every=2))
def test_a_script_that_ends_right_after_a_save(tmp_path, case):
    done = ended(_WITHOUT_CLOSE, tmp_path, case)
    assert ("the disk is gone" in done.stderr) == (case == "is lost")
    assert "could not be saved" not in done.stderr or case == "is lost"
    assert "RuntimeError" not in done.stderr
    # Whatever is there is good.
    variable = keras.Variable(np.zeros((100, 1000)))
    found = {"variable": variable, "best": Noted()}
    with make_manager(tmp_path, found) as manager:
        step = manager.restore_or_initialize()
    assert step == (1 if case == "is kept" else None)
    assert np.asarray(variable.value).all() == (case == "is kept")


_INTERRUPTED = """
import os
import signal
import sys
import threading
import time
import keras
import numpy as np
import keras_strategies as ks

with ks.MirroredStrategy().scope():
    variable = keras.Variable(np.ones((100, 1000)))
checkpoint = ks.checkpoint.Checkpoint(variable=variable)
manager = ks.checkpoint.CheckpointManager(checkpoint, sys.argv[1])
save = manager._storage._checkpointer.save
waits, is_heard, is_told = (threading.Event() for _ in range(3))

def slowly(*args, **kwargs):
    is_told.wait(60)
    save(*args, **kwargs)

def stop(*_):
    if not is_heard.is_set():
        is_heard.set()
        raise KeyboardInterrupt

# What runs in a shell's background inherits that Ctrl-C is ignored.
signal.signal(signal.SIGINT, stop)

def interrupt():
    waits.wait(60)
    # One that comes just before the main thread waits does not wake it.
    while not is_heard.wait(0.1):
        os.kill(os.getpid(), signal.SIGINT)

class Finished(threading.Event):
    def wait(self, timeout=None):
        waits.set()
        return super().wait(timeout)

manager._storage._checkpointer.save = slowly
manager.save(1)
threading.Thread(target=interrupt, daemon=True).start()
try:
    manager._storage._finished.__class__ = Finished
    manager.wait()
except KeyboardInterrupt:
    print("interrupted", manager.checkpoints)
is_told.set()
if sys.argv[2] == "waits again":
    manager.wait()
    print("waited", [os.path.basename(path) for path in manager.checkpoints])
if sys.argv[2] == "forks":
    child = os.fork()
    if not child:
        sys.exit(0)
    print("child", os.waitpid(child, 0)[1], flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "then", combine(["ends", "waits again", "forks"], every=3)
)
def test_ctrl_c_while_a_save_is_waited_for(tmp_path, then):
    done = ended(_INTERRUPTED, tmp_path, then)
    assert "interrupted []" in done.stdout
    assert ("waited ['1']" in done.stdout) == (then == "waits again")
    assert ("child 0" in done.stdout) == (then == "forks")
    assert "could not be saved" not in done.stderr
    assert find_steps(tmp_path) == [1]
    assert (tmp_path / "1" / "manifest.json").exists()


def two_layers(width=3):
    return chain(
        (4,),
        keras.layers.Dense(width),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5, seed=1),
        keras.layers.Dense(2),
    )


def test_weights_of_a_managers_checkpoint_are_loaded(tmp_path):
    strategy = ks.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        model, other = two_layers(), two_layers(5)
        model.compile("adam", "mse", metrics=["mae"])
    model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    checkpoint = ks.checkpoint.Checkpoint(
        step=keras.Variable(3), other=other, net=model
    )
    with ks.checkpoint.CheckpointManager(checkpoint, tmp_path) as manager:
        manager.save(1)
    plain = two_layers()
    assert ks.checkpoint.load_weights(plain, tmp_path) == 1
    for ours, theirs in zip(plain.weights, model.weights, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    wide = two_layers(5)
    ks.checkpoint.load_weights(wide, tmp_path, name="other")
    np.testing.assert_array_equal(
        wide.weights[0].numpy(), other.weights[0].numpy()
    )
    with pytest.raises(ValueError, match="contains 'step', 'other', 'net'"):
        ks.checkpoint.load_weights(plain, tmp_path, name="gone")
    with pytest.raises(ValueError, match="with another other"):
        ks.checkpoint.load_weights(plain, tmp_path, name="other")
    with pytest.raises(ValueError, match="which was saved with another"):
        ks.checkpoint.load_weights(two_layers(7), tmp_path)
    with pytest.raises(ValueError, match="is not built"):
        ks.checkpoint.load_weights(
            keras.Sequential([keras.layers.Dense(3)]), tmp_path
        )


def test_of_two_models_that_fit_one_is_named(tmp_path):
    first, second = two_layers(), two_layers()
    checkpoint = ks.checkpoint.Checkpoint(first=first, second=second)
    with ks.checkpoint.CheckpointManager(checkpoint, tmp_path) as manager:
        manager.save(0)
    plain = two_layers()
    before = plain.get_weights()
    with pytest.raises(ValueError, match="name='first'"):
        ks.checkpoint.load_weights(plain, tmp_path)
    np.testing.assert_array_equal(plain.get_weights()[0], before[0])
    ks.checkpoint.load_weights(plain, tmp_path, name="second")
    np.testing.assert_array_equal(
        plain.get_weights()[0], second.get_weights()[0]
    )


def test_a_run_began_when_its_checkpoint_of_step_0_says(tmp_path):
    checkpoint = ks.checkpoint.Checkpoint(model=two_layers())
    for step in (0, 1):
        with ks.checkpoint.CheckpointManager(checkpoint, tmp_path) as manager:
            manager.save(step)
    first, second = (
        verify(path).facts["started"] for path in manager.checkpoints
    )
    assert first == second
