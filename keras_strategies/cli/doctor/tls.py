"""Checks the files for mutual TLS of JAX's coordination service."""

from collections.abc import Mapping

from keras_strategies.cli.doctor.findings import Finding, Row, fault
from keras_strategies.cli.doctor.installed import Version
from keras_strategies.cluster.exchange.rendezvous import split_address
from keras_strategies.cluster.spec import TaskInfo
from keras_strategies.job import mutual_tls
from keras_strategies.names import versions


def check_tls(
    environ: Mapping[str, str],
    info: TaskInfo | None,
    *,
    version_of: Version = versions.installed_version,
) -> tuple[tuple[Row, ...], tuple[Finding, ...]]:
    """Checks mutual TLS as a job does before it starts JAX.

    Args:
      environ: The environment variables.
      info: This process's task, if it is in a cluster.
      version_of: A function that returns the version of a package, or None if
        it is not installed.

    Returns:
      The rows and the findings. There is no row if the process is the only
      one of its job and no variable for mutual TLS is set.
    """
    version = versions.parse_version(version_of("jax") or "")
    address = info and info.coordinator_address
    is_alone = info is None or info.num_processes == 1
    try:
        credentials = mutual_tls.read_credentials(
            environ, is_supported=version >= mutual_tls.LEAST_JAX
        )
        if credentials is None:
            return () if is_alone else ((_NAME, "off"),), ()
        # Without the job's address, a certificate for any host passes.
        end = mutual_tls.check_files(
            credentials,
            split_address(address)[0] if address else "",
            is_host=bool(address and info and info.process_id == 0),
        )
    except mutual_tls.MutualTlsError as error:
        return ((_NAME, "faulty"),), (fault(error.fault, error.cure),)
    return ((_NAME, f"on; the certificate is valid until {end}"),), ()


_NAME = "mutual TLS"
