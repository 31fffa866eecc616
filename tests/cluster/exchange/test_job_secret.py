"""The secret of a job, and how processes prove that they have it."""

import concurrent.futures
import contextlib
import json
import socket
import time

import pytest

from keras_strategies.cluster import exchange
from keras_strategies.cluster.addresses import find_free_ports
from keras_strategies.cluster.exchange.job_secret import (
    VARIABLE,
    Secret,
    read_secret,
)
from keras_strategies.cluster.exchange.rendezvous import RendezvousError, meet
from tests.cluster.exchange.test_rendezvous import hello_line
from tests.support.combinations import combine, few
from tests.support.waiting import connected

ONE, OTHER = Secret("one" * 10), Secret("other" * 10)
LONG = 60.0
LIMIT = 2.0


def said_to(address, index, secret, *, count=2, timeout_s=LONG, **more):
    """What a process is told, after a while if it is not process 0."""
    time.sleep(0.4 * (index > 0))
    try:
        meet(
            address,
            process_id=index,
            num_processes=count,
            facts={"strategy": "A"} | more,
            timeout_s=timeout_s,
            secret=secret,
        )
    except RendezvousError as error:
        return str(error)
    return "met"


def run(address, secrets, before=None, timeout_s=LONG):
    """What each is told; somebody else comes before all but process 0."""

    def told(index):
        return said_to(
            address,
            index,
            secrets[index],
            count=len(secrets),
            timeout_s=timeout_s,
        )

    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        found = [pool.submit(told, 0)]
        bothered = before and before()
        found += [pool.submit(told, i) for i in range(1, len(secrets))]
        return [f.result() for f in found], bothered


@pytest.mark.parametrize("count", combine([2, 3, 8], every=2))
def test_all_that_have_it_meet(address, count):
    assert run(address, [ONE] * count)[0] == ["met"] * count


def test_one_without_it_says_so_and_keeps_nobody_out(address):
    # The job's own process comes later, and is taken.
    told, alone = run(
        address, [ONE, ONE], before=lambda: said_to(address, 1, None)
    )
    assert told == ["met", "met"]
    assert f"the same {VARIABLE}" in alone


def test_process_0_says_who_did_not_prove_it(address):
    told, _ = run(address, [ONE, None], timeout_s=LIMIT)
    assert "nothing from process 1" in told[0]
    assert VARIABLE in told[0]
    assert f"the same {VARIABLE}" in told[1]


def test_only_the_others_have_it(address):
    told, _ = run(address, [None, ONE, None])
    assert f"the same {VARIABLE}" in told[0]
    assert told[0].startswith("process 1: ")
    assert told[2] == told[0]
    assert f"the same {VARIABLE}" in told[1]


@pytest.mark.multi_process
def test_another_secret_is_another_job(address):
    told, other = run(
        address, [ONE, ONE], before=lambda: said_to(address, 1, OTHER)
    )
    assert told == ["met", "met"]
    assert "another one in process 0 than in this" in other
    told, _ = run(address, [ONE, OTHER], timeout_s=LIMIT)
    assert "nothing from process 1" in told[0]


def read_lines(stranger):
    stranger.settimeout(LONG)
    with stranger.makefile("rb") as file:
        return file.readlines()


_EMPTY = b'{"proof": ""}'


@pytest.mark.parametrize(
    ("changed", "answer"),
    few(
        [
            ({"count": 3}, _EMPTY),
            ({"process": 0}, _EMPTY),
            ({"process": 7}, b"{}"),
            ({"problem": "Out of order."}, b""),
            ({"facts": {"strategy": "B"}}, b"x"),
            ({}, _EMPTY),
        ],
        every=2,
    ),
    ids=str,
)
def test_strangers_who_claim_a_place_fail_no_job(address, changed, answer):
    def claim():
        with connected(address) as stranger:
            nonce = exchange.job_secret.make()
            stranger.sendall(hello_line(**changed, nonce=nonce))
            if answer:
                challenge = stranger.recv(65_536)
                mine = json.loads(challenge)
                assert set(mine) == {"job", "nonce", "proof"}
                words = answer.replace(b"{", b'{"job": "keras_strategies",')
                stranger.sendall(words.replace(b",}", b"}") + b"\n")
                return read_lines(stranger)
            return []

    told, heard = run(address, [ONE, ONE], before=claim)
    assert told == ["met", "met"]
    assert heard == []


