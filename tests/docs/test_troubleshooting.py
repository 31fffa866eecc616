"""docs/troubleshooting.md: its messages are the package's, and are provoked."""

import ast
import pathlib
import re
import warnings

import grain
import jax
import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks
from keras_strategies.names import versions
from tests.support.checkpoint.damages import flip
from tests.support.combinations import some
from tests.support.mistakes import X, Y, compiled, make_iter, one_input
from tests.support.plain_keras import mirrored

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTED = re.compile(r'\*\*"(.+?)"\*\*', re.S)


def messages():
    """The messages that the page quotes, each on one line."""
    found = QUOTED.findall(PAGE.read_text("utf-8"))
    return [re.sub(r"\s+", " ", message) for message in found]


def pattern(message):
    """A quoted message, `...` for anything, as a pattern."""
    parts = map(re.escape, message.split("..."))
    return re.compile(".*?".join(parts), re.S)


def literals():
    """Every text of the package; `...` stands for its values."""
    for path in (ROOT / "keras_strategies").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(
                    part.value if isinstance(part, ast.Constant) else "0"
                    for part in node.values
                )


@pytest.fixture(scope="module")
def texts():
    return "\n".join(literals())


@pytest.mark.quick
@pytest.mark.parametrize("message", messages())
def test_a_quoted_message_is_one_of_the_package(message, texts):
    # The page gives examples of numbers and names.
    assert re.search(pattern(message), texts), message


# One for each message that one process can meet.


def fit(x=X, y=Y, **arguments):
    compiled(mirrored(2)).fit(x, y, verbose=0, **arguments)


def run(fn, *args):
    return mirrored(2).run(fn, args=args)


def untested_version(directory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(versions.BELOW, "keras", (3, 0))
        patch.delenv(versions.SILENCE, raising=False)
        versions.check_versions()


def infinite(directory):
    rows = list(zip(X, Y, strict=True))
    fit(grain.MapDataset.source(rows).batch(8).repeat(), None, shuffle=False)


def value_in_run(directory):
    def fn(x):
        return 1 if x > 0 else 2

    run(fn, np.float32(1))


def reduce_in_run(directory):
    strategy = mirrored(2)
    strategy.run(lambda x: strategy.reduce("sum", x, axis=None), (X[0],))


def foreign_variable(directory):
    with mirrored(3).scope():
        variable = keras.Variable(0.0)
    run(lambda: variable.assign_add(1.0))


def other_structures(directory):
    def fn():
        context = ks.get_replica_context()
        return (1, 2) if context.replica_id_in_sync_group else 1

    strategy = mirrored(2)
    with strategy.debug():
        strategy.run(fn)


def resume_nothing(directory):
    fit(callbacks=[ks.callbacks.Checkpoint(directory, resume=True)])


def saved(directory):
    fit(callbacks=[ks.callbacks.Checkpoint(directory)])


def begin_anew(directory):
    saved(directory)
    fit(callbacks=[ks.callbacks.Checkpoint(directory, resume=False)])


def other_model(directory):
    saved(directory)
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(7)])
        model.compile("sgd", "mse")
    y = np.zeros((22, 7))
    model.fit(X, y, verbose=0, callbacks=[ks.callbacks.Checkpoint(directory)])


def path_of_one(directory):
    saved(directory)
    (step,) = (path for path in directory.iterdir() if path.name.isdigit())
    fit(callbacks=[ks.callbacks.Checkpoint(step)])


def damaged(directory):
    saved(directory)
    (step,) = (path for path in directory.iterdir() if path.name.isdigit())
    files = [path for path in step.rglob("*") if path.is_file()]
    flip(max(files, key=lambda path: path.stat().st_size))
    model = compiled(mirrored(2))
    ks.checkpoint.load_weights(model, step)


def second_writer(directory):
    def checkpoint():
        return ks.callbacks.Checkpoint(directory)

    class Second(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            fit(callbacks=[checkpoint()])

    fit(callbacks=[checkpoint(), Second()])


def mixed(directory):
    model = compiled(mirrored(2))
    with mirrored(3).scope():
        model.fit(X, Y, verbose=0)


def run_whole(directory):
    with mirrored(2).scope():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Lambda(lambda x: ops.reshape(x, (8, 3))),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)


def restore_into_another_strategy(directory):
    with mirrored(3).scope():
        model = one_input()
    with mirrored(2).scope():
        model.compile("sgd", "mse")


def not_divisible(directory):
    def last(path, shape, dtype):
        return len(shape) - 1

    with ks.MirroredStrategy(variable_partitioner=last).scope():
        one_input()


def run_in_jit(directory):
    jax.jit(lambda: mirrored(2).run(lambda: 1.0))()


