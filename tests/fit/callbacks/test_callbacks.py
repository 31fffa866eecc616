"""Keras's callbacks see and do under a strategy what they do without one.

Every test does one thing with a plain model on one device and with a model
of a strategy: the same calls, the same logs, the same files.
"""

import http.server
import json
import re
import threading

import keras
import numpy as np
import pytest

from keras_strategies.fit.binding import find_binding
from tests.fit.callbacks.recorder import Recorder, read_directory
from tests.support.combinations import combine
from tests.support.plain_keras import assert_same, dense, run_both

_random = np.random.default_rng(0)
X = _random.normal(size=(22, 3)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]] + 0.3).astype("float32")
X_VAL, Y_VAL = X[:12] * 0.5, Y[:12] * 0.5

callbacks = keras.callbacks


def build():
    return keras.Sequential(
        [
            keras.Input((3,), name="rows"),
            dense(4, activation="tanh", name="hidden"),
            dense(1, seed=2, name="out"),
        ],
        name="model",
    )


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9, name="sgd")


def averaging():
    return keras.optimizers.SGD(
        0.05, use_ema=True, ema_momentum=0.5, name="sgd"
    )


def exploding():
    return keras.optimizers.SGD(1e30, name="sgd")


def mae():
    return ["mae"]


def compiled(optimizer, steps_per_execution=1):
    return {
        "optimizer": optimizer,
        "loss": "mse",
        "metrics": mae,
        "steps_per_execution": steps_per_execution,
    }


# One object each: `run_both` keeps the models made with it.
MOMENTUM, MOMENTUM_3 = compiled(momentum), compiled(momentum, 3)
EMA, EXPLODING = compiled(averaging), compiled(exploding)


def fit(model, *given, **changes):
    """Four batches of 6, 6, 6 and 4 rows, two epochs; all that was seen."""
    seen = Recorder()
    arguments = {
        "batch_size": 6,
        "epochs": 2,
        "shuffle": False,
        "verbose": 0,
        "validation_data": (X_VAL, Y_VAL),
    } | changes
    history = model.fit(X, Y, callbacks=[*given, seen], **arguments)
    facts = (seen.events, history.epoch, history.params)
    return facts, (seen.values, history.history)


def check(act, compile_args=MOMENTUM, *, replicas=2, is_fresh=False):
    """Asserts that `act` returns the same facts and numbers of both models.

    Returns the facts and numbers of the strategy's model.
    """
    plain, ours = run_both(
        build, act, replicas=replicas, is_fresh=is_fresh, **compile_args
    )
    (plain_facts, plain_numbers), plain_weights = plain
    (our_facts, our_numbers), our_weights = ours
    assert our_facts == plain_facts
    assert_same(plain_numbers, our_numbers)
    assert_same(plain_weights, our_weights)
    return our_facts, our_numbers


def check_files(tmp_path, act, **options):
    """As `check`, with a directory for each model whose files must agree."""
    directories = iter([tmp_path / "plain", tmp_path / "ours"])

    def in_directory(model):
        directory = next(directories)
        directory.mkdir()
        facts, numbers = act(model, directory)
        names, values = read_directory(directory)
        return (facts, names), (numbers, values)

    (_, names), _ = check(in_directory, **options)
    assert names, "the callback wrote no file"
    return [name for name, _ in names]


# Keras's callbacks, each under a name that says which it is.


@pytest.mark.parametrize("replicas", combine([2, 3, 8], every=3))
def test_custom_callback_is_called_as_in_keras(replicas):
    (events, *_), _ = check(fit, replicas=replicas)
    assert [e[:2] for e in events if e[0] == "on_train_batch_end"] == [
        ("on_train_batch_end", batch) for batch in range(4)
    ] * 2


@pytest.mark.parametrize(
    "compile_args", combine([MOMENTUM, MOMENTUM_3], every=2)
)
@pytest.mark.parametrize(
    "changes",
    combine(
        [
            {"initial_epoch": 1, "epochs": 3},
            {"validation_data": None, "validation_split": 0.3},
            {"validation_freq": 2, "epochs": 3},
            {"steps_per_epoch": 3, "validation_steps": 2, "epochs": 1},
            {"batch_size": 5, "shuffle": True},
        ],
        every=2,
    ),
    ids=lambda changes: "-".join(changes),
)
def test_events_of_fit_with_other_arguments(changes, compile_args):
    def act(model):
        keras.utils.set_random_seed(3)
        return fit(model, **changes)

    check(act, compile_args, replicas=3)


