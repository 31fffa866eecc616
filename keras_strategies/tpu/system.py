"""The TPU system: finding it, and freeing what was compiled for it."""

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

    JAX starts the TPUs when it is first asked for devices. A
    `TPUClusterResolver` joins the hosts before; else call
    `jax.distributed.initialize` on several.

    Args:
      cluster_resolver: A `TPUClusterResolver`, whose hosts are joined and
        whose devices are taken; another resolver, of which nothing is read
        since JAX finds the TPUs itself; or None.
      devices: The devices to take instead of all TPUs; of any platform, so
        that a script can be tried where there is no TPU.

    Raises:
      RuntimeError: JAX sees no TPU and `devices` is not given.
      TypeError: `cluster_resolver` is no resolver.

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
    found = cluster_resolver.devices() if is_tpu else jax.devices()
    if found[0].platform != "tpu":
        raise RuntimeError(
            "A TPU system needs TPUs. Received: "
            f"{len(found)} devices of the platform '{found[0].platform}'. On "
            "a TPU machine run `pip install 'jax[tpu]'` and leave "
            "JAX_PLATFORMS unset; elsewhere pass `devices=jax.devices()`, or "
            "use `Topology.from_name('v5e:4x4')` to compile only."
        )
    return Topology.from_devices(found)


def shutdown_tpu_system(cluster_resolver: AnyResolver | None = None) -> None:
    """Drops all compiled programs, and with them the memory they hold.

    Differs from tf: the process keeps its TPUs. JAX gives them back when the
    process ends. Arrays stay; what is called next is compiled again.

    Args:
      cluster_resolver: See `initialize_tpu_system`.

    Raises:
      TypeError: `cluster_resolver` is no resolver.

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
        "`cluster_resolver` is a cluster resolver or None. Received: "
        f"{cluster_resolver!r} of type {type(cluster_resolver).__name__}. "
        "Leave it out."
    )
