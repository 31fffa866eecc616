"""A free address, and waits of a rendezvous that are short."""

import pytest

from keras_strategies.cluster.addresses import find_free_ports
from keras_strategies.cluster.exchange import joining, rendezvous


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    # Long enough for threads of a busy machine to get there.
    monkeypatch.setattr(rendezvous, "_LINGER_S", 1.5)
    monkeypatch.setattr(rendezvous, "_GRACE_S", 1.5)
    monkeypatch.setattr(joining, "_GRACE_S", 1.5)


@pytest.fixture
def address():
    return f"127.0.0.1:{find_free_ports(1)[0]}"
