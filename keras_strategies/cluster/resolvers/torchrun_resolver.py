"""The cluster that torchrun's variables describe."""

from collections.abc import Mapping

from keras_strategies.cluster.addresses import (
    check_address,
    join_address,
    read_number,
    read_port,
    read_text,
)
from keras_strategies.cluster.checks import check_port
from keras_strategies.cluster.resolvers.resolver import (
    ClusterResolver,
    environ_or_own,
)
from keras_strategies.cluster.spec import ClusterSpec

_SETTER = "torchrun"
_HOST = "MASTER_ADDR"
_PORT = "MASTER_PORT"
_PROCESS_ID = "RANK"
_NUM_PROCESSES = "WORLD_SIZE"
_LOCAL_RANK = "LOCAL_RANK"
_JAX_PORT = "JAX_COORDINATOR_PORT"
# torchrun sets it where its agent listens on MASTER_PORT itself.
_AGENT_LISTENS = "TORCHELASTIC_USE_AGENT_STORE"


class TorchrunClusterResolver(ClusterResolver):
    """Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, at each call.

    ```sh
    torchrun --nnodes 2 --nproc-per-node 4 ... train.py
    ```

    All processes are workers, numbered by RANK; rank 0 is the chief. The
    addresses of the others are not known: `cluster_spec` has task 0 only,
    `num_processes` says how many there are. Not in tf.

    Everything but `environment` and `num_accelerators` raises RuntimeError if
    a variable is not set and ValueError if it cannot be followed.

    Args:
      port: Where the chief listens. None: JAX_COORDINATOR_PORT, else
        MASTER_PORT, or the next one where torchrun's agent listens there
        itself (it says so in TORCHELASTIC_USE_AGENT_STORE).
      rpc_layer: What `master()` puts before the address.
      environ: The variables to read; None for those of this process.

    References:
      https://docs.pytorch.org/docs/stable/elastic/run.html

    Example:
      >>> resolver = ks.cluster_resolver.TorchrunClusterResolver(environ={
      ...     "RANK": "1", "WORLD_SIZE": "2",
      ...     "MASTER_ADDR": "host0", "MASTER_PORT": "29500",
      ... })
      >>> resolver.task_id, resolver.num_processes
      (1, 2)
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        rpc_layer: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._port = None if port is None else check_port(port, "`port`")
        self._rpc_layer = rpc_layer
        self._environ = environ_or_own(environ)

    def cluster_spec(self) -> ClusterSpec:
        """The address of worker 0."""
        host = read_text(self._environ, _HOST, _SETTER)
        address = join_address(host, self._read_port())
        check_address(address, f"worker 0 ({_HOST})")
        return ClusterSpec({"worker": {0: address}})

    @property
    def num_processes(self) -> int:
        """WORLD_SIZE: how many processes train."""
        return read_number(self._environ, _NUM_PROCESSES, _SETTER, least=1)

    def _find_task_type(self) -> str:
        return "worker"

    def _find_task_id(self) -> int:
        last = self.num_processes - 1
        return read_number(self._environ, _PROCESS_ID, _SETTER, most=last)

    def _address_of_task(
        self, task_type: str | None, task_id: int | None
    ) -> str | None:
        if task_type is None or task_id is None:
            task_type, task_id = "worker", 0
        return super()._address_of_task(task_type, task_id)

    @property
    def local_rank(self) -> int:
        """LOCAL_RANK: the number of this process on its host."""
        return read_number(self._environ, _LOCAL_RANK, _SETTER)

    def _read_port(self) -> int:
        if self._port is not None:
            return self._port
        if self._environ.get(_JAX_PORT):
            return read_port(self._environ, _JAX_PORT, "you")
        port = read_port(self._environ, _PORT, _SETTER)
        if self._environ.get(_AGENT_LISTENS) != "True":
            return port
        # The last port has no next one.
        return port + 1 if port < 65535 else port - 1