def test_a_proof_of_an_earlier_meeting_is_worth_nothing(address):
    """What process 1 said is recorded by one between them, and said again."""
    recorded = []

    def between():
        host, port = exchange.rendezvous.split_address(address)
        with (
            socket.create_server((host, free)) as server,
            contextlib.suppress(OSError),
        ):
            server.settimeout(LONG)
            near, _ = server.accept()
            with near, connected(address) as far:
                recorded.append(near.recv(65_536))
                far.sendall(recorded[0])
                near.sendall(far.recv(65_536))
                recorded.append(near.recv(65_536))
                far.sendall(recorded[1])
                for _ in range(2):
                    near.sendall(far.recv(65_536))
        del port

    free = find_free_ports(1)[0]
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        proxy = pool.submit(between)
        first = pool.submit(said_to, address, 0, ONE)
        other = pool.submit(said_to, f"127.0.0.1:{free}", 1, ONE)
        assert first.result() == other.result() == "met"
        proxy.result()

    def again():
        with connected(address) as stranger:
            stranger.sendall(recorded[0])
            stranger.recv(65_536)
            stranger.sendall(recorded[1])
            return read_lines(stranger)

    told, heard = run(address, [ONE, ONE], before=again)
    assert (told, heard) == (["met", "met"], [])


@pytest.mark.parametrize(
    "words",
    combine(
        [
            b'{"job": "keras_strategies", "left_s": 5}\n',
            b'{"job": "keras_strategies", "verdict": "Give up."}\n',
            b'{"job": "keras_strategies", "nonce": "x", "proof": "y"}\n',
            b'{"job": "keras_strategies", "nonce": "%s", "proof": "%s"}\n'
            % (b"a" * 64, b"a" * 64),
            b"[" * 60_000 + b"\n",
            b"hello\n",
        ],
        every=3,
    ),
    ids=lambda words: str(words[:60]),
)
def test_a_process_0_that_proves_nothing_is_not_believed(address, words):
    host, port = exchange.rendezvous.split_address(address)

    def answer():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                connection.recv(65_536)
                connection.sendall(words)
                connection.close()

    with (
        socket.create_server((host, port)) as server,
        concurrent.futures.ThreadPoolExecutor(9) as pool,
    ):
        pool.submit(answer)
        told = said_to(address, 1, ONE, timeout_s=0.5)
        server.shutdown(socket.SHUT_RDWR)
    assert "Give up" not in told
    assert VARIABLE in told or "a different service" in told


@pytest.mark.multi_process
def test_what_process_0_says_is_proved_too(address):
    """A verdict is another one on its way."""
    free = find_free_ports(1)[0]

    def between():
        with socket.create_server(("127.0.0.1", free)) as server:
            server.settimeout(LONG)
            near, _ = server.accept()
            with near, connected(address) as far:
                far.sendall(near.recv(65_536))
                near.sendall(far.recv(65_536))
                far.sendall(near.recv(65_536))
                said = far.recv(65_536).replace(b'"left_s": ', b'"left_s": 1')
                near.sendall(said)

    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        proxy = pool.submit(between)
        first = pool.submit(said_to, address, 0, ONE, timeout_s=LIMIT)
        other = pool.submit(
            said_to, f"127.0.0.1:{free}", 1, ONE, timeout_s=LIMIT
        )
        assert "must reach process 0" in other.result()
        proxy.result()
        first.result()


def test_the_secret_is_never_said(address):
    text = "a very secret text"
    heard = []

    def listen():
        with connected(address) as stranger:
            stranger.sendall(hello_line(nonce=exchange.job_secret.make()))
            heard.append(stranger.recv(65_536))

    told, _ = run(address, [Secret(text), Secret(text)], before=listen)
    assert told == ["met", "met"]
    assert text.encode() not in heard[0]
    assert text not in repr(Secret(text))
    assert text not in str(vars(Secret(text)).keys())


@pytest.mark.parametrize("text", ["short", "x" * 2000, "a" * 15])
def test_a_secret_of_a_wrong_length_is_refused(text):
    with pytest.raises(ValueError, match=VARIABLE) as caught:
        read_secret({VARIABLE: text})
    assert text not in str(caught.value)


@pytest.mark.parametrize(
    "text", combine(["\udcff" * 20, "\ud800" + "x" * 20, "\xe9" * 20], every=2)
)
def test_a_secret_may_be_of_any_characters(address, text):
    one, other = (read_secret({VARIABLE: text}) for _ in range(2))
    assert run(address, [one, other])[0] == ["met", "met"]


def test_no_secret_is_none():
    assert read_secret({}) is None
    assert read_secret({VARIABLE: " \n"}) is None
    assert read_secret({VARIABLE: f"{'x' * 20}\n"}) is not None
