"""TPUClusterResolver: the TPU that this program runs on, with all its hosts.

Who is in the cluster is found by JAX, when the hosts are joined
(`jax.distributed.initialize`); the environment variables that Cloud TPU sets
tell some of it before.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from keras_strategies.cluster.addresses import (
    check_address,
    join_address,
    read_number,
    read_port,
    shown,
)
from keras_strategies.cluster.checks import check_type
from keras_strategies.cluster.resolvers.resolver import (
    ClusterResolver,
    environ_or_own,
)
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.tpu.coordinates import slice_of
from keras_strategies.tpu.topology import Topology

LOCAL = "local"
_SETTER = "Cloud TPU"
_NAME = "TPU_NAME"
_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
_TASK_ID = "TPU_WORKER_ID"
_NUM_SLICES = "MEGASCALE_NUM_SLICES"
_SLICE_ID = "MEGASCALE_SLICE_ID"
_COORDINATOR = "MEGASCALE_COORDINATOR_ADDRESS"
_PORT = "JAX_COORDINATOR_PORT"
# Where JAX's first process on a TPU listens (jax 0.10).
_DEFAULT_PORT = 8482
_WITH_PORT = re.compile(r"(\[.*\]|[^:]*):\d+")


class TPUSystemMetadata(NamedTuple):
    """What a TPU consists of; as tf's.

    Attributes:
      num_cores: Number of cores of all hosts.
      num_hosts: Number of hosts.
      num_of_cores_per_host: Number of cores of each.
      topology: The `Topology`; None where there are several slices.
      devices: The jax devices. Differs from tf: there they are descriptions.

    Example:
      ```python
      resolver = ks.cluster_resolver.TPUClusterResolver.connect("")
      metadata = resolver.get_tpu_system_metadata()
      print(metadata.num_cores, "cores on", metadata.num_hosts, "hosts")
      ```
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: Topology | None
    devices: tuple[jax.Device, ...]


