"""What is refused before the processes of a job meet."""

import dataclasses
import json
import os

import pytest

from keras_strategies.cluster.addresses import find_free_ports
from keras_strategies.cluster.spec import TaskInfo
from keras_strategies.job import bootstrap
from tests.support.commands import python

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
    assert "must be `host:port`" in str(caught.value)


def test_a_job_whose_process_0_is_not_known_says_what_gives_it():
    second = dataclasses.replace(
        TASK, index=1, process_id=1, addresses=(None, "host:1")
    )
    with pytest.raises(ValueError, match="MEGASCALE_COORDINATOR_ADDRESS"):
        bootstrap.join(second, strategy="A", timeout_s=1.0)


# The parent does not join, which saves the other process.
WITHOUT_GUARD = """
import multiprocessing, sys

if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=print)
    child.start()
    child.join()
    sys.exit(child.exitcode)
import keras_strategies as ks
ks.MultiWorkerMirroredStrategy(startup_timeout_s=2.0)
"""


@pytest.mark.multi_process
@pytest.mark.parametrize(
    "method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)]
)
def test_a_child_of_a_script_without_a_guard_is_reported(tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_GUARD)
    addresses = [f"127.0.0.1:{port}" for port in find_free_ports(2)]
    config = {
        "cluster": {"worker": addresses},
        "task": {"type": "worker", "index": 1},
    }
    ended = python(
        script,
        method,
        env=os.environ | {"TF_CONFIG": json.dumps(config)},
        timeout=60,
    )
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert "RuntimeError: A child process must not join the job" in last
    assert "`if __name__ == '__main__':`" in last
