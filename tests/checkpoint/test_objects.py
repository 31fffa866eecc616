"""`save`, `restore`, `write` and `read` of `Checkpoint`, as in tf scripts."""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.support.plain_keras import dense, mirrored

X = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
Y = X.sum(1, keepdims=True)


def model_of(*, seed=1, width=4):
    return keras.Sequential(
        [keras.Input((3,)), dense(width, seed=seed), dense(1, seed=seed)]
    )


def trained(strategy, model, optimizer, steps=3):
    """A loop of one's own, as in tf's tutorial."""

    def step(x, y):
        def loss():
            return keras.ops.mean((model(x) - y) ** 2) / replicas

        value, grads = ks.value_and_grad(loss, model.trainable_variables)()
        optimizer.apply(grads, model.trainable_variables)
        return value

    replicas = strategy.num_replicas_in_sync
    rows = strategy.experimental_distribute_dataset(batches())
    for _ in range(steps):
        for batch in rows:
            strategy.run(step, args=batch)
    return [np.asarray(w) for w in model.get_weights()]


def batches():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_the_distributed_training_tutorial(tmp_path):
    """Saved by prefix, and restored into a new model and a new optimizer."""
    prefix = os.path.join(tmp_path / "training_checkpoints", "ckpt")
    strategy = mirrored(2)
    with strategy.scope():
        model, optimizer = model_of(), keras.optimizers.Adam()
        checkpoint = ks.checkpoint.Checkpoint(optimizer=optimizer, model=model)
    for number in (1, 2):
        weights = trained(strategy, model, optimizer)
        path = checkpoint.save(prefix)
        assert path == str(tmp_path / "training_checkpoints" / str(number))
    directory = tmp_path / "training_checkpoints"
    assert ks.checkpoint.latest_checkpoint(directory) == path

    new_model, new_optimizer = model_of(seed=9), keras.optimizers.Adam()
    checkpoint = ks.checkpoint.Checkpoint(
        optimizer=new_optimizer, model=new_model
    )
    status = checkpoint.restore(ks.checkpoint.latest_checkpoint(directory))
    status.assert_consumed()
    assert_same(new_model.get_weights(), weights)
    assert int(new_optimizer.iterations.value) == 12
    slots = [v.value for v in new_optimizer.variables]
    assert_same(slots, [v.value for v in optimizer.variables])
    # And both go on alike, on the replicas.
    more = trained(strategy, model, optimizer)
    with strategy.scope():
        model, optimizer = model_of(seed=8), keras.optimizers.Adam()
    checkpoint = ks.checkpoint.Checkpoint(optimizer=optimizer, model=model)
    checkpoint.restore(path)
    assert_same(trained(strategy, model, optimizer), more)
    assert_replicated(model)


def test_a_compiled_model_gets_its_optimizer_back(tmp_path):
    def compiled():
        model = model_of()
        model.compile("adam", "mse", metrics=["mae"])
        return model

    strategy = mirrored(2)
    with strategy.scope():
        model, new = compiled(), compiled()
    model.fit(X, Y, verbose=0)
    path = ks.checkpoint.Checkpoint(model=model).save(tmp_path / "a")
    ks.checkpoint.Checkpoint(model=new).restore(path).assert_consumed()
    for each in (model, new):
        each.fit(X, Y, verbose=0, shuffle=False)
    assert_same(new.get_weights(), model.get_weights())
    slots = [v.value for v in new.optimizer.variables]
    assert_same(slots, [v.value for v in model.optimizer.variables])


def test_optimizers_of_several_models_are_built_first(tmp_path):
    def objects():
        return {
            "generator": model_of(),
            "discriminator": model_of(width=3),
            "generator_optimizer": keras.optimizers.Adam(),
        }

    saved, new = objects(), objects()
    weights = saved["generator"].trainable_variables
    saved["generator_optimizer"].build(weights)
    path = ks.checkpoint.Checkpoint(**saved).save(tmp_path / "a")
    checkpoint = ks.checkpoint.Checkpoint(**new)
    with pytest.raises(ValueError, match=r"Call `optimizer\.build\(model"):
        checkpoint.restore(path)
    new["generator_optimizer"].build(new["generator"].trainable_variables)
    checkpoint.restore(path).assert_consumed()


def test_an_optimizer_that_was_not_built_when_saved(tmp_path):
    def objects():
        return {"model": model_of(), "optimizer": keras.optimizers.Adam()}

    path = ks.checkpoint.Checkpoint(**objects()).save(tmp_path / "a")
    ks.checkpoint.Checkpoint(**objects()).restore(path).assert_consumed()