class TPUClusterResolver(ClusterResolver):
    """The TPU that this program runs on; as tf's.

        resolver = TPUClusterResolver.connect("")
        strategy = ks.TPUStrategy(resolver)

    A program of JAX runs on the TPU's own hosts, the same on each. So there is
    no TPU elsewhere to look for: a name can only be this one's.

    Args:
      tpu: "" for the TPU of this host, with all its hosts; "local" for this
        host's cores alone; or the TPU's name, which the variable TPU_NAME
        holds. None: TPU_NAME, else "".
      zone: Not used: nothing is looked up.
      project: Not used.
      job_name: The job of all hosts.
      coordinator_name: A further job that `cluster_spec` has.
      coordinator_address: Its one address. Differs from tf: no server is
        started where it is missing.
      credentials: Not used.
      service: Not used.
      discovery_url: Not used.
      environ: The variables to read; None for those of this process.

    Raises:
      TypeError: `tpu` is no str.
      ValueError: a name that is not this TPU's, or an address.

    References:
      https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TPUClusterResolver
    """

    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: object = "default",
        service: object = None,
        discovery_url: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        del zone, project, credentials, service, discovery_url
        self._environ = environ_or_own(environ)
        self._tpu = _checked_name(tpu, self._environ)
        self._task_type = job_name
        self._coordinator_name = coordinator_name
        self._coordinator_address = coordinator_address

    @staticmethod
    def connect(
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
    ) -> "TPUClusterResolver":
        """Makes a resolver and joins the TPU's hosts. Collective.

        To be called before JAX's devices are used. Where there is no TPU
        nothing is joined: the program runs on what there is.

        Args:
          tpu: See `TPUClusterResolver`.
          zone: Not used.
          project: Not used.

        Raises:
          RuntimeError: JAX's devices are in use already, or not all hosts
            came.
        """
        resolver = TPUClusterResolver(tpu, zone, project)
        resolver.join()
        return resolver

    def join(self) -> None:
        """Joins the TPU's hosts, if that has not been done; see `connect`.

        Not in tf, where `tf.config.experimental_connect_to_cluster` does it.
        """
        if self._tpu == LOCAL or jax.distributed.is_initialized():
            return
        # JAX's errors do not name the variables of slices.
        self._slice_id()
        num_hosts = self.num_processes
        if num_hosts == 1:
            return
        # It would take a tenth of the time of importing this package.
        from keras_strategies.cluster.job import bootstrap
        from keras_strategies.cluster.watchdog import watchdog

        bootstrap.check_main_guard()
        try:
            jax.distributed.initialize(**watchdog.INITIALIZE_ARGUMENTS)
        except ValueError:
            # JAX found no cluster of any kind.
            if num_hosts is not None:
                raise
        except RuntimeError as error:
            _check_alone(num_hosts, error)

    def devices(self) -> tuple[jax.Device, ...]:
        """The devices: of all hosts, which are joined, or of this one.

        Elsewhere than on a TPU those that there are. Not in tf.
        """
        self.join()
        return tuple(
            jax.local_devices() if self._tpu == LOCAL else jax.devices()
        )

    def cluster_spec(self) -> ClusterSpec:
        """The addresses of the TPU's hosts, as far as variables give them.

        Empty for "local" and where none are set: JAX asks Cloud TPU then. Of
        a job of several slices those of this one, and the first one's if
        MEGASCALE_COORDINATOR_ADDRESS gives it.
        """
        if self._tpu == LOCAL:
            return ClusterSpec({})
        addresses = self._addresses()
        jobs: dict[str, Any] = {}
        if addresses:
            first = self._slice_id() * len(addresses)
            tasks = dict(enumerate(addresses, first))
            if first:
                tasks = self._coordinator() | tasks
            jobs[self.get_job_name()] = tasks if first else addresses
        if self._coordinator_name and self._coordinator_address:
            jobs[self._coordinator_name] = [self._coordinator_address]
        return ClusterSpec(jobs)

    def get_master(self) -> str:
        """The old name of `master()`."""
        return self.master()

    def get_job_name(self) -> str:
        """The job of all hosts."""
        return self._task_type or "worker"

    def get_coordination_service_leader(self) -> str:
        """The task that the others meet at, by tf's name."""
        return f"/job:{self.get_job_name()}/task:0"

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """What the TPU consists of; joins its hosts and starts the devices.

        Elsewhere than on a TPU it describes the devices that there are.
        """
        devices = self.devices()
        num_hosts = len({device.process_index for device in devices})
        is_one = len({slice_of(device) for device in devices}) == 1
        return TPUSystemMetadata(
            num_cores=len(devices),
            num_hosts=num_hosts,
            num_of_cores_per_host=len(devices) // num_hosts,
            topology=Topology.from_devices(devices) if is_one else None,
            devices=devices,
        )

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        """Returns the number of TPU cores of a host, such as `{"TPU": 4}`.

        Joins the hosts and starts the devices. 0 where there is no TPU.
        """
        del task_type, task_id
        self.join()
        return {"TPU": sum(d.platform == "tpu" for d in jax.local_devices())}

    @property
    def num_processes(self) -> int | None:
        """The number of hosts; None where no variable gives it."""
        if self._tpu == LOCAL:
            return 1
        count = len(self._addresses())
        return count * self._num_slices() if count else None

    def _find_task_id(self) -> int | None:
        if self._tpu == LOCAL:
            return 0
        if self._environ.get(_TASK_ID):
            number = read_number(self._environ, _TASK_ID, _SETTER)
            return number + self._slice_id() * len(self._addresses())
        is_joined = jax.distributed.is_initialized()
        return jax.process_index() if is_joined else None

    def _chosen_layer(self, rpc_layer: str | None) -> str:
        return "grpc"

    def _address_of_task(
        self, task_type: str | None, task_id: int | None
    ) -> str | None:
        spec = self.cluster_spec()
        if not spec:
            return None
        if task_type is None or task_id is None:
            task_type, task_id = self.get_job_name(), self.task_id or 0
        return spec.task_address(task_type, task_id)

    def _addresses(self) -> list[str]:
        """`host:port` of this slice's hosts; none if no variable has them."""
        texts = [text for name in _HOSTS if (text := self._environ.get(name))]
        if not texts:
            return []
        hosts = enumerate(texts[0].split(","))
        owner = f"({' or '.join(_HOSTS)})"
        return [
            self._address_of(host, f"host {i} {owner}") for i, host in hosts
        ]

    def _coordinator(self) -> dict[int, str]:
        """The address of host 0 of the first of several slices, if known."""
        host = self._environ.get(_COORDINATOR)
        return {0: self._address_of(host, _COORDINATOR)} if host else {}

    def _address_of(self, host: str, owner: str) -> str:
        port = _DEFAULT_PORT
        if self._environ.get(_PORT):
            port = read_port(self._environ, _PORT, "you")
        # libtpu's own port may be there; JAX meets at another.
        with_port = _WITH_PORT.fullmatch(host.strip())
        address = join_address(
            with_port[1] if with_port else host.strip(), port
        )
        check_address(address, owner)
        return address

    def _num_slices(self) -> int:
        if not self._environ.get(_NUM_SLICES):
            return 1
        return read_number(self._environ, _NUM_SLICES, _SETTER, least=1)

    def _slice_id(self) -> int:
        environ, count = self._environ, self._num_slices()
        if not environ.get(_SLICE_ID) and count == 1:
            return 0
        try:
            return read_number(environ, _SLICE_ID, _SETTER, most=count - 1)
        except (ValueError, RuntimeError) as error:
            raise ValueError(
                f"{error} {_NUM_SLICES} gives {count} slices: correct the one "
                "that is wrong."
            ) from error

    def __repr__(self) -> str:
        return f"<TPUClusterResolver of {self._tpu or 'this host'!r}>"


def _checked_name(tpu: str | None, environ: Mapping[str, str]) -> str:
    """The name: "local", "" or this TPU's own."""
    own = environ.get(_NAME, "")
    if tpu is None:
        return own
    cure = "Leave it out for the TPU of this host."
    check_type("`tpu`", tpu, str, "a str or None", cure)
    if tpu in ("", LOCAL) or tpu == own:
        return tpu
    known = f"{own!r}" if own else "not set"
    raise ValueError(
        "A program runs on the hosts of its TPU, so no other one can be "
        f"connected to. Received: tpu={shown(tpu)}, and TPU_NAME is {known}. "
        "Accepted are '' (this host's TPU with all its hosts), 'local' (this "
        "host alone) and the name that TPU_NAME holds. To compile for a kind "
        "of TPU use `ks.TPUStrategy.for_topology('v5e:4x4')`."
    )


def _check_alone(num_hosts: int | None, error: RuntimeError) -> None:
    """Raises unless the devices show that there is no other host."""
    is_started = not isinstance(error, jax.errors.JaxRuntimeError)
    if num_hosts is None and is_started and jax.process_count() == 1:
        return
    raise RuntimeError(
        "The hosts of the TPU could not be joined. They are before JAX's "
        f"devices are used, by all of them. Received: {error} Call "
        "`TPUClusterResolver.connect()` at the start of the program, on every "
        "host; or use `TPUClusterResolver('local')` for this host's cores "
        "alone."
    ) from error
