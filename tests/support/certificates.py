"""Certificates for mutual TLS, made by the recipe of examples/clusters."""

import pathlib

from tests.support.commands import call

ROOT = pathlib.Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "clusters" / "certificates.sh"
CA = ("req", "-x509", "-nodes", "-subj", "/CN=another CA")


def make_certificates(folder, *names):
    """JAX's variables for files in a folder, by the recipe."""
    call("sh", RECIPE, folder, *(names or ("127.0.0.1",)))
    return list_variables(folder)


def list_variables(folder):
    """JAX's variables for the files in a folder."""
    return {
        f"JAX_MTLS_{name.upper()}_FILE": str(folder / f"{name}.pem")
        for name in ("cert", "key", "ca")
    }


def sign(folder, *, key="rsa:2048", days=30, extensions=()):
    """Makes a CA and what it signed, with these extensions."""
    folder.mkdir()
    new = ("-newkey", *key.split())
    keys = ("-keyout", folder / "ca.key", "-out", folder / "ca.pem")
    call("openssl", *CA, *new, *keys)
    keys = ("-keyout", folder / "key.pem", "-out", folder / "request")
    call("openssl", "req", *new, "-nodes", "-subj", "/CN=x", *keys)
    (folder / "extensions").write_text("\n".join(extensions))
    call(
        *("openssl", "x509", "-req", "-in", folder / "request"),
        *("-CA", folder / "ca.pem", "-CAkey", folder / "ca.key"),
        *("-CAcreateserial", "-days", days, "-out", folder / "cert.pem"),
        *("-extfile", folder / "extensions"),
    )
    return list_variables(folder)
