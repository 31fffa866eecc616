"""Initialization and shutdown of the TPU system, with tf's names."""

from collections.abc import Iterable

import jax

from keras_strategies.cluster.tasks import AnyResolver
from keras_strategies.tpu.cluster_resolver import TPUClusterResolver
from keras_strategies.tpu.topology import Topology


def initialize_tpu_system(
    cluster_resolver: AnyResolver | None = None,
    *,
    devices: Iterable[jax.Device] | None = None,
) -> Topology:
    """Returns the topology of the TPUs that JAX sees.

    JAX starts the TPUs at the first request for devices. A
    `TPUClusterResolver` joins the hosts first; without one, call
    `jax.distributed.initialize` if there are several hosts.

    Args:
      cluster_resolver: A `TPUClusterResolver`, whose hosts are joined and
        whose devices are used; another resolver, which is ignored since JAX
        finds the TPUs itself; or None.
      devices: The devices to use instead of all TPUs; of any platform, so
        that a script can be tried without a TPU.

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
    if devices is not None:
        return Topology.from_devices(devices)
    is_tpu = isinstance(cluster_resolver, TPUClusterResolver)
    tpus = cluster_resolver.devices() if is_tpu else jax.devices()
    if tpus[0].platform != "tpu":
        raise RuntimeError(
            "A TPU system needs TPUs. Received: "
            f"{len(tpus)} devices of the platform '{tpus[0].platform}'. "
            "On a TPU machine run `pip install 'jax[tpu]'` and leave "
            "JAX_PLATFORMS unset; elsewhere pass `devices=jax.devices()`, or "
            "use `Topology.from_name('v5e:4x4')` to compile only."
        )
    return Topology.from_devices(tpus)


def shutdown_tpu_system(cluster_resolver: AnyResolver | None = None) -> None:
    """Drops all compiled programs and frees their memory.

    Differs from tf: the process keeps its TPUs, which JAX releases when the
    process ends. Arrays are kept; later calls are compiled again.

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
        "Omit it."
    )
