"""Counts the operations of matrix products, convolutions and attention.

GPU programs call libraries for some of them: cuBLAS for products, cuDNN for
convolutions and attention.
"""

import functools
import math
import re
from collections.abc import Iterator, Sequence

from keras_strategies.planning.seam import (
    count_positions,
    hlo,
)

_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_SUMMED = re.compile(r"lhs_contracting_dim(?:s=\{|ensions\":\[)([\d,\"]*)")
_KERNEL = re.compile(rf"{hlo.KERNELS}(\d+)\)*/.*splash_m[hq]a_(fwd|dq|dkv)")
_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
"""For each kernel of attention, its number of matrix products."""
_DTYPE = re.compile(r"\(?([a-z]+\d*\w*)\[")
_EXACT = re.compile(r'operand_precision(?:=\{|":\[")highest', re.IGNORECASE)
_TARGET = re.compile(r'custom_call_target="__(cublas|cudnn)\$(\w+)')
_SCORES = re.compile(
    r'intermediate_tensor_shape":\s*\{.*?"dimensions":\s*\[([^\]]*)'
)
_CAUSAL = re.compile(r'"mask_type":\s*"\w*CAUSAL')
_CUDNN_PRODUCTS = {False: 2, True: 5}
"""The number of matrix products of attention, forward and backward."""


def list_products(
    program: hlo.Program,
    computation: hlo.Computation,
    instruction: hlo.Instruction,
) -> Iterator[tuple[str, float]]:
    """Yields the products of an instruction, without attention's kernels.

    For each matrix product or convolution, yields XLA's name of the dtype that
    is multiplied, such as "bf16", and the number of multiplications and
    additions. The name ends with "exact" if the highest precision was
    requested.
    """
    opcode = instruction.opcode
    flops = None
    if opcode == "convolution":
        flops = _count_convolution(computation, instruction)
    elif opcode == "dot":
        flops = _count_product(computation, instruction)
    elif opcode == "custom-call":
        flops = _count_library_call(computation, instruction)
    if flops:
        yield _find_dtype(computation, instruction), flops
    inner = program.find_called(instruction)
    if opcode == "fusion" and inner is not None:
        for x in inner.instructions:
            yield from list_products(program, inner, x)


def count_kernel(computation: hlo.Computation, call: hlo.Instruction) -> float:
    """Returns the operations of attention's kernels, which XLA does not know.

    On TPUs, a kernel's scope contains the number of its products.
    """
    match = _KERNEL.search(call.source)
    if match is not None:
        return 2.0 * int(match[1]) * _PRODUCTS[match[2]]
    library, name = _find_target(call)
    scores = _SCORES.search(call.attributes)
    if library != "cudnn" or not name.startswith("fmha") or scores is None:
        return 0.0
    size = math.prod(int(n) for n in re.findall(r"\d+", scores[1]))
    (head,) = computation.by_name[call.operands[0]].arrays[0].dims[-1:]
    share = 0.5 if _CAUSAL.search(call.attributes) else 1.0
    return 2.0 * size * head * share * _CUDNN_PRODUCTS["Backward" in name]


def is_convolution(call: hlo.Instruction) -> bool:
    """Returns whether an instruction calls a convolution of cuDNN."""
    library, name = _find_target(call)
    return library == "cudnn" and name.startswith("conv")


def _find_target(call: hlo.Instruction) -> tuple[str, str]:
    """Returns the library of a GPU and the function that an instruction calls.

    Both are "" for other instructions.
    """
    match = _TARGET.search(call.attributes)
    return ("", "") if match is None else (match[1], match[2])


def _find_dtype(
    computation: hlo.Computation, instruction: hlo.Instruction
) -> str:
    operand = computation.by_name[instruction.operands[0]]
    match = _DTYPE.match(operand.result)
    dtype = "" if match is None else match[1]
    return f"{dtype} exact" if _EXACT.search(instruction.attributes) else dtype


def _count_library_call(
    computation: hlo.Computation, call: hlo.Instruction
) -> float:
    """Returns the operations of a call of cuBLAS or of cuDNN's convolutions."""
    library, name = _find_target(call)
    if library == "cublas":
        return _count_product(computation, call)
    if not is_convolution(call):
        return 0.0
    first, second = (
        computation.by_name[x].arrays[0].dims for x in call.operands[:2]
    )
    result = call.arrays[0].dims
    if name == "convBackwardInput":
        shapes = result, second, first
    elif name == "convBackwardFilter":
        shapes = first, result, second
    else:
        shapes = first, second, result
    return _count_window(call, shapes)


def _count_product(computation: hlo.Computation, dot: hlo.Instruction) -> float:
    match = _SUMMED.search(dot.attributes)
    sizes = computation.by_name[dot.operands[0]].arrays[0].dims
    dims = re.findall(r"\d+", match[1]) if match else []
    # The second result of a call of cuBLAS is a workspace.
    return (
        2.0
        * math.prod(dot.arrays[0].dims)
        * math.prod(sizes[int(d)] for d in dims)
    )


def _count_convolution(
    computation: hlo.Computation, conv: hlo.Instruction
) -> float:
    first, second = (
        computation.by_name[name].arrays[0].dims for name in conv.operands
    )
    return _count_window(conv, (first, second, conv.arrays[0].dims))


def _count_window(
    conv: hlo.Instruction, shapes: Sequence[Sequence[int]]
) -> float:
    """Returns the operations of a convolution.

    Args:
      conv: The instruction.
      shapes: The sizes of the input, the kernel and the output.
    """
    labels = _LABELS.search(conv.attributes)
    if labels is None:
        return 0.0
    given, kernel, out = (
        dict(zip(labels[k + 1], shapes[k], strict=True)) for k in range(3)
    )
    window = _parse_window(conv.attributes)
    total = 2.0 * kernel["i"] * out["b"] * out["f"]
    for dim in filter(str.isdigit, labels[3]):
        place = int(dim)
        stride, spread, holes = (
            window.get(name, {}).get(place, 1)
            for name in ("stride", "lhs_dilate", "rhs_dilate")
        )
        before = window.get("pad", {}).get(place, 0)
        sizes = given[dim], kernel[dim], out[dim]
        total *= _count_positions(sizes, stride, before, spread, holes)
    return total


_count_positions = functools.lru_cache(maxsize=1024)(count_positions)


def _parse_window(attributes: str) -> dict[str, dict[int, int]]:
    """Returns the numbers of a convolution's window, by name and dimension.

    Of the padding, those before the array.
    """
    match = _WINDOW.search(attributes)
    if match is None:
        return {}
    found: dict[str, dict[int, int]] = {}
    for field in match[1].split():
        name, _, text = field.partition("=")
        found[name] = {
            place: int(number.split("_")[0])
            for place, number in enumerate(text.split("x"))
        }
    return found
