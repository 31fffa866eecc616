"""Rounds of many processes, which are threads here, over a store of ours.

tests/contract/test_jax_contract.py has JAX's store and real processes.
"""

import concurrent.futures
import itertools
import threading

import jax
import pytest

from keras_strategies.cluster.exchange import host_exchange
from tests.support.combinations import combine
from tests.support.waiting import wait_until


class Store:
    """What `Agreement` uses of JAX's client."""

    def __init__(self):
        self.values = {}
        self.reads = 0
        self._changed = threading.Condition()

    def key_value_set(self, key, value):
        with self._changed:
            assert key not in self.values
            self.values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key, timeout_ms):
        with self._changed:
            if not self._changed.wait_for(
                lambda: key in self.values, timeout_ms / 1e3
            ):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            self.reads += 1
            return self.values[key]

    key_value_set_bytes = key_value_set
    blocking_key_value_get_bytes = blocking_key_value_get

    def key_value_try_get(self, key):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("NOT_FOUND")

    def key_value_delete(self, key):
        with self._changed:
            for one in list(self.values):
                if one == key or (key[-1] == "/" and one.startswith(key)):
                    del self.values[one]


@pytest.fixture
def run(monkeypatch):
    """Calls a function in threads that take themselves for processes."""
    this = threading.local()
    store = Store()

    class Numbers:
        def __next__(self):
            return next(this.numbers)

    class Ended(dict):
        def __setitem__(self, key, value):
            super().__setitem__((this.index, key), value)

        def pop(self, key, default):
            return super().pop((this.index, key), default)

    monkeypatch.setattr(host_exchange, "_numbers", Numbers())
    monkeypatch.setattr(host_exchange, "_ended", Ended())
    monkeypatch.setattr(host_exchange, "get_client", lambda: store)
    monkeypatch.setattr(host_exchange.jax, "process_index", lambda: this.index)

    def start(function, count):
        def call(index):
            this.index = index
            this.numbers = itertools.count()
            try:
                return function(index, tuple(range(count)))
            except (ValueError, TimeoutError) as error:
                return error

        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            return list(pool.map(call, range(count))), store

    start.store = store
    return start


@pytest.mark.parametrize("count", [1, 2, 4, 5, 12])
def test_all_hear_all_in_order(run, count):
    def say(index, processes):
        made = host_exchange.Agreement(processes, "x", timeout_s=30)
        return [made.exchange(f"{index} in {n}") for n in range(20)]

    heard, store = run(say, count)
    for rounds in heard:
        assert rounds == [
            [f"{index} in {n}" for index in range(count)] for n in range(20)
        ]
    # The last round alone is kept.
    assert len(store.values) <= count + 1
    if count > 4:
        assert store.reads == 20 * 2 * (count - 1)


@pytest.mark.parametrize(
    ("silent", "count"), combine(["first", "last"], [2, 4, 5, 12], every=4)
)
def test_one_that_says_nothing_is_named_in_all(run, count, silent):
    missing = 0 if silent == "first" else count - 1

    def say(index, processes):
        # All are there before the time counts.
        host_exchange.Agreement(processes, "begin", timeout_s=30).exchange("")
        made = host_exchange.Agreement(processes, "x", timeout_s=1)
        made.exchange("here")
        if index != missing:
            made.exchange("here")

    errors, _ = run(say, count)
    for index, error in enumerate(errors):
        if index != missing:
            assert isinstance(error, TimeoutError)
            assert f"Process {missing} did not take part in x" in str(error)


@pytest.mark.parametrize("count", [2, 6])
def test_other_calls_are_named_in_all(run, count):
    def say(index, processes):
        name = "fit" if index == 1 else "predict"
        host_exchange.Agreement(processes, name, timeout_s=30).exchange("")

    errors, _ = run(say, count)
    for error in errors:
        assert isinstance(error, ValueError)
        assert "predict (process 0), fit (process 1)" in str(error)


@pytest.mark.parametrize("late", [0, 5])
def test_one_that_is_late_is_waited_for(run, late):
    def say(index, processes):
        made = host_exchange.Agreement(processes, "x", timeout_s=30)
        if index == late:
            # All others have spoken, and wait.
            wait_until(lambda: len(run.store.values) == 5)
        return made.exchange("here")

    heard, _ = run(say, 6)
    assert heard == [["here"] * 6] * 6


@pytest.mark.parametrize("count", [2, 6])
def test_waiting_can_be_stopped(run, count):
    def say(index, processes):
        made = host_exchange.Agreement(processes, "x", timeout_s=30)
        if index == 1:
            return "left"
        try:
            made.exchange("here", is_stopped=lambda: True)
        except InterruptedError:
            return "stopped"

    told, _ = run(say, count)
    assert sorted(told) == ["left"] + ["stopped"] * (count - 1)


def test_ended_agreements_are_forgotten(run):
    def say(index, processes):
        for _ in range(host_exchange._NUM_KEPT + 9):
            made = host_exchange.Agreement(processes, "x", timeout_s=30)
            made.exchange("")
            made.end()

    _, store = run(say, 6)
    assert len(store.values) <= (6 + 1) * (host_exchange._NUM_KEPT + 1)


@pytest.mark.parametrize("count", [2, 5])
def test_the_first_sends_and_goes_on(run, count):
    def say(index, processes):
        made = host_exchange.Agreement(processes, "x", timeout_s=30)

        def end():
            made.exchange("end")
            made.end()

        number = 20 if index == 0 else 21
        heard = [
            made.share(f"{n}", bytes([n, index]), end) for n in range(number)
        ]
        host_exchange.Agreement(processes, "y", timeout_s=30).exchange("")
        return heard

    (sent, *heard), store = run(say, count)
    assert sent == [(f"{n}", bytes([n, 0])) for n in range(20)]
    # The one after these never came: the first went on.
    assert heard == [[*sent, None]] * (count - 1)
    assert not [key for key in store.values if "shared" in key]
