"""A resolver for processes that torchrun started."""

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
)
from keras_strategies.cluster.spec import ClusterSpec

_SETTER = "torchrun"
_HOST = "MASTER_ADDR"
_PORT = "MASTER_PORT"
_RANK = "RANK"
_COUNT = "WORLD_SIZE"
_JAX_PORT = "JAX_COORDINATOR_PORT"
# torchrun sets this variable if its own agent listens on MASTER_PORT.
_AGENT_LISTENS = "TORCHELASTIC_USE_AGENT_STORE"


class TorchrunClusterResolver(ClusterResolver):
    """A resolver for processes that torchrun started. Not in tf.

    ```sh
    torchrun --nnodes 2 --nproc-per-node 4 ... train.py
    ```

    Each call reads the environment variables RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT again. All processes are workers, numbered by RANK, and rank 0
    is the chief. torchrun does not provide the addresses of the other
    processes, so `cluster_spec` contains only task 0, and `num_processes` is
    WORLD_SIZE.

    Methods and properties that read a variable raise RuntimeError if it is not
    set, and ValueError if it is invalid.

    Args:
      port: The chief's port. None: the port in JAX_COORDINATOR_PORT; if that
        is not set, MASTER_PORT. If torchrun's own agent already listens on
        MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE is then "True"), the port
        after MASTER_PORT is used instead.
      rpc_layer: The protocol that `master()` prepends to the address.
      environ: The environment variables; None for those of this process.

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
        self._task_type = "worker"
        self._rpc_layer = rpc_layer
        self._environ = environ

    def cluster_spec(self) -> ClusterSpec:
        """Returns a cluster with the address of worker 0 only."""
        host = read_text(self._environ_now, _HOST, _SETTER)
        address = join_address(host, self._read_port())
        check_address(address, f"worker 0 ({_HOST})")
        return ClusterSpec({"worker": {0: address}})

    @property
    def num_processes(self) -> int:
        """The number of training processes: the value of WORLD_SIZE."""
        return read_number(self._environ_now, _COUNT, _SETTER, minimum=1)

    def _find_task_id(self) -> int:
        last = self.num_processes - 1
        return read_number(self._environ_now, _RANK, _SETTER, maximum=last)

    def _read_port(self) -> int:
        if self._port is not None:
            return self._port
        if self._environ_now.get(_JAX_PORT):
            return read_port(self._environ_now, _JAX_PORT, "you")
        port = read_port(self._environ_now, _PORT, _SETTER)
        if self._environ_now.get(_AGENT_LISTENS) != "True":
            return port
        # 65535 is the highest port, so the port before it is used instead.
        return port + 1 if port < 65535 else port - 1