def test_layers_that_the_model_has_not_are_no_full_match(tmp_path):
    path = ks.checkpoint.Checkpoint(model=model_of()).save(tmp_path / "a")
    new = keras.Sequential([keras.Input((3,)), dense(4)])
    status = ks.checkpoint.Checkpoint(model=new).restore(path)
    with pytest.raises(ValueError, match=r"also contains .*dense_\d+\.kernel"):
        status.assert_consumed()


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: [{"m": m}]])
def test_a_compiled_model_is_restored_when_it_is_built(tmp_path, wrap):
    model = model_of()
    model.compile("adam", "mse")
    model.fit(X, Y, verbose=0)
    path = ks.checkpoint.Checkpoint(model=wrap(model)).save(tmp_path / "a")
    new = keras.Sequential([dense(4), dense(1)])
    new.compile("adam", "mse")
    build = new.build
    ks.checkpoint.Checkpoint(model=wrap(new)).restore(path)
    np.testing.assert_array_equal(new(X), model(X))
    assert new.build is build
    pairs = zip(new.optimizer.variables, model.optimizer.variables, strict=True)
    for ours, theirs in pairs:
        np.testing.assert_array_equal(ours.value, theirs.value)


def test_no_write_deletes_what_was_saved(tmp_path):
    checkpoint = ks.checkpoint.Checkpoint(v=keras.Variable(1.0))
    for _ in range(3):
        checkpoint.save(tmp_path / "ckpt")
    with pytest.raises(ValueError, match="contains 3 checkpoints. Use `save`"):
        checkpoint.write(tmp_path)
    assert len(list(tmp_path.glob("[0-9]*"))) == 3


def test_no_save_after_close_or_in_a_replica(tmp_path):
    strategy = mirrored(2)
    checkpoint = ks.checkpoint.Checkpoint(v=keras.Variable(1.0))
    manager = ks.checkpoint.CheckpointManager(checkpoint, tmp_path)
    for save in (manager.save, lambda: checkpoint.save(tmp_path / "x" / "c")):
        with pytest.raises(RuntimeError, match="Call it outside"):
            strategy.run(save)
    manager.close()
    with pytest.raises(RuntimeError, match="Create a new manager"):
        manager.save()
    assert not manager.checkpoints


def test_a_part_of_it_and_its_status(tmp_path):
    model, count = model_of(), keras.Variable(5)
    ks.checkpoint.Checkpoint(model=model, count=count).save(tmp_path / "a")
    new = model_of(seed=2)
    status = ks.checkpoint.Checkpoint(model=new).restore(tmp_path)
    assert_same(new.get_weights(), model.get_weights())
    status.expect_partial().assert_existing_objects_matched()
    with pytest.raises(ValueError, match=r"which also contains 'count'"):
        status.assert_consumed()
    other = keras.Variable(0)
    with pytest.raises(ValueError, match="was saved with another"):
        ks.checkpoint.Checkpoint(other=other).restore(tmp_path)


def test_weights_of_a_compiled_model_into_a_plain_one(tmp_path):
    model = model_of()
    model.compile("adam", "mse")
    model.fit(X, Y, verbose=0)
    ks.checkpoint.Checkpoint(model=model).save(tmp_path / "a")
    new = model_of(seed=2)
    ks.checkpoint.Checkpoint(model=new).restore(tmp_path / "1")
    assert_same(new.get_weights(), model.get_weights())


def test_write_replaces_what_read_reads(tmp_path):
    variable = keras.Variable(1.0)
    checkpoint = ks.checkpoint.Checkpoint(v=variable)
    for value in (2.0, 3.0):
        variable.assign(value)
        assert checkpoint.write(tmp_path / "one") == str(tmp_path / "one")
    variable.assign(0.0)
    checkpoint.read(tmp_path / "one").assert_consumed()
    assert float(variable.value) == 3.0
    assert len(list((tmp_path / "one").glob("[0-9]*"))) == 1


def test_no_path_restores_nothing(tmp_path):
    variable = keras.Variable(1.0)
    checkpoint = ks.checkpoint.Checkpoint(v=variable)
    assert ks.checkpoint.latest_checkpoint(tmp_path) is None
    status = checkpoint.restore(ks.checkpoint.latest_checkpoint(tmp_path))
    assert float(variable.value) == 1.0
    with pytest.raises(ValueError, match="Received: None as the path"):
        status.assert_existing_objects_matched()
    with pytest.raises(FileNotFoundError, match="no valid checkpoint"):
        checkpoint.restore(tmp_path)


