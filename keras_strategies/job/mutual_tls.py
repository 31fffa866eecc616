"""Mutual TLS of JAX's coordination service.

JAX reads the files itself, but aborts a process whose certificate is refused
by another, without naming the cause. So they are checked before JAX starts.
This module does not import JAX.
"""

import contextlib
import dataclasses
import ssl
from collections.abc import Mapping
from typing import Any, NoReturn

from keras_strategies.cluster.addresses import shorten
from keras_strategies.cluster.untrusted import escape_controls, open_regular

LEAST_JAX = (0, 11, 2)
"""The oldest version of JAX whose coordination service has mutual TLS."""

CERT, KEY, CA = FILES = (
    "JAX_MTLS_CERT_FILE",
    "JAX_MTLS_KEY_FILE",
    "JAX_MTLS_CA_FILE",
)
"""JAX's environment variables for the paths of the files.

In lower case, they are the names of JAX's options.
"""

PREFIX = "JAX_MTLS_PEER_URI_PREFIX"
"""JAX's environment variable for the start of a URI in each certificate."""

REQUIRED = "JAX_DISTRIBUTED_VERIFY_SECURE_CREDENTIALS"
"""JAX's environment variable that forbids jobs without mutual TLS."""

_ON = ("1", "on", "t", "true", "y", "yes")
_MAX_BYTES = 1 << 20
_MAX_PREFIX = 2048
# Each side of a handshake sends at most two flights.
_ROUNDS = 4
_BEGINS = {
    CERT: (b"-----BEGIN CERTIFICATE-----", "a certificate"),
    KEY: (b"PRIVATE KEY-----", "a private key"),
    CA: (b"-----BEGIN CERTIFICATE-----", "a certificate"),
}
_ENCRYPTED = (b"-----BEGIN ENCRYPTED", b"Proc-Type: 4,ENCRYPTED")
# How Ed25519 and Ed448 keys begin in a certificate (RFC 8410). JAX's TLS
# library refuses them.
_EDWARDS = (
    bytes.fromhex("302a300506032b6570032100"),
    bytes.fromhex("3043300506032b6571033a00"),
)
_DOCUMENT = 'docs/clusters.md, "Mutual TLS"'


class MutualTlsError(ValueError):
    """Raised if mutual TLS is configured, but would not work.

    Attributes:
      fault: The rule, and what was received instead.
      cure: What to change.
    """

    def __init__(self, fault: str, cure: str) -> None:
        super().__init__(f"{fault} {cure}")
        self.fault, self.cure = fault, cure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Credentials:
    """The arguments of `jax.distributed.initialize` for mutual TLS.

    Attributes:
      mtls_cert_file: Path of this process's certificate.
      mtls_key_file: Path of the certificate's private key.
      mtls_ca_file: Path of the certificates of the CA.
      mtls_peer_uri_prefix: What a URI in each certificate must start with;
        None if process 0's certificate must name its host instead.
    """

    mtls_cert_file: str
    mtls_key_file: str
    mtls_ca_file: str
    mtls_peer_uri_prefix: str | None = None

    def as_arguments(self) -> dict[str, Any]:
        """Returns the arguments by name."""
        return dataclasses.asdict(self)


def read_credentials(
    environ: Mapping[str, str],
    options: Mapping[str, Any] | None = None,
    *,
    is_supported: bool,
) -> Credentials | None:
    """Returns the paths of the files, or None without mutual TLS.

    Args:
      environ: The environment variables.
      options: JAX's options, which come before the environment variables.
      is_supported: Whether the installed JAX has mutual TLS.

    Raises:
      MutualTlsError: if variables are missing or invalid, or JAX is too old.
    """
    options = options or {}
    texts = {
        name: options.get(name.lower()) or environ.get(name, "")
        for name in (*FILES, PREFIX)
    }
    given = [name for name, text in texts.items() if text]
    is_required = bool(options.get(REQUIRED.lower())) or (
        environ.get(REQUIRED, "").strip().lower() in _ON
    )
    if not given and not is_required:
        return None
    if not is_supported:
        least = ".".join(map(str, LEAST_JAX))
        raise MutualTlsError(
            f"Mutual TLS needs jax {least} or newer; an older jax ignores its "
            f"variables. Received: {', '.join(given or [REQUIRED])}, with an "
            "older jax.",
            f"Run `pip install --upgrade 'jax>={least},<0.13'`, or unset these "
            "variables and run the job in a network that untrusted programs "
            "cannot reach.",
        )
    _check_texts(texts)
    return Credentials(
        mtls_cert_file=texts[CERT],
        mtls_key_file=texts[KEY],
        mtls_ca_file=texts[CA],
        mtls_peer_uri_prefix=texts[PREFIX] or None,
    )


