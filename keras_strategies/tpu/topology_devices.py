"""Devices of a TPU slice such as "v5e:4x4", for compilation without TPUs."""

import math
import re

import jax

from keras_strategies.gpu.targets import TARGETS

# More chips than any slice has. The number is limited because libtpu creates
# an object for each chip.
_MOST_CHIPS = 2**17
_NAME = re.compile(
    r"[A-Za-z0-9]+:(?P<shape>\d+(x\d+){1,2})(_twisted|_untwisted)?", re.ASCII
)
_IN_USE = "libtpu multi-process lockfile"
_EXAMPLES = (
    "'v5e:4x4', 'v5p:2x2x2', 'v6e:4x4' or 'tpu7x:2x2x1', or for GPUs "
    f"({', '.join(TARGETS)}) 'h100:8' or 'h100:8x8'"
)


def make_tpu_devices(
    name: str, *, num_slices: int = 1
) -> tuple[jax.Device, ...]:
    """Returns the devices of a slice such as "v5e:4x4", without a TPU.

    Programs can be compiled for these devices, but cannot run on them. This
    needs libtpu, which the extra `tpu` of this package installs.

    Args:
      name: The TPU's generation and the number of chips in each dimension,
        such as "v5e:4x4".
      num_slices: The number of such slices. Several slices are connected by
        the network of the data center.

    Raises: see `Topology.from_name`.
    """
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    sizes = match["shape"].split("x") if match else ["0"]
    if any(len(size) > 6 for size in sizes) or not (
        0 < math.prod(int(size) for size in sizes) * num_slices <= _MOST_CHIPS
    ):
        raise ValueError(
            _describe_fault(name, num_slices, "wrong format, or too large")
        )
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(
            name, "tpu", num_slices=num_slices
        )
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        if _IN_USE in reason:
            raise RuntimeError(
                "libtpu, which compiles for TPUs, supports only one process at "
                f"a time on a machine. Received: name={name!r}, while another "
                "process uses it. Wait for that process, or set the "
                "environment variable ALLOW_MULTIPLE_LIBTPU_LOAD=1 on a "
                "machine without a TPU."
            ) from error
        raise ValueError(_describe_fault(name, num_slices, reason)) from error
    except RuntimeError as error:
        raise ImportError(
            "Creating a topology from a name needs libtpu, which JAX did not "
            f"find. Received: name={name!r}. Run `pip install 'jax[tpu]'`, "
            "which also works on a machine without a TPU."
        ) from error
    return tuple(described.devices)


def _describe_fault(name: object, num_slices: int, reason: str) -> str:
    slices = "" if num_slices == 1 else f", num_slices={num_slices}"
    return (
        "No such TPU slice exists to compile for. The name must be a TPU "
        "generation, a colon and the number of chips in each dimension, and "
        f"`num_slices` must be positive. Received: {name!r}{slices} "
        f"({reason}). Pass, for example, {_EXAMPLES}."
    )
