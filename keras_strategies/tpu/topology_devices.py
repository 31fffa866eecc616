"""The devices of TPU slices by name, to compile for without a TPU."""

import math
import re

import jax

# More than any slice has; libtpu makes an object for each.
_MOST_CHIPS = 2**17
_NAME = re.compile(
    r"[A-Za-z0-9]+:(?P<shape>\d+(x\d+){1,2})(_twisted|_untwisted)?"
)
_IN_USE = "libtpu multi-process lockfile"
_EXAMPLES = "'v5e:4x4', 'v5p:2x2x2', 'v6e:4x4' or 'tpu7x:2x2x1'"


def devices_by_name(
    name: str, *, num_slices: int = 1
) -> tuple[jax.Device, ...]:
    """Returns the devices of a TPU slice by its name, without a TPU.

    They can be compiled for, not run on. Needs libtpu, the extra `tpu`.

    Args:
      name: Generation and chips in each dimension, as "v5e:4x4".
      num_slices: The number of such slices, joined by the data centre.

    Raises: see `Topology.from_name`.
    """
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    sizes = match["shape"].split("x") if match else ["0"]
    if any(len(size) > 6 for size in sizes) or not (
        0 < math.prod(int(size) for size in sizes) * num_slices <= _MOST_CHIPS
    ):
        raise ValueError(
            _unknown(name, num_slices, "not of that form, or too large")
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
                "libtpu, which compiles for TPUs, serves one process of a "
                f"machine at a time. Received: name={name!r}, while another "
                "process has it. Wait for that one, or set the environment "
                "variable ALLOW_MULTIPLE_LIBTPU_LOAD=1 on a machine that has "
                "no TPU."
            ) from error
        raise ValueError(_unknown(name, num_slices, reason)) from error
    except RuntimeError as error:
        raise ImportError(
            "A topology by name comes from libtpu, which JAX does not find. "
            f"Received: name={name!r}. Run `pip install "
            "'jax[tpu]'`; it needs no TPU."
        ) from error
    return tuple(described.devices)


def _unknown(name: object, num_slices: int, reason: str) -> str:
    slices = "" if num_slices == 1 else f", num_slices={num_slices}"
    return (
        "There is no such TPU slice to compile for. A name is a generation and "
        "the chips in each dimension, and there is one slice or more. "
        f"Received: {name!r}{slices} ({reason}). Write for example {_EXAMPLES}."
    )
