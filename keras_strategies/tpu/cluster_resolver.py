"""TPUClusterResolver: the TPU that this program runs on, with all its hosts.

JAX finds all hosts when they are connected (`jax.distributed.initialize`).
Before that, Cloud TPU's environment variables may describe some of them.
"""

import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from keras_strategies.cluster.addresses import (
    check_address,
    join_address,
    read_number,
    read_port,
    shorten,
)
from keras_strategies.cluster.checks import check_type
from keras_strategies.cluster.resolvers.resolver import (
    ClusterResolver,
)
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.tpu.device_groups import get_slice
from keras_strategies.tpu.topology import Topology

LOCAL = "local"
_SETTER = "Cloud TPU"
_NAME = "TPU_NAME"
_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
_TASK_ID = "TPU_WORKER_ID"
_NUM_SLICES = "MEGASCALE_NUM_SLICES"
_PORT = "JAX_COORDINATOR_PORT"
# These two are also set on machines without a TPU.
_OF_LIBRARIES = {"TPU_LOAD_LIBRARY", "TPU_LIBRARY_PATH"}
_DEV = pathlib.Path("/dev")
# The port at which JAX's first process listens on a TPU (jax 0.10).
_DEFAULT_PORT = 8482
_WITH_PORT = re.compile(r"(\[.*\]|[^:]*):\d+")


class TPUSystemMetadata(NamedTuple):
    """A description of a TPU's cores, hosts and devices, as in TensorFlow.

    Attributes:
      num_cores: The total number of cores on all hosts.
      num_hosts: The number of hosts.
      num_of_cores_per_host: The number of cores on each host.
      topology: The `Topology`, or None if there are several slices.
      devices: The JAX devices. Differs from tf, which returns descriptions of
        devices.

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
    """A resolver for the TPU that this program runs on, as in TensorFlow.

        resolver = TPUClusterResolver.connect("")
        strategy = ks.TPUStrategy(resolver)

    Every host of the TPU runs the same JAX program. A program cannot use a
    remote TPU, so `tpu` can only refer to the TPU that this host belongs to.

    Args:
      tpu: "" for the TPU that this host belongs to, with all its hosts;
        "local" for only the cores of this host; or the TPU's name, which must
        equal the environment variable TPU_NAME. None: the value of TPU_NAME,
        or "" if it is not set; without a TPU an error, as in tf.
      zone: Not used, because the TPU's name is not looked up.
      project: Not used.
      job_name: The name of the job that contains all hosts.
      coordinator_name: The name of an additional job in `cluster_spec`.
      coordinator_address: The only address in that additional job. Differs
        from tf: if it is missing, no server is started.
      credentials: Not used.
      service: Not used.
      discovery_url: Not used.
      environ: The environment variables; None for those of this process.

    Raises:
      TypeError: if `tpu` is not a str.
      ValueError: if `tpu` is an address, or the name of another TPU; or if it
        is None and this machine has no TPU.

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
        self._environ = environ
        self._tpu = _check_name(tpu, self._environ_now)
        self._task_type = job_name
        self._coordinator_name = coordinator_name
        self._coordinator_address = coordinator_address

    @staticmethod
    def connect(
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
    ) -> "TPUClusterResolver":
        """Creates a resolver and connects the TPU's hosts. Collective.

        Call it before JAX's devices are used. With "" or "local" on a machine
        without a TPU, no hosts are connected, and the program runs on the
        devices that JAX finds.

        Args:
          tpu: See `TPUClusterResolver`.
          zone: Not used.
          project: Not used.

        Raises:
          RuntimeError: if JAX's devices are already in use, or a host did not
            connect.
        """
        resolver = TPUClusterResolver(tpu, zone, project)
        resolver.join()
        return resolver

    def join(self) -> None:
        """Connects the TPU's hosts if they are not connected; see `connect`.

        Not in tf, where `tf.config.experimental_connect_to_cluster` connects
        them.
        """
        if self._tpu == LOCAL or jax.distributed.is_initialized():
            return
        num_hosts = self.num_processes
        if num_hosts == 1:
            return
        # Imported here, because these modules would add a tenth to the time
        # that importing this package takes.
        from keras_strategies.job import bootstrap
        from keras_strategies.watchdog import watchdog

        bootstrap.check_main_guard()
        try:
            jax.distributed.initialize(**watchdog.INITIALIZE_ARGUMENTS)
        except ValueError:
            # JAX did not detect a cluster.
            if num_hosts is not None:
                raise
        except RuntimeError as error:
            _check_alone(num_hosts, error)

    def devices(self) -> tuple[jax.Device, ...]:
        """Returns the TPU's devices, after connecting its hosts. Not in tf.

        For "local", returns only the devices of this host. Without a TPU,
        returns the devices that JAX finds.
        """
        self.join()
        return tuple(
            jax.local_devices() if self._tpu == LOCAL else jax.devices()
        )

    def cluster_spec(self) -> ClusterSpec:
        """Returns the hosts' addresses, if environment variables list them.

        The result is empty for "local", and if no variable is set (then JAX
        gets the addresses from Cloud TPU). It is also empty in a job with
        several slices, because the variables list only the hosts of this slice.
        """
        if self._tpu == LOCAL:
            return ClusterSpec({})
        addresses = self._read_addresses()
        jobs: dict[str, Any] = {}
        if addresses and self._read_num_slices() == 1:
            jobs[self.get_job_name()] = addresses
        if self._coordinator_name and self._coordinator_address:
            jobs[self._coordinator_name] = [self._coordinator_address]
        return ClusterSpec(jobs)

    def get_master(self) -> str:
        """Returns the result of `master()`, which replaces this method."""
        return self.master()

    def get_job_name(self) -> str:
        """Returns the name of the job that contains all hosts."""
        return self._task_type or "worker"

    def get_coordination_service_leader(self) -> str:
        """Returns the name of the coordinator's task in TensorFlow's format."""
        return f"/job:{self.get_job_name()}/task:0"

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """Returns a description of the TPU's cores, hosts and devices.

        Connects the hosts and starts the devices first. Without a TPU, the
        result describes the devices that JAX finds.
        """
        devices = self.devices()
        num_hosts = len({device.process_index for device in devices})
        is_one = len({get_slice(device) for device in devices}) == 1
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
        """Returns a dict such as `{"TPU": 4}`: the number of this host's cores.

        Connects the hosts and starts the devices first. Without a TPU, the
        number is 0.
        """
        del task_type, task_id
        self.join()
        return {"TPU": sum(d.platform == "tpu" for d in jax.local_devices())}

    @property
    def num_processes(self) -> int | None:
        """The number of hosts; None if no environment variables specify it."""
        if self._tpu == LOCAL:
            return 1
        count = len(self._read_addresses())
        return count * self._read_num_slices() if count else None

    def _find_task_id(self) -> int | None:
        if self._tpu == LOCAL:
            return 0
        is_single = self._read_num_slices() == 1
        if is_single and self._environ_now.get(_TASK_ID):
            return read_number(self._environ_now, _TASK_ID, _SETTER)
        is_joined = jax.distributed.is_initialized()
        return jax.process_index() if is_joined else None

    def _choose_layer(self, rpc_layer: str | None) -> str:
        return "grpc"

    def _find_address(
        self, task_type: str | None, task_id: int | None
    ) -> str | None:
        spec = self.cluster_spec()
        if not spec:
            return None
        if task_type is None or task_id is None:
            task_type, task_id = self.get_job_name(), self.task_id or 0
        return spec.task_address(task_type, task_id)

    def _read_addresses(self) -> list[str]:
        """Returns the addresses of this slice's hosts, or [] if not set."""
        texts = [
            text for name in _HOSTS if (text := self._environ_now.get(name))
        ]
        if not texts:
            return []
        hosts = enumerate(texts[0].split(","))
        owner = f"({' or '.join(_HOSTS)})"
        return [
            self._make_address(host, f"host {i} {owner}") for i, host in hosts
        ]

    def _make_address(self, host: str, owner: str) -> str:
        port = _DEFAULT_PORT
        if self._environ_now.get(_PORT):
            port = read_port(self._environ_now, _PORT, "you")
        # The variable may contain libtpu's port. JAX uses a different port.
        with_port = _WITH_PORT.fullmatch(host.strip())
        address = join_address(
            with_port[1] if with_port else host.strip(), port
        )
        check_address(address, owner)
        return address

    def _read_num_slices(self) -> int:
        if not self._environ_now.get(_NUM_SLICES):
            return 1
        return read_number(self._environ_now, _NUM_SLICES, _SETTER, minimum=1)

    def __repr__(self) -> str:
        return f"<TPUClusterResolver of {self._tpu or 'this host'!r}>"


