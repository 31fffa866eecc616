"""Mutual TLS of JAX's coordination service, whose files JAX reads itself.

JAX aborts a process without naming the cause. So the paths of the files are
checked before JAX starts. This module does not import JAX.
"""

import os
from collections.abc import Mapping
from typing import Any

from keras_strategies.cluster.addresses import shorten

MIN_JAX = (0, 11, 2)
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
"""JAX's environment variable for the start of a certificate's URI."""

REQUIRED = "JAX_DISTRIBUTED_VERIFY_SECURE_CREDENTIALS"
"""JAX's environment variable that forbids jobs without mutual TLS."""

_OFF = ("", "0", "f", "false", "n", "no", "off")


def read_mutual_tls(
    environ: Mapping[str, str],
    options: Mapping[str, Any] | None = None,
    *,
    is_supported: bool,
) -> dict[str, str]:
    """Returns a job's mutual TLS, and checks that its files exist.

    JAX itself reads the environment variables when it is imported, so a job
    whose variables are set later would not be encrypted.

    Args:
      environ: The environment variables.
      options: JAX's options, which come before the environment variables.
      is_supported: Whether the installed JAX has mutual TLS.

    Returns:
      Arguments of `jax.distributed.initialize`; {} without mutual TLS.

    Raises:
      ValueError: if JAX is too old, or a file is missing or cannot be read.
    """
    options = options or {}
    given = {
        name: str(options.get(name.lower()) or environ.get(name, ""))
        for name in (*FILES, REQUIRED, PREFIX)
    }
    is_required = given.pop(REQUIRED).strip().lower() not in _OFF
    prefix = given.pop(PREFIX)
    if not is_required and not any(given.values()):
        return {}
    if not is_supported:
        minimum = ".".join(map(str, MIN_JAX))
        names = [name for name, path in given.items() if path] or [REQUIRED]
        raise ValueError(
            f"Mutual TLS needs jax {minimum} or newer; an older jax ignores "
            f"its variables. Received: {', '.join(names)}, with an older jax. "
            f"Run `pip install --upgrade 'jax>={minimum},<0.13'`, or unset "
            "these variables and run the job in a network that untrusted "
            "programs cannot reach."
        )
    for name, path in given.items():
        if "\0" in path or not (
            os.path.isfile(path) and os.access(path, os.R_OK)
        ):
            raise ValueError(
                f"{name} must be the path of a file that this user can read. "
                f"Received: {shorten(path)}. Set all of {', '.join(FILES)} in "
                'every process, or none of them (docs/clusters.md, "Mutual '
                'TLS").'
            )
    return {
        name.removeprefix("JAX_").lower(): value
        for name, value in (given | {PREFIX: prefix}).items()
        if value
    }
