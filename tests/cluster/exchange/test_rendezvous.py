"""How processes meet; they are threads here."""

import concurrent.futures
import contextlib
import json
import random
import resource
import socket
import time

import pytest

from keras_strategies.cluster.exchange import (
    greetings,
    job_secret,
    rendezvous,
)
from keras_strategies.cluster.exchange.rendezvous import RendezvousError, meet
from tests.support.combinations import combine
from tests.support.waiting import connected

LIMIT = 1.0
# Where nobody waits for it to pass.
LONG = 60.0


def run(address, processes, timeout_s=LONG):
    """What each process is told; each is (when, id, count, facts): after so
    many seconds, or what a function waits for."""

    def call(process):
        when, index, count, facts = process
        when() if callable(when) else time.sleep(when)
        try:
            meet(
                address,
                process_id=index,
                num_processes=count,
                facts=facts,
                timeout_s=timeout_s,
                names=[f"worker {i}" for i in range(count)],
            )
        except RendezvousError as error:
            return str(error)
        return "met"

    with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(call, processes))


def same(*ids, count=None, facts=None):
    return [(0, i, count or len(ids), facts or {}) for i in ids]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 40])
def test_all_meet(address, count):
    assert run(address, same(*range(count))) == ["met"] * count
    # The port is free at once.
    if count > 1:
        host, port = rendezvous.split_address(address)
        with socket.create_server((host, port)):
            pass


@pytest.mark.parametrize("late", combine([0, 1], every=2))
def test_late_ones_are_waited_for(address, late):
    processes = [(0.7 * (i == late), i, 2, {}) for i in range(2)]
    assert run(address, processes) == ["met"] * 2


def test_missing_ones_are_named_in_all(address):
    start = time.monotonic()
    told = run(address, same(0, 1, count=4), LIMIT)
    assert LIMIT <= time.monotonic() - start < LONG / 3
    assert told[0] == told[1]
    expected = "nothing from process 2 (worker 2), process 3 (worker 3)"
    assert expected in told[0]


@pytest.mark.multi_process
def test_a_missing_chief_is_named(address):
    told = run(address, same(1, 2, count=3), LIMIT)
    for text in told:
        assert f"must reach process 0 at {address}" in text
        assert "refused" in text


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        (
            # The third never comes: nobody ends before it is noticed.
            same(0, 1, 1, count=3),
            "two processes that claim to be process 1 (worker 1)",
        ),
        ([*same(0, 0, count=2), (2.0, 1, 2, {})], None),
        (
            [*same(0, count=2), *same(1, 2, count=3)],
            "2 in process 0, 3 in process",
        ),
        ([*same(0, count=3), *same(1, count=2)], "3 in process 0, 2 in"),
        (same(0, 7, count=3), "process 7 of 3"),
        (
            [
                (0, 0, 2, {"version of jax": "0.10.2", "strategy": "A"}),
                (0, 1, 2, {"version of jax": "0.10.1", "strategy": "A"}),
            ],
            "'0.10.2' in process 0, '0.10.1' in process 1 (worker 1)",
        ),
    ],
)
def test_what_is_wrong_is_told_to_all(address, processes, words):
    told = run(address, processes)
    if words is None:
        # Two chiefs: one of them cannot listen, and says so.
        assert sum("cannot listen at" in text for text in told) == 1
        assert sum(text == "met" for text in told) == 2
        return
    assert len(set(told)) == 1
    assert words in told[0]


def hello_line(**changed):
    words = {
        "job": "keras_strategies",
        "process": 1,
        "count": 2,
        "facts": {},
        "problem": "",
    }
    return f"{json.dumps(words | changed)}\n".encode()


NO_HELLOS = [
    *(b"\n", b"[]\n", b"\xff\xfe\n", b"[" * 60_000 + b"\n"),
    b'{"job": "keras_strategies"}\n',
    b'{"job": "keras_strategies", "process": "1", "count": 2}\n',
    hello_line(facts=0).replace(b"0", b"[" * 30_000 + b"]" * 30_000),
    *(hello_line(facts=[]), hello_line(process=True)),
    *(hello_line(process=10**400), hello_line(problem=None)),
]


@pytest.mark.parametrize("words", NO_HELLOS, ids=lambda words: str(words[:40]))
def test_what_others_say_is_no_hello(words):
    assert greetings.parse_hello(words) is None


@pytest.mark.parametrize(
    "words",
    [
        *(b"GET / HTTP/1.1\r\n\r\n", b"", b"x" * 200_000),
        *(NO_HELLOS[3], hello_line(process=True), hello_line(more=1)),
    ],
    ids=lambda words: str(words[:40]),
)
def test_strangers_are_left_alone(address, words):
    def bother():
        with connected(address) as stranger, contextlib.suppress(OSError):
            stranger.settimeout(0.3)
            stranger.sendall(words)
            stranger.recv(1)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        bothered = pool.submit(bother).result
        told = run(address, [(0, 0, 2, {}), (bothered, 1, 2, {})])
    assert told == ["met", "met"]