def _check_texts(texts: Mapping[str, str]) -> None:
    """Raises a MutualTlsError if a file or the prefix's form is missing."""
    missing = [name for name in FILES if not texts[name]]
    if missing:
        raise MutualTlsError(
            f"Mutual TLS needs {', '.join(FILES)}. Received: no "
            f"{', no '.join(missing)}.",
            f"Set all three in every process, or none of them ({_DOCUMENT}).",
        )
    prefix = texts[PREFIX]
    if prefix and not (prefix.endswith("/") and len(prefix) <= _MAX_PREFIX):
        raise MutualTlsError(
            f"{PREFIX} must end with '/', and have at most {_MAX_PREFIX} "
            f"characters. Received: {shorten(prefix)}.",
            "Write it as 'spiffe://example.org/', for example.",
        )


def check_files(credentials: Credentials, host: str, *, is_host: bool) -> str:
    """Reads the files, and has this process authenticate itself to itself.

    Args:
      credentials: Where the files are.
      host: The name or IP address at which the others connect to process 0.
      is_host: Whether this process is process 0, whose certificate the others
        compare with `host`.

    Returns:
      The time until which the certificate is valid, as text.

    Raises:
      MutualTlsError: if a file cannot be read or is not of its kind, the key
        does not belong to the certificate, or another process would refuse
        the certificate.
    """
    paths = {
        CERT: credentials.mtls_cert_file,
        KEY: credentials.mtls_key_file,
        CA: credentials.mtls_ca_file,
    }
    for name, path in paths.items():
        _check_file(name, path)
    prefix = credentials.mtls_peer_uri_prefix
    names_host = is_host and prefix is None
    try:
        ends = _make_ends(paths, host if names_host else None, is_host=is_host)
        _shake_hands(*ends)
    except ssl.SSLCertVerificationError as error:
        _refuse_certificate(paths[CERT], error.verify_message)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise MutualTlsError(
            f"{KEY} must be the private key of {CERT}. Received: "
            f"{shorten(paths[KEY])} and {shorten(paths[CERT])}, which OpenSSL "
            f"refuses: {escape_controls(str(reason))}.",
            f"Make a certificate and its key together ({_DOCUMENT}).",
        ) from error
    certificate: Any = ends[1].getpeercert() or {}
    if any(key in (ends[1].getpeercert(True) or b"") for key in _EDWARDS):
        _refuse_certificate(paths[CERT], "JAX accepts RSA and ECDSA keys only")
    uris = [
        text
        for kind, text in certificate.get("subjectAltName", ())
        if kind == "URI"
    ]
    if prefix and not any(uri.startswith(prefix) for uri in uris):
        _refuse_certificate(
            paths[CERT], f"none of its URIs starts with {shorten(prefix)}"
        )
    return certificate.get("notAfter", "unknown")


def _check_file(name: str, path: str) -> None:
    """Raises an error if a file cannot be read or is not of its kind."""
    begins, what = _BEGINS[name]
    fault = ""
    try:
        with open_regular(path) as file:
            text = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        text, fault = b"", getattr(error, "strerror", None) or str(error)
    if not fault and len(text) > _MAX_BYTES:
        fault = f"it has more than {_MAX_BYTES} bytes"
    elif not fault and begins not in text:
        fault = f"it does not contain {what}"
    elif name == KEY and any(mark in text for mark in _ENCRYPTED):
        fault = "it is encrypted with a password, which JAX cannot ask for"
    elif name == CA and not fault:
        fault = _find_ca_fault(path)
    if fault:
        raise MutualTlsError(
            f"{name} must be the path of a PEM file with {what}. Received: "
            f"{shorten(path)}: {fault}.",
            "Correct the path, let this user read the file, or make it again "
            f"({_DOCUMENT}).",
        )


def _find_ca_fault(path: str) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cafile=path)
    except OSError as error:
        return f"OpenSSL refuses it: {getattr(error, 'reason', None) or error}"
    return ""


Ends = tuple[ssl.SSLObject, ssl.SSLObject]


def _make_ends(
    paths: Mapping[str, str], host: str | None, *, is_host: bool
) -> Ends:
    """Makes both ends of a connection in memory: the client's, the server's.

    Args:
      paths: The paths of the files.
      host: The host that the server's certificate must name; None for any.
      is_host: Whether the certificate is used by a server, too.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for context in (client, server):
        # The password is never asked for at the terminal.
        context.load_cert_chain(paths[CERT], paths[KEY], password=str)
        context.load_verify_locations(cafile=paths[CA])
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.check_hostname = host is not None
    client.verify_mode = ssl.CERT_REQUIRED if is_host else ssl.CERT_NONE
    server.verify_mode = ssl.CERT_REQUIRED
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    name = host.rstrip(".") if host else None
    return (
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )


def _shake_hands(*ends: ssl.SSLObject) -> None:
    for _ in range(_ROUNDS):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()


def _refuse_certificate(path: str, why: str) -> NoReturn:
    why = escape_controls(why)
    raise MutualTlsError(
        f"{CERT} must be a certificate that the other processes accept: valid "
        f"now, signed by {CA}, and, in process 0, for the host of the job's "
        f"address. Received: {shorten(path)}: {why.rstrip('.')}.",
        f"Make a certificate for this job ({_DOCUMENT}).",
    )
