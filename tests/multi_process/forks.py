"""Forked children that are told to end; what test_forks.py starts.

`python -m tests.multi_process.forks DIRECTORY` does it in one process, in a fit
that is told to end afterwards, twice.
"""

import contextlib
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
import time
import warnings

import jax
import keras
import numpy as np

import keras_strategies as ks

OWN = 42  # The exit code of a user's handler.
FORKED = multiprocessing.get_context("fork")
LIMIT_S = 5.0
SLEEP_S = 40.0
PROCESS = os.getpid()
ROWS = np.ones((32, 3), "float32")


def codes():
    """The exit codes of children that SIGTERM has ended; None: it did not."""
    found = {"process": terminated(), "forked in a thread": None}

    def in_thread():
        found["forked in a thread"] = terminated()

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    return found


def terminated():
    """How a child ends that is told to, at once."""
    child = FORKED.Process(target=time.sleep, args=(SLEEP_S,))
    child.start()
    try:
        child.terminate()
        child.join(LIMIT_S)
        return child.exitcode
    finally:
        child.kill()


def is_pool_terminated():
    """Whether a pool, whose workers compute, ends when it is told to."""
    pool = FORKED.Pool(2)
    workers = list(pool._pool)
    try:
        pool.apply_async(time.sleep, (SLEEP_S,))
        # It waits for its workers, for ever where SIGTERM does not end them.
        ending = threading.Thread(target=pool.terminate, daemon=True)
        ending.start()
        ending.join(LIMIT_S)
        return not ending.is_alive()
    finally:
        for worker in workers:
            with contextlib.suppress(ValueError):
                worker.kill()


def leave_daemon():
    """A child that Python ends, and waits for, at the end of this process."""
    FORKED.Process(target=time.sleep, args=(SLEEP_S,), daemon=True).start()


class Data(keras.utils.PyDataset):
    """Batches that forked children read."""

    def __init__(self):
        super().__init__(workers=2, use_multiprocessing=True)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return ROWS[:8] + index, ROWS[:8, :1]


def in_job():
    """In a process of a job: what ends children, and whether it ends."""
    warnings.simplefilter("ignore")
    strategy = ks.MultiWorkerMirroredStrategy()
    found = codes() | {"pool": is_pool_terminated()}
    with strategy.scope():
        model = model_of()
    history = model.fit(Data(), epochs=2, verbose=0)
    assert len(history.epoch) == 2
    leave_daemon()
    own = signal.signal(signal.SIGTERM, lambda *_: os._exit(OWN))
    found["own"] = terminated()
    signal.signal(signal.SIGTERM, own)
    return found


def model_of():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


class Forking(keras.callbacks.Callback):
    """Ends children in the fit, and has it end then."""

    def on_train_batch_end(self, batch, logs=None):
        print("codes", codes(), flush=True)
        assert is_pool_terminated()
        leave_daemon()
        os.kill(os.getpid(), signal.SIGTERM)


def main():
    directory = pathlib.Path(sys.argv[1])
    handler = signal.SIG_DFL if len(sys.argv) == 2 else on_sigterm
    signal.signal(signal.SIGTERM, handler)
    with ks.MirroredStrategy(jax.devices()).scope():
        model = model_of()
    kept = ks.callbacks.Checkpoint(directory / "kept")
    try:
        model.fit(
            ROWS, ROWS[:, :1], callbacks=[Forking(), kept], verbose=0, epochs=3
        )
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        print("finally", flush=True)


def on_sigterm(*_):
    """A user's handler."""
    if os.getpid() != PROCESS:
        os._exit(OWN)
    print("user's handler", flush=True)


if __name__ == "__main__":
    main()