@pytest.mark.multi_process
def test_another_service_at_the_address_is_no_process_0(address):
    host, port = rendezvous.split_address(address)
    with socket.create_server((host, port)) as server:
        server.settimeout(LONG)

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                    connection.close()

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(answer)
            told = run(address, same(1, count=2), LIMIT)
            server.shutdown(socket.SHUT_RDWR)  # Wakes `accept`.
    assert "a connection that another service may have closed" in told[0]


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(RendezvousError, match="cannot listen at 192.0.2.1:"):
        meet(
            "192.0.2.1:2222",
            process_id=0,
            num_processes=2,
            facts={},
            timeout_s=LIMIT,
        )


def test_addresses():
    assert rendezvous.split_address("host:1") == ("host", 1)
    assert rendezvous.split_address("[::1]:22") == ("::1", 22)


def test_who_came_early_hears_who_is_missing(address):
    early, late = run(
        address, [(0, 1, 3, {}), (LIMIT * 0.8, 0, 3, {})], timeout_s=LIMIT
    )
    assert early == late
    assert "nothing from process 2 (worker 2)" in early


@pytest.mark.parametrize("which", [0, 1, 2])
def test_who_cannot_go_on_says_why_to_all(address, which):
    def call(index):
        try:
            meet(
                address,
                process_id=index,
                num_processes=3,
                facts={},
                timeout_s=LONG,
                problem="No devices." if index == which else "",
            )
        except RendezvousError as error:
            return str(error)
        return "met"

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = list(pool.map(call, range(3)))
    assert found == [f"process {which}: No devices."] * 3


@pytest.fixture
def many_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Both ends of the strangers' connections are in this process.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def crowd(address, count, idle):
    """Adds strangers that connect, and say nothing."""
    for _ in range(count):
        stranger = socket.socket()
        stranger.setblocking(False)
        idle.append(stranger)
        with contextlib.suppress(OSError):
            stranger.connect(rendezvous.split_address(address))


def test_a_thousand_idle_strangers_take_nobodys_time(
    address, monkeypatch, many_files
):
    """Of a process that is slow to say who it is."""
    monkeypatch.setattr(rendezvous, "_PENDING_S", 10.0)
    idle = []

    def be_slow():
        with connected(address) as ours:
            crowd(address, 1000, idle)
            for byte in hello_line():
                ours.sendall(bytes([byte]))
                time.sleep(0.015)
            ours.settimeout(LONG)
            said = ours.recv(65_536)
            while b"verdict" not in said:
                said += ours.recv(65_536)
            return json.loads(said.splitlines()[-1])["verdict"]

    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            slow = pool.submit(be_slow)
            told = run(address, same(0, count=2))
            assert slow.result() == ""
        assert told == ["met"]
        assert len(idle) == 1000
    finally:
        for stranger in idle:
            stranger.close()


def test_who_comes_after_many_idle_strangers_is_heard(address, monkeypatch):
    monkeypatch.setattr(rendezvous, "_MAX_PENDING", 32)
    monkeypatch.setattr(rendezvous, "_PENDING_S", 0.2)
    idle = []

    def come():
        connected(address).close()
        crowd(address, 150, idle)

    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            done = pool.submit(come)
            late = (done.result, 1, 2, {})
            told = run(address, [(0, 0, 2, {}), late])
        assert told == ["met", "met"]
    finally:
        for stranger in idle:
            stranger.close()


def test_an_idle_stranger_is_hung_up_on(address, monkeypatch):
    monkeypatch.setattr(rendezvous, "_PENDING_S", 0.2)
    host, port = rendezvous.split_address(address)

    def waited():
        with connected(address) as stranger:
            start = time.monotonic()
            stranger.settimeout(LONG)
            assert stranger.recv(1) == b""
            return time.monotonic() - start

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        seconds = pool.submit(waited).result
        # Nobody else comes before.
        told = run(address, [(0, 0, 2, {}), (seconds, 1, 2, {})])
        assert seconds() > 0.1
    assert told == ["met", "met"]


def test_ten_thousand_lines_are_ours_or_nobodys():
    draw = random.Random(0)
    nonce = job_secret.make()
    good = hello_line(facts={"version": "1"}, nonce=nonce).decode()
    pieces = ["[", "{", '"', ":", ",", "-1", "1e9", "NaN", "null", "9" * 30]
    pieces += ["nonce", "é", "\\u0000"]
    for _ in range(10_000):
        text = good
        for _ in range(draw.randint(1, 3)):
            start = draw.randrange(len(text) + 1)
            stop = min(start + draw.randint(0, 9), len(text))
            text = text[:start] + draw.choice(["", *pieces]) + text[stop:]
        said = greetings.parse_hello(text.encode())
        if said is not None:
            assert job_secret.is_nonce(said.pop("nonce", nonce))
            kinds = {name: type(value) for name, value in said.items()}
            assert kinds == greetings.HELLO_KINDS
            assert abs(said["process"]) <= 2**31


def test_what_others_say_is_printed_without_orders_for_terminals(address):
    told = run(
        address,
        [
            (0, 0, 2, {"version": "1"}),
            (0, 1, 2, {"version": "\x1b[2J" + "x" * 10_000}),
        ],
    )
    assert told[0] == told[1]
    assert "\x1b" not in told[0]
    assert len(told[0]) < 1000
