"""What is refused before the processes of a job meet."""

import pytest

from keras_strategies.cluster.job import bootstrap
from keras_strategies.cluster.spec import TaskInfo

pytestmark = pytest.mark.quick

TASK = TaskInfo(
    type="worker",
    index=0,
    is_chief=True,
    process_id=0,
    num_processes=2,
    addresses=("127.0.0.1:1", "127.0.0.1:2"),
)


@pytest.mark.parametrize(
    "address", ["host", ":", "host:port", "host:99999", "$(id):1", "::1:1"]
)
def test_an_address_to_listen_at_is_checked(monkeypatch, address):
    monkeypatch.setenv(bootstrap.BIND_ADDRESS, address)
    with pytest.raises(ValueError, match=bootstrap.BIND_ADDRESS) as caught:
        bootstrap.join(TASK, strategy="A", timeout_s=1.0)
    assert "no `host:port`" in str(caught.value)