def _check_name(tpu: str | None, environ: Mapping[str, str]) -> str:
    """Checks the argument `tpu`, and returns "local", "" or the TPU's name."""
    this_tpu = environ.get(_NAME, "")
    if tpu is None:
        if not this_tpu and not _has_tpu(environ):
            raise ValueError(
                "`TPUClusterResolver()` needs a TPU. This machine has none (no "
                "/dev/accel0 or /dev/vfio/0, and no environment "
                "variable of Cloud TPU). To run on this machine's devices in "
                "place of a TPU, pass '' or 'local'."
            )
        return this_tpu
    fix = "Omit it for the TPU of this host."
    check_type("`tpu`", tpu, str, "a str or None", fix)
    if tpu in ("", LOCAL) or tpu == this_tpu:
        return tpu
    known = f"{this_tpu!r}" if this_tpu else "not set"
    raise ValueError(
        "`tpu` must be the TPU that this host belongs to, because a program "
        f"cannot connect to another TPU. Received: tpu={shorten(tpu)}, while "
        f"TPU_NAME is {known}. Pass '' (this host's TPU with all its hosts), "
        "'local' (only this host) or the value of TPU_NAME. To compile for "
        "another TPU, use `ks.TPUStrategy.for_topology('v5e:4x4')`."
    )


def _has_tpu(environ: Mapping[str, str]) -> bool:
    """Returns whether this machine seems to have a TPU, without starting it."""
    settings = {
        name
        for name, value in environ.items()
        if value and name.startswith(("TPU_", "MEGASCALE_"))
    }
    if settings - _OF_LIBRARIES or "tpu" in environ.get("JAX_PLATFORMS", ""):
        return True
    return any(_DEV.glob("accel[0-9]*")) or any(_DEV.glob("vfio/[0-9]*"))


def _check_alone(num_hosts: int | None, error: RuntimeError) -> None:
    """Raises an error unless the TPU has no other hosts to connect.

    Args:
      num_hosts: The number of hosts; None if unknown.
      error: The error that `jax.distributed.initialize` raised.
    """
    is_started = not isinstance(error, jax.errors.JaxRuntimeError)
    if num_hosts is None and is_started and jax.process_count() == 1:
        return
    raise RuntimeError(
        "The hosts of the TPU could not be connected. All hosts must connect "
        f"before JAX's devices are used. Received: {error} Call "
        "`TPUClusterResolver.connect()` at the start of the program, on every "
        "host. To use only this host's cores, create the resolver with "
        "`TPUClusterResolver('local')`."
    ) from error
