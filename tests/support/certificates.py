"""Certificates for mutual TLS, made by the recipe of examples/clusters."""

import pathlib

from tests.support.commands import call

ROOT = pathlib.Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "clusters" / "certificates.sh"
CA = ("req", "-x509", "-nodes", "-subj", "/CN=another CA")


def make_certificates(directory, *names):
    """JAX's variables for files in a directory, by the recipe."""
    call("sh", RECIPE, directory, *(names or ("127.0.0.1",)))
    return list_variables(directory)


def list_variables(directory):
    """JAX's variables for the files in a directory."""
    return {
        f"JAX_MTLS_{name.upper()}_FILE": str(directory / f"{name}.pem")
        for name in ("cert", "key", "ca")
    }


def sign(directory, *, key="rsa:2048", days=30, extensions=()):
    """Makes a CA and what it signed, with these extensions."""
    directory.mkdir()
    new = ("-newkey", *key.split())
    keys = ("-keyout", directory / "ca.key", "-out", directory / "ca.pem")
    call("openssl", *CA, *new, *keys)
    keys = ("-keyout", directory / "key.pem", "-out", directory / "request")
    call("openssl", "req", *new, "-nodes", "-subj", "/CN=x", *keys)
    (directory / "extensions").write_text("\n".join(extensions))
    call(
        *("openssl", "x509", "-req", "-in", directory / "request"),
        *("-CA", directory / "ca.pem", "-CAkey", directory / "ca.key"),
        *("-CAcreateserial", "-days", days, "-out", directory / "cert.pem"),
        *("-extfile", directory / "extensions"),
    )
    return list_variables(directory)