def loss_of_tensorflow(directory):
    import tensorflow as tf

    model = compiled(mirrored(2))
    model.compile("sgd", lambda y, output: tf.square(y - output))
    model.fit(X, Y, verbose=0)


def write_in_branch(directory):
    strategy = mirrored(2)
    with strategy.scope():
        counter = keras.Variable(0.0, aggregation="sum")

    def write():
        counter.assign_add(1.0)
        return 0.0

    strategy.run(lambda: ops.cond(counter > 0, write, lambda: 0.0))


def made_outside(directory):
    model = one_input()
    model.compile("sgd", "mse")
    with mirrored(2).scope():
        model.fit(X, Y, verbose=0)


def compiled_often(directory):
    strategy = mirrored(2)
    for number in range(6):
        strategy.run(lambda x: x, args=(number,))


def by_files(directory):
    from keras_strategies.data.sources.file_source import FilesSource
    from keras_strategies.data.sources.files import files

    np.save(directory / "one.npy", X)
    FilesSource(
        files([directory / "one.npy"], "npy", batch_size=4),
        num_processes=2,
        process_index=0,
    )


def tpu_system(directory):
    ks.tpu.experimental.initialize_tpu_system()


def two_lengths(directory):
    compiled(mirrored(2)).train_on_batch(X, Y[:3])


def scalar_of_a_batch(directory):
    fit(make_iter((X[:4], np.float32(1))), None)


def nothing(directory):
    fit(X[:0], Y[:0])


def weights_twice(directory):
    rows = list(zip(X, Y, np.ones(22), strict=True))
    dataset = grain.MapDataset.source(rows).batch(8)
    fit(dataset, None, class_weight={0: 1.0}, shuffle=False)


CASES = {
    "keras_strategies may only work with": untested_version,
    "This TensorFlow name": lambda _: ks.ParameterServerStrategy,
    "Unknown device": lambda _: ks.MirroredStrategy(["gpu:9"]),
    "A TPU system needs TPUs": tpu_system,
    "All arrays of a batch": two_lengths,
    "Every array of a batch must": scalar_of_a_batch,
    "The arrays of a batch must contain": lambda _: fit(X.astype(object), Y),
    "Training, evaluation and prediction": nothing,
    "The dataset repeats forever": infinite,
    "`class_weight` needs batches": weights_twice,
    "A function given to `run` is traced": value_in_run,
    "must not be called in a function that": run_in_jit,
    "must not be used in code that": loss_of_tensorflow,
    "A function given to `run` must not write": write_in_branch,
    "Method requires being in cross-replica": reduce_in_run,
    "Mixing strategies: in `run`": foreign_variable,
    "All replicas must return": other_structures,
    "`resume=True`": resume_nothing,
    "`resume=False`": begin_anew,
    "A checkpoint must be restored into": other_model,
    "Checkpoints must be saved in": path_of_one,
    "Mixing different": mixed,
    "This step runs over": run_whole,
    "The model's variables": restore_into_another_strategy,
    "A model that is used": made_outside,
    "A variable must be sharded along": not_divisible,
    "The checkpoint ...": damaged,
    "Only one run at a time": second_writer,
    "`run` has compiled": compiled_often,
    "AutoShardPolicy.AUTO": by_files,
}
# They need a second process, another Python or a GPU; tests/multi_process,
# tests/cluster, tests/gpu/test_tf_devices.py and tests/test_import.py provoke
# them.
OF_SEVERAL = {
    "keras_strategies needs Keras",
    "All ... processes must start",
    "All processes must expect",
    "All processes must pass",
    "All processes must create",
    "All processes must run",
    "Process ... did not take part",
    "All processes must call",
    "An array that is sharded over several",
    "Every process must read",
    "Processes on one host must not",
    "Mutual TLS needs",
    "... must be the path of a file",
    "TensorFlow must not take",
    "process 0 ends with",
}


@pytest.mark.quick
def test_every_message_has_a_case():
    for message in messages():
        starts = [s for s in {*CASES, *OF_SEVERAL} if message.startswith(s)]
        assert len(starts) == 1, (message, starts)
    assert len(messages()) == len(CASES) + len(OF_SEVERAL)
    assert len(messages()) >= 20


# It waits for seconds; tests/callbacks/test_checkpoint.py has it by default.
@pytest.mark.parametrize(
    "start", some(CASES, {*CASES} - {"Only one run at a time"})
)
def test_a_message_comes_as_it_is_quoted(start, tmp_path):
    (message,) = (m for m in messages() if m.startswith(start))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            CASES[start](tmp_path)
        except Exception as error:
            said = [str(error), *getattr(error, "__notes__", ())]
        else:
            said = [str(warning.message) for warning in caught]
    assert any(pattern(message).search(text) for text in said), said