@pytest.mark.parametrize(
    ("replicas", "compile_args"),
    combine([2, 3], [MOMENTUM, MOMENTUM_3], every=2),
)
def test_events_of_evaluate_and_predict(compile_args, replicas):
    def act(model):
        test, prediction = Recorder(), Recorder()
        result = model.evaluate(X, Y, batch_size=5, verbose=0, callbacks=[test])
        rows = model.predict(X, batch_size=5, verbose=0, callbacks=[prediction])
        events = test.events + prediction.events
        return events, (result, rows, test.values, prediction.values)

    check(act, compile_args, replicas=replicas)


@pytest.mark.parametrize("compile_args", [MOMENTUM, MOMENTUM_3])
@pytest.mark.parametrize("kind", ["test", "predict"])
def test_evaluating_and_predicting_can_be_stopped(kind, compile_args):
    class Stops(callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            self.model.stop_evaluating = True

        def on_predict_batch_end(self, batch, logs=None):
            self.model.stop_predicting = True

    def act(model):
        if kind == "test":
            arguments = {"x": X, "y": Y}
            loop = model.evaluate
        else:
            arguments = {"x": X}
            loop = model.predict
        return None, loop(
            **arguments, batch_size=5, verbose=0, callbacks=[Stops()]
        )

    check(act, compile_args)


@pytest.mark.parametrize("save_freq", combine(["epoch", 3], every=2))
def test_backup_and_restore(tmp_path, save_freq):
    class Interrupts(callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.params["epochs"] == 3 and self.epoch == 1 and batch == 2:
                raise InterruptedError

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

    def act(model, directory):
        def backup():
            return callbacks.BackupAndRestore(
                str(directory / "backup"), save_freq=save_freq
            )

        with pytest.raises(InterruptedError):
            fit(model, backup(), Interrupts(), epochs=3)
        interrupted = read_directory(directory)
        model.set_weights([w * 0 for w in model.get_weights()])
        facts, numbers = fit(model, backup(), epochs=4)
        assert facts[1][0] > 0, "it starts where it was interrupted"
        (directory / "done.json").write_text("{}")
        return (interrupted[0], facts), (interrupted[1], numbers)

    # Fresh models: Keras keeps the epoch to start from on a restored one.
    names = check_files(tmp_path, act, is_fresh=True)
    assert names == ["done.json"], "the backup is deleted at the end"


@pytest.mark.parametrize("append", [False, True])
def test_csv_logger(tmp_path, append):
    def act(model, directory):
        log = str(directory / "log.csv")
        fit(model, callbacks.CSVLogger(log))
        return fit(model, callbacks.CSVLogger(log, append=append))

    assert check_files(tmp_path, act, replicas=3) == ["log.csv"]


def test_callback_list():
    def act(model):
        seen = Recorder()
        given = callbacks.CallbackList(
            [seen], add_history=True, model=model, epochs=2, steps=4
        )
        history = model.fit(X, Y, batch_size=6, epochs=2, callbacks=given)
        return (seen.events, history.params), (seen.values, history.history)

    check(act)


@pytest.mark.parametrize("restore", [False, True])
def test_early_stopping(restore):
    def act(model):
        stopping = callbacks.EarlyStopping(
            "loss",
            mode="max",  # The loss falls: the first epoch is the best.
            patience=1,
            restore_best_weights=restore,
        )
        facts, numbers = fit(model, stopping, epochs=6)
        facts = (facts, stopping.stopped_epoch, stopping.best_epoch)
        weights = stopping.best_weights
        return facts, (numbers, stopping.best, weights, model.get_weights())

    ((_, epochs, _), stopped, best), _ = check(act, replicas=3)
    assert (len(epochs), stopped, best) == (2, 1, 0)


def test_history():
    def act(model):
        mine = callbacks.History()
        fit(model, mine)
        return mine.epoch, mine.history

    epochs, history = check(act)
    assert epochs == [0, 1]
    assert set(history) == {"loss", "mae", "val_loss", "val_mae"}


def test_lambda_callback():
    def act(model):
        events, values = [], []

        def note(index, logs):
            events.append((index, tuple(logs or ())))
            values.append(list((logs or {}).values()))

        given = callbacks.LambdaCallback(
            on_epoch_begin=note,
            on_epoch_end=note,
            on_train_batch_begin=note,
            on_train_batch_end=note,
            on_train_begin=lambda logs: note("begin", logs),
            on_train_end=lambda logs: note("end", logs),
        )
        fit(model, given)
        return events, values

    check(act)


@pytest.mark.parametrize("replicas", [2, 8])
def test_learning_rate_scheduler(replicas):
    def schedule(epoch, rate):
        return rate * 0.5 if epoch else rate

    def act(model):
        facts, numbers = fit(
            model, callbacks.LearningRateScheduler(schedule), epochs=3
        )
        return facts, (numbers, model.optimizer.learning_rate.numpy())

    _, (_, rate) = check(act, replicas=replicas)
    assert rate == pytest.approx(0.05 / 4)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("{epoch}.weights.h5", {"save_weights_only": True}),
        (
            "{epoch}-{batch}.weights.h5",
            {"save_weights_only": True, "save_freq": 3},
        ),
        ("{epoch}-{val_loss:.3f}.keras", {}),
        ("{epoch}-{batch}.keras", {"save_freq": 3}),
        (
            "{epoch}.keras",
            {"save_best_only": True, "monitor": "mae", "mode": "max"},
        ),
        (
            "best.weights.h5",
            {"save_best_only": True, "save_weights_only": True},
        ),
    ],
)
def test_model_checkpoint(tmp_path, name, options):
    def act(model, directory):
        given = callbacks.ModelCheckpoint(str(directory / name), **options)
        facts, numbers = fit(model, given)
        return facts, (numbers, given.best)

    names = check_files(tmp_path, act, replicas=3)
    if options.get("save_freq") == 3:
        assert [n.split(".")[0] for n in names] == ["1-3", "2-2"]