def test_the_latest_of_files_of_weights(tmp_path):
    """tf's tutorial loads what `ModelCheckpoint` wrote by its newest file."""
    model = keras.Sequential([keras.Input((2,)), dense(1)])
    for age, name in [(0, "b"), (9, "a"), (5, "c")]:
        path = tmp_path / f"{name}.weights.h5"
        model.save_weights(path)
        os.utime(path, (1e9 - age, 1e9 - age))
    path = ks.checkpoint.latest_checkpoint(tmp_path)
    assert path == str(tmp_path / "b.weights.h5")
    model.load_weights(path)
    with ks.checkpoint.CheckpointManager(
        ks.checkpoint.Checkpoint(model=model), tmp_path
    ) as manager:
        manager.save(3)
    assert ks.checkpoint.latest_checkpoint(tmp_path) == str(tmp_path / "3")


class TwoLayers(keras.Model):
    def __init__(self, width=4):
        super().__init__()
        self.one, self.two = dense(width), dense(1)

    def call(self, x):
        return self.two(self.one(x))


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(
    "make", [TwoLayers, lambda: keras.Sequential([dense(4), dense(1)])]
)
def test_models_are_restored_when_they_are_built(tmp_path, make, replicas):
    def objects():
        model, optimizer = make(), keras.optimizers.SGD(0.1, momentum=0.9)
        return {"model": model, "optimizer": optimizer, "v": keras.Variable(0)}

    saved = objects()
    saved["model"](X)
    saved["optimizer"].build(saved["model"].trainable_variables)
    for variable in saved["optimizer"].variables:
        variable.assign(keras.ops.ones(variable.shape, variable.dtype))
    saved["v"].assign(7)
    path = ks.checkpoint.Checkpoint(**saved).save(tmp_path / "a")
    with mirrored(replicas).scope():
        new = objects()
    status = ks.checkpoint.Checkpoint(**new).restore(path)
    assert int(new["v"].value) == 7
    with pytest.raises(ValueError, match="also contains 'model', 'optimizer'"):
        status.assert_consumed()
    np.testing.assert_array_equal(new["model"](X), saved["model"](X))
    assert_same(new["model"].get_weights(), saved["model"].get_weights())
    for ours, theirs in zip(
        new["optimizer"].variables, saved["optimizer"].variables, strict=True
    ):
        np.testing.assert_array_equal(ours.value, theirs.value)


def test_several_models_are_restored_when_all_are_built(tmp_path):
    saved = {name: TwoLayers() for name in "ab"}
    for model in saved.values():
        model(X)
    paths = [ks.checkpoint.Checkpoint(**saved).save(tmp_path / "1" / "c")]
    for model in saved.values():
        model.set_weights([2.0 * weight for weight in model.get_weights()])
    paths.append(ks.checkpoint.Checkpoint(**saved).save(tmp_path / "2" / "c"))
    new = {name: TwoLayers() for name in "ab"}
    for path in paths:  # The last one wins.
        ks.checkpoint.Checkpoint(**new).restore(path)
    for model in new.values():
        model(X)
    for name in "ab":
        assert_same(new[name].get_weights(), saved[name].get_weights())


def test_another_model_is_named_when_it_is_built(tmp_path):
    saved = TwoLayers()
    saved(X)
    ks.checkpoint.Checkpoint(model=saved).save(tmp_path / "a")
    new = TwoLayers(width=5)
    ks.checkpoint.Checkpoint(model=new).restore(tmp_path)
    with pytest.raises(ValueError, match=r"\[3, 4\] in the checkpoint"):
        new(X)


@pytest.mark.parametrize("how", ["fit", "predict", "run"])
def test_a_model_that_waits_is_not_built_in_a_step(tmp_path, how):
    strategy = mirrored(2)
    ks.checkpoint.Checkpoint(model=model_of()).save(tmp_path / "a")
    with strategy.scope():
        new = TwoLayers()
        new.compile("sgd", "mse")
    ks.checkpoint.Checkpoint(model=new).restore(tmp_path)
    calls = {
        "fit": lambda: new.fit(X, Y, verbose=0),
        "predict": lambda: new.predict(X, verbose=0),
        "run": lambda: strategy.run(new, args=(X,)),
    }
    with pytest.raises(RuntimeError, match="must be built outside of steps"):
        calls[how]()


