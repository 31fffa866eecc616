"""TPU topologies and device assignments, named as in tf.tpu.experimental."""

from collections.abc import Iterable

import jax

from keras_strategies.cluster.tasks import AnyResolver
from keras_strategies.names import dry_run
from keras_strategies.tpu.cluster_resolver import TPUClusterResolver
from keras_strategies.tpu.cluster_resolver import (
    TPUSystemMetadata as TPUSystemMetadata,
)
from keras_strategies.tpu.device_assignment import (
    SINGLE_CORE_ASSIGNMENT as SINGLE_CORE_ASSIGNMENT,
)
from keras_strategies.tpu.device_assignment import (
    DeviceAssignment as DeviceAssignment,
)
from keras_strategies.tpu.device_assignment import (
    DeviceOrderMode as DeviceOrderMode,
)
from keras_strategies.tpu.topology import Topology as Topology


def initialize_tpu_system(
    cluster_resolver: AnyResolver | None = None,
    *,
    devices: Iterable[jax.Device] | None = None,
) -> Topology:
    """Starts the TPUs, if necessary, and returns their topology.

    JAX starts the TPUs when a program first asks for its devices. On several
    hosts, the hosts must be connected before that. A `TPUClusterResolver` does
    this; without one, call `jax.distributed.initialize` first.

    Args:
      cluster_resolver: A `TPUClusterResolver`, whose hosts are connected and
        whose devices are used; or None. Any other resolver is ignored, because
        JAX finds the TPUs without it.
      devices: The devices to use instead of all TPUs. They may be of any
        platform, so that a script can be tried without a TPU.

    Raises:
      RuntimeError: if JAX finds no TPU and `devices` is not passed.
      TypeError: if `cluster_resolver` is not a resolver.

    Example:
      ```python
      topology = ks.tpu.experimental.initialize_tpu_system(
          devices=jax.devices()
      )
      ```
    """
    _check_resolver(cluster_resolver)
    if (dry := dry_run.get()) is not None:
        return Topology.from_devices(dry.devices)
    if devices is not None:
        return Topology.from_devices(devices)
    is_tpu = isinstance(cluster_resolver, TPUClusterResolver)
    tpus = cluster_resolver.devices() if is_tpu else jax.devices()
    if tpus[0].platform != "tpu":
        raise RuntimeError(
            "A TPU system needs TPUs. Received: "
            f"{len(tpus)} devices of the platform '{tpus[0].platform}'. "
            "On a TPU machine run `pip install 'jax[tpu]'` and leave "
            "JAX_PLATFORMS unset. On other machines, pass "
            "`devices=jax.devices()`, or use `Topology.from_name('v5e:4x4')` "
            "if you only want to compile."
        )
    return Topology.from_devices(tpus)


def shutdown_tpu_system(cluster_resolver: AnyResolver | None = None) -> None:
    """Deletes all compiled programs and frees their memory.

    Arrays are not deleted. Functions that are called later are compiled again.

    Differs from tf: the process continues to own its TPUs. JAX releases them
    when the process ends.

    Args:
      cluster_resolver: See `initialize_tpu_system`.

    Raises:
      TypeError: if `cluster_resolver` is not a resolver.

    Example:
      ```python
      ks.tpu.experimental.shutdown_tpu_system()
      ```
    """
    _check_resolver(cluster_resolver)
    jax.clear_caches()


def _check_resolver(cluster_resolver: object) -> None:
    if cluster_resolver is None or hasattr(cluster_resolver, "cluster_spec"):
        return
    raise TypeError(
        "`cluster_resolver` must be a cluster resolver or None. Received: "
        f"{cluster_resolver!r} of type {type(cluster_resolver).__name__}. "
        "Pass a `TPUClusterResolver`, or omit the argument."
    )
