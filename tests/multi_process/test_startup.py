"""How a job starts: who is missing or differs is named by all, in time."""

import concurrent.futures
import socket

import pytest

from keras_strategies.cluster.addresses import find_free_ports
from tests.multi_process.startup import ALONE_S, TOGETHER_S, train
from tests.support.jobs import values_of

pytestmark = pytest.mark.multi_process

STARTUP = "multi_process.startup:"


def in_turn(target, count, *args, of="startup", **options):
    """Runs a function in processes that are no job of JAX yet."""

    def call(me):
        function = f"multi_process.{of}:{target}"
        (value,) = values_of(function, 1, me, *args, **options)
        return value

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, range(count)))


def free_addresses(count):
    """Addresses of ports that are free, each another one."""
    return [f"127.0.0.1:{port}" for port in find_free_ports(count)]


def told(index, addresses, **more):
    return {"index": index, "addresses": addresses, **more}


def cases(taken):
    """(what each process is told, what all of them must say)."""
    addresses = iter(free_addresses(21))
    a, b, c, d, e, f, g = (
        [next(addresses) for _ in range(3)] for _ in range(7)
    )
    yield (
        {"0": told(0, c), "1": told(1, c), "2": told(1, c)},
        ["two processes that claim to be process 1 (worker 1", "task index"],
    )
    yield (
        {"0": told(0, d[:2]), "1": told(1, d)},
        ["same number of processes", "2 in process 0, 3 in process 1"],
    )
    yield (
        {"0": told(0, e[:2]), "1": told(1, e[:2], keras="3.14.0")},
        ["version of keras", "'3.14.0' in process 1"],
    )
    yield (
        {"0": told(0, f[:2]), "1": told(1, f[:2], strategy="TPUStrategy")},
        ["same strategy", "'TPUStrategy' in process 1 (worker 1"],
    )
    # Who takes no part goes on to the next case: those who wait come last.
    yield (
        {"0": told(0, a[:2])},
        [f"process 1 (worker 1, {a[1]})", f"within {ALONE_S:.0f} s"],
    )
    yield (
        {"1": told(1, b[:2])},
        ["Process 1 must reach process 0", b[0], "refused"],
    )
    yield (
        {"0": told(0, [taken, a[0]])},
        [f"cannot listen at {taken}", "in use"],
    )
    # Nothing comes after it in this process.
    yield (
        {"0": told(0, g[:2]), "1": told(1, g[:2], uses_devices=True)},
        ["process 1", "Create the strategy first"],
    )


def test_what_is_wrong_is_named_by_all_in_time():
    with socket.create_server(("127.0.0.1", 0)) as server:
        table = list(cases(f"127.0.0.1:{server.getsockname()[1]}"))
        found = in_turn("meet_in_turn", 3, [case for case, _ in table])
    for number, (case, parts) in enumerate(table):
        for process in map(int, case):
            text, seconds = found[process][number]
            print(f"case {number}, process {process}: {seconds:.1f} s, {text}")
            # Some import keras longer than others.
            assert seconds < (30 if len(case) == 1 else TOGETHER_S)
            for part in parts:
                assert part in text


def test_a_job_of_tf_config_trains_and_refuses_programs_that_differ():
    addresses = free_addresses(2)
    chiefs = {"chief": addresses[:1], "worker": addresses[1:]}
    tasks = [{"type": "chief", "index": 0}, {"type": "worker", "index": 0}]

    configs = [{"cluster": chiefs, "task": task} for task in tasks]
    found = in_turn("train_and_differ", 2, configs, addresses[0])
    assert_refused([result.pop("refused") for result in found])
    alone = train(0, None, {})
    assert alone["task"] == [None, None]
    assert alone["replicas"] == 8
    for result, task in zip(found, tasks, strict=True):
        assert result["replicas"] == 4
        assert result["task"] == [task["type"], task["index"]]
        assert result["warnings"] == []
        assert result["loss"] == pytest.approx(alone["loss"], abs=1e-5)
        for weights, others in zip(
            result["weights"], alone["weights"], strict=True
        ):
            assert weights == pytest.approx(others, abs=1e-5)


@pytest.mark.slow
def test_other_numbers_of_devices_are_named_by_all():
    addresses = free_addresses(2)

    def call(me):
        config = {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": me},
        }
        (value,) = values_of(
            STARTUP + "train", 1, me, config, {}, devices=1 + me
        )
        return value

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for result in pool.map(call, range(2)):
            assert "same number of replicas" in result["error"]
            assert "[0, 1, 1]" in result["error"]


def assert_refused(of_processes):
    """Programs that differ were, before they ran."""
    for found in of_processes:
        value = found.pop()
        assert "'rate' of shape (), float32, trainable, with 1.0" in value
        assert "with 2.0, at startup.py:" in value
        loss, is_untouched, constant, is_still, *rest, last = found
        *runs, modes, callbacks = rest
        assert len(runs) == 2
        assert "process 0: `" in loss
        assert "mul" in loss
        assert " at startup.py:" in loss
        assert "of the first values 1.0, 1.0, 1.0" in constant
        assert "of the first values 2.0, 2.0, 2.0" in constant
        assert is_untouched
        assert is_still
        for text in (loss, constant, *runs):
            assert "must run the same program" in text
        assert "run_eagerly: False (process 0), True (process 1)" in modes
        assert (
            "callbacks: [] (process 0), ['LearningRateScheduler']" in callbacks
        )
        assert last == "still usable"