class OwnWeight(TwoLayers):
    def __init__(self):
        super().__init__()
        self.w = self.add_weight(shape=(3,))


class NoCall(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([dense(4), dense(1)])


@pytest.mark.parametrize("make", [OwnWeight, NoCall])
def test_a_model_that_may_not_be_built(tmp_path, make):
    ks.checkpoint.Checkpoint(model=model_of()).save(tmp_path / "a")
    with pytest.raises(
        ValueError, match="which is not built. Call the model on one"
    ):
        ks.checkpoint.Checkpoint(model=make()).restore(tmp_path)


def test_a_damaged_one(tmp_path):
    path = ks.checkpoint.Checkpoint(v=keras.Variable(1.0)).save(tmp_path / "a")
    for file in pathlib.Path(path).rglob("*"):
        if file.is_file() and file.stat().st_size:
            file.write_bytes(b"x" * file.stat().st_size)
    variable = keras.Variable(2.0)
    with pytest.raises(ks.checkpoint.DamagedCheckpoint):
        ks.checkpoint.Checkpoint(v=variable).restore(path)
    assert float(variable.value) == 2.0


def test_a_manager_as_tf_calls_it(tmp_path):
    variable = keras.Variable(0.0)
    checkpoint = ks.checkpoint.Checkpoint(v=variable)
    manager = ks.checkpoint.CheckpointManager(
        checkpoint, directory=tmp_path, max_to_keep=2
    )
    for value in range(4):
        variable.assign(value)
        path = manager.save()
    manager.wait()
    assert path == str(tmp_path / "4") == manager.latest_checkpoint
    manager.save(checkpoint_number=7)
    manager.wait()
    assert [pathlib.Path(p).name for p in manager.checkpoints] == ["4", "7"]
    manager.close()
    variable.assign(-1.0)
    checkpoint.restore(manager.latest_checkpoint)
    assert float(variable.value) == 3.0
    with ks.checkpoint.CheckpointManager(
        checkpoint, tmp_path, max_to_keep=None
    ) as manager:
        for _ in range(7):
            manager.save()
        manager.wait()
        assert len(manager.checkpoints) == 9


def test_a_manager_that_does_not_restore_deletes_what_was_there(tmp_path):
    """tf's scripts restore by `latest_checkpoint`, and not by the manager."""
    variable = keras.Variable(0.0)
    checkpoint = ks.checkpoint.Checkpoint(v=variable)
    for _ in range(3):
        with ks.checkpoint.CheckpointManager(
            checkpoint, tmp_path, max_to_keep=2
        ) as manager:
            checkpoint.restore(ks.checkpoint.latest_checkpoint(tmp_path))
            variable.assign_add(1.0)
            manager.save()
            manager.save()
    names = [pathlib.Path(path).name for path in manager.checkpoints]
    assert names == ["5", "6"]
    assert float(variable.value) == 3.0


@pytest.mark.slow
def test_saving_where_a_manager_of_this_process_writes(tmp_path):
    checkpoint = ks.checkpoint.Checkpoint(v=keras.Variable(0.0))
    with (
        ks.checkpoint.CheckpointManager(checkpoint, tmp_path),
        pytest.raises(RuntimeError, match=r"manager\.close\(\)"),
    ):
        checkpoint.save(tmp_path / "ckpt")


_FULL = """
import resource, sys
import keras, numpy as np
import keras_strategies as ks

variable = keras.Variable(np.arange(100_000.0))
checkpoint = ks.checkpoint.Checkpoint(v=variable)
manager = ks.checkpoint.CheckpointManager(checkpoint, sys.argv[1])
manager.save(1)
manager.wait()
# As a disk that is full in the middle: a write fails, and not the first.
variable.assign(np.random.default_rng(0).random(100_000))
_, maximum = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, maximum))
try:
    manager.save(2)
    manager.wait()
finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (maximum, maximum))
"""


@pytest.mark.multi_process
def test_a_disk_that_fills_in_the_middle_of_a_save(tmp_path):
    words = [sys.executable, "-c", _FULL, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "of step 2 could not be written to" in last
    assert repr(str(tmp_path)) in last
    assert "the newest one is step 1" in last
    variable = keras.Variable(np.zeros(100_000))
    ks.checkpoint.Checkpoint(v=variable).restore(tmp_path).assert_consumed()
    assert_same([variable.value], [np.arange(100_000.0)])