def test_model_checkpoint_within_a_group_of_steps(tmp_path):
    def act(model, directory):
        path = str(directory / "{epoch}-{batch}.weights.h5")
        return fit(
            model,
            callbacks.ModelCheckpoint(
                path, save_weights_only=True, save_freq=2
            ),
        )

    check_files(tmp_path, act, compile_args=MOMENTUM_3)


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_orbax_checkpoint(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    directories = iter([tmp_path / "plain", tmp_path / "ours"])

    def act(model):
        directory = next(directories)
        given = callbacks.OrbaxCheckpoint(
            str(directory), save_freq=3, max_to_keep=None
        )
        facts, numbers = fit(model, given)
        steps = sorted(p.name for p in directory.iterdir() if p.name.isdigit())
        loaded = keras.saving.load_model(str(directory))
        weights = loaded.get_weights()
        slots = [v.numpy() for v in loaded.optimizer.variables]
        return (facts, steps), (numbers, weights, slots)

    (_, steps), _ = check(act)
    assert steps == ["3", "6"]


@pytest.mark.parametrize("verbose", [1, 2])
def test_progbar_logger(capsys, verbose):
    def act(model):
        capsys.readouterr()
        fit(model, epochs=2, verbose=verbose)
        text = capsys.readouterr().out
        text = re.sub(r"\x1b\[[0-9;]*m|\x08", "", text)
        lines = [part for part in re.split(r"[\r\n]", text) if "val_" in part]
        names = [re.findall(r"(\w+): ", line) for line in lines]
        steps = [re.findall(r"(\d+/\d+) ", line) for line in lines]
        values = [re.findall(r": (-?[\d.e+-]+)", line) for line in lines]
        # Printed with 4 digits: one may round the other way.
        rounded = [[round(float(v), 2) for v in line] for line in values]
        return (names, steps), rounded

    (names, steps), _ = check(act)
    assert names == [["loss", "mae", "val_loss", "val_mae"]] * 2
    assert steps[0][:1] == ["4/4"]


def test_explicit_progbar_logger(capsys):
    def act(model):
        capsys.readouterr()
        fit(model, callbacks.ProgbarLogger(), verbose=2)
        out = capsys.readouterr().out
        return re.findall(r"(\d+/\d+|\w+): ?", out), out.count("\n")

    check(act)


def test_reduce_lr_on_plateau():
    def act(model):
        given = callbacks.ReduceLROnPlateau(
            "loss", mode="max", factor=0.5, patience=1, cooldown=1
        )
        facts, numbers = fit(model, given, epochs=4)
        return facts, (numbers, given.best, given.wait)

    (_, epochs, _), (numbers, *_) = check(act)
    rates = numbers[1]["learning_rate"]
    assert rates[-1] < rates[0]


def test_remote_monitor():
    pytest.importorskip("requests")
    received = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, json.loads(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            """Prints nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:

        def act(model):
            received.clear()
            root = f"http://127.0.0.1:{server.server_port}"
            fit(model, callbacks.RemoteMonitor(root, send_as_json=True))
            facts = [(path, list(body)) for path, body in received]
            return facts, [list(body.values()) for _, body in received]

        facts, _ = check(act)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert [path for path, _ in facts] == ["/publish/epoch/end/"] * 2


@pytest.mark.parametrize(
    ("replicas", "on_epoch"), combine([2, 3], [False, True], every=3)
)
def test_swap_ema_weights(replicas, on_epoch):
    def act(model):
        swap = callbacks.SwapEMAWeights(swap_on_epoch=on_epoch)
        first = fit(model, swap)
        # Variables and their averages share arrays now. Plain Keras would
        # donate them twice, and lose the model's weights; ours goes on.
        if find_binding(model) is None:
            for variable in model.variables:
                variable.assign(variable.numpy())
        second = fit(model, callbacks.SwapEMAWeights(swap_on_epoch=on_epoch))
        facts, numbers = zip(first, second, strict=True)
        return facts, (numbers, [v.numpy() for v in model.optimizer.variables])

    check(act, EMA, replicas=replicas)


@pytest.mark.parametrize("update_freq", combine(["epoch", "batch", 3], every=3))
def test_tensorboard(tmp_path, update_freq):
    pytest.importorskip("tensorflow")
    pytest.importorskip("tensorboard")

    def act(model, directory):
        given = callbacks.TensorBoard(
            str(directory),
            update_freq=update_freq,
            histogram_freq=1,
            write_graph=False,
        )
        return fit(model, given)

    names = check_files(tmp_path, act)
    assert names == ["train/events", "validation/events"]


def test_terminate_on_nan(capsys):
    def act(model):
        facts, numbers = fit(model, callbacks.TerminateOnNaN(), epochs=3)
        return (facts, capsys.readouterr().out), numbers

    ((_, epochs, _), out), _ = check(act, EXPLODING)
    assert "Invalid loss" in out
    assert epochs == [0], "training stops in the first epoch"


_TESTS = {
    "BackupAndRestore": test_backup_and_restore,
    "CSVLogger": test_csv_logger,
    "Callback": test_custom_callback_is_called_as_in_keras,
    "CallbackList": test_callback_list,
    "EarlyStopping": test_early_stopping,
    "History": test_history,
    "LambdaCallback": test_lambda_callback,
    "LearningRateScheduler": test_learning_rate_scheduler,
    "ModelCheckpoint": test_model_checkpoint,
    "OrbaxCheckpoint": test_orbax_checkpoint,
    "ProgbarLogger": test_progbar_logger,
    "ReduceLROnPlateau": test_reduce_lr_on_plateau,
    "RemoteMonitor": test_remote_monitor,
    "SwapEMAWeights": test_swap_ema_weights,
    "TensorBoard": test_tensorboard,
    "TerminateOnNaN": test_terminate_on_nan,
}


def test_every_callback_of_keras_has_a_test():
    exported = {name for name in dir(callbacks) if name[0].isupper()}
    assert exported - set(_TESTS) == set(), "a callback without a test here"
