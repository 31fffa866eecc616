"""What a process does in the tests of mutual TLS."""

import json
import os
import socket
import ssl

from tests.multi_process.startup import TOGETHER_S, train

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, *[0] * 5])
LIMIT_S = 30.0


def make_configs(addresses):
    cluster = {"worker": addresses}
    return [
        {"cluster": cluster, "task": {"type": "worker", "index": index}}
        for index in range(2)
    ]


def train_over(me, addresses, environ):
    """Trains over mutual TLS."""
    return train(me, make_configs(addresses)[me], environ)


def train_and_knock(me, addresses, environ, stranger):
    """Trains over mutual TLS; process 1 then connects to JAX's service.

    Args:
      me: This process.
      addresses: The job's addresses.
      environ: JAX's variables.
      stranger: The variables of one whom another CA has certified.
    """
    found = train_over(me, addresses, environ)
    if me == 0:
        return found
    own = {name.split("_")[2]: path for name, path in environ.items()}
    others = {name.split("_")[2]: path for name, path in stranger.items()}
    return found | {
        "own": knock(addresses[0], own),
        "stranger": knock(addresses[0], own | others | {"CA": own["CA"]}),
        "without": knock(addresses[0], {"CA": own["CA"]}),
        "plain": knock(addresses[0], None),
    }


def knock(address, files):
    """Whether a client of HTTP/2 with these files is answered."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as plain:
        connection = plain
        try:
            if files is not None:
                context = ssl.create_default_context(cafile=files["CA"])
                if "CERT" in files:
                    context.load_cert_chain(files["CERT"], files["KEY"])
                context.set_alpn_protocols(["h2"])
                connection = context.wrap_socket(plain, server_hostname=host)
            connection.sendall(PREFACE)
            return bool(connection.recv(1))
        except (ConnectionError, ssl.SSLError):
            return False


def start(me, addresses, environs):
    """Starts a job of processes with different variables."""
    os.environ.update(environs[me])
    os.environ["TF_CONFIG"] = json.dumps(make_configs(addresses)[me])
    import keras_strategies as ks

    try:
        ks.MultiWorkerMirroredStrategy(startup_timeout_s=TOGETHER_S)
    except RuntimeError as error:
        return str(error)
    return "no error"
