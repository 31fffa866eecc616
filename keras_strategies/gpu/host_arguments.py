"""Arguments on the host, of programs for absent GPUs.

JAX (0.10 to 0.12) knows no memories of GPUs that are described, and drops the
kind of memory from shardings over them. XLA reads it from an attribute.
"""

from collections.abc import Iterable
from typing import Any

import jax
from jax.extend.mlir import ir

from keras_strategies.gpu.topology_devices import is_absent_gpu

_MOVE = "annotate_device_placement"
_HOST, _DEVICE = "pinned_host", "device"


def place_host_arguments(
    lowered: jax.stages.Lowered, devices: Iterable[jax.Device]
) -> jax.stages.Lowered:
    """Places the arguments that a program moves to the host on the host.

    Args:
      lowered: The program, which is changed in place.
      devices: Its devices. If they are no absent GPUs, nothing changes.
    """
    first = next(iter(devices), None)
    if first is None or not is_absent_gpu(first):
        return lowered
    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        main: Any = ir.SymbolTable(module.operation)["main"]
        kinds = list(map(_find_kind, main.arguments))
        if _HOST in kinds:
            attributes = []
            for known, kind in zip(main.arg_attrs, kinds, strict=True):
                changed = {a.name: a.attr for a in known}
                changed["mhlo.memory_kind"] = ir.StringAttr.get(kind)
                attributes.append(ir.DictAttr.get(changed))
            main.arg_attrs = ir.ArrayAttr.get(attributes)
    return lowered


def _find_kind(argument: Any) -> str:
    """Returns the kind of memory that a program's argument is in."""
    moves = (
        str(use.owner.attributes["mhlo.frontend_attributes"])
        for use in argument.uses
        if use.owner.name == "stablehlo.custom_call"
        and _MOVE in str(use.owner.attributes["call_target_name"])
    )
    return _HOST if any(_HOST in move for move in moves) else _DEVICE
