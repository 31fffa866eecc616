"""The choice of kernels, by the devices of the mesh.

Keras 3.15 and JAX choose kernels by the process's devices: cuDNN's attention
and LSTM wherever JAX's default backend is a GPU. While a step is traced or
lowered, their questions are answered for the devices that the step is for,
which may be CPUs, or GPUs that are not present.
"""

import contextlib
import functools
import importlib
import operator
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from keras.src.backend.common.tensor_attributes import set_tensor_attr

from keras_strategies._types import Array
from keras_strategies.gpu.topology_devices import CUDNN, has_gpus, is_absent_gpu
from keras_strategies.keras_bridge import keras_names
from keras_strategies.keras_bridge.patches import Patch, Patches, replacement
from keras_strategies.kernels.attention import find_attention_patches
from keras_strategies.kernels.blocked_head import find_head_patches
from keras_strategies.kernels.by_rows import find_layer_patches
from keras_strategies.kernels.mapped_kernels import (
    Trace,
    current_trace,
    map_attention,
    thread,
)
from keras_strategies.kernels.mask_arrays import recognize_mask
from keras_strategies.kernels.mask_values import SOURCE
from keras_strategies.kernels.scanned_blocks import find_block_patches
from keras_strategies.passes.row_kinds.kernels import BY_ROWS
from keras_strategies.spmd.identity import temporary_attribute
from keras_strategies.spmd.mesh import ReplicaMesh

_WIDE = ("rbg", "unsafe_rbg")
"""Random generators of JAX whose keys have four numbers."""


@contextlib.contextmanager
def kernels_for(
    mesh: ReplicaMesh, *, is_global: bool = False
) -> Iterator[None]:
    """Makes this thread trace and lower kernels for the mesh's devices.

    Args:
      mesh: The replicas.
      is_global: Whether the block traces with the rows of all replicas instead
        of one replica's.
    """
    trace = Trace(mesh=mesh, is_global=is_global and mesh.num_replicas > 1)
    with _patches.hold(), temporary_attribute(thread, "trace", trace):
        yield


class _Jax:
    """JAX's module for code that looks at the platform of `jax.devices()`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)

    def devices(self, *args: Any) -> list[jax.Device]:
        trace = current_trace()
        return jax.devices(*args) if trace is None else [*trace.mesh.devices]


def _is_on(platform: str, original: Callable[[], bool]) -> bool:
    trace = current_trace()
    return original() if trace is None else trace.mesh.platform == platform


_is_on_gpu = replacement(functools.partial(_is_on, "gpu"))
_PLATFORM_TESTS = {
    "running_on_tpu": replacement(functools.partial(_is_on, "tpu")),
    "running_on_gpu": _is_on_gpu,
}
"""Functions by which layers of keras-hub choose their attention."""


@replacement
def _check_cudnn_version(original: Callable[[], int]) -> int:
    """Returns cuDNN's version, such as 91000."""
    trace = current_trace()
    if trace is not None and trace.mesh.platform != "gpu":
        raise RuntimeError(
            "cuDNN's attention must be computed on GPUs. Received: a step "
            f"for devices of the platform {trace.mesh.platform!r}. Omit "
            "`flash_attention=True`."
        )
    if not _is_for_absent_gpus():
        return original()
    major, minor, patch = CUDNN
    return 10_000 * major + 100 * minor + patch


def _compare_capability(
    compare: Callable[[Any, Any], bool],
    original: Callable[[str], bool],
    capability: str,
) -> bool:
    """Compares the compute capability with one such as "8.0"."""
    trace = current_trace()
    if trace is None:
        return original(capability)
    device: Any = trace.mesh.devices[0]
    found = _parse(getattr(device, "compute_capability", ""))
    return compare(found, _parse(capability))


_COMPARISONS = {
    "check_compute_capability": operator.ge,
    "is_cuda_compute_capability_equal": operator.eq,
}
"""Functions of JAX that compare the compute capability."""


def _parse(capability: str) -> tuple[int, ...]:
    """Returns (8, 0) for "8.0", and () if a device is no CUDA device."""
    is_number = re.fullmatch(r"\d+\.\d+", str(capability))
    return tuple(map(int, capability.split("."))) if is_number else ()


def _is_for_absent_gpus() -> bool:
    trace = current_trace()
    return trace is not None and is_absent_gpu(trace.mesh.devices[0])


@replacement
def _attend(
    original: Callable[..., Any],
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    **options: Any,
) -> Any:
    """Computes `jax.nn.dot_product_attention`, by cuDNN's mapped over cores."""
    trace = current_trace()
    is_cudnn = options.get("implementation") == "cudnn"
    if trace is None or not is_cudnn:
        return original(query, key, value, bias, mask, **options)
    if mask is not None and _is_causal(query, key, mask):
        # cuDNN adds an array to the scores, and skips none of them.
        mask, options = None, options | {"is_causal": True}
    attend = functools.partial(original, **options)
    is_usual = jnp.ndim(query) == 4 and set(options) <= _OPTIONS
    if is_usual and (trace.model or trace.rows):
        return _map_attention(trace, attend, query, key, value, bias, mask)
    return attend(query, key, value, bias, mask)


_OPTIONS = {"scale", "is_causal", "implementation"}


def _is_causal(query: Array, key: Array, mask: Array) -> bool:
    """Returns whether an array is the mask of causal attention."""
    known = recognize_mask(mask, query, key)
    if known is None or query.shape[1] != key.shape[1]:
        return False
    parts, wrong = known
    is_plain = all(a is None for a in (wrong, *parts.arrays))
    return is_plain and (parts.left, parts.right) == (None, 0)


def _map_attention(
    trace: Trace,
    attend: Callable[..., jax.Array],
    query: Array,
    key: Array,
    value: Array,
    *score_args: Array | None,
) -> jax.Array:
    """Computes attention on each core for its heads; see `map_attention`."""
    others = [
        None
        if array is None
        else jnp.reshape(array, (1,) * (4 - array.ndim) + array.shape)
        for array in score_args
    ]

    def call(*arrays: Array | None) -> jax.Array:
        return map_attention(trace, attend, arrays)

    numbers = sorted(attend.keywords.items())
    call.__name__ = f"{BY_ROWS}_{numbers}"
    return jax.jit(call)(query, key, value, *others)


@replacement
def _compute_lstm(original: Any, x: Array, *args: Any, **kwargs: Any) -> Any:
    """Computes JAX's LSTM, for which Keras computes a loop if it raises.

    cuDNN's kernel is called for float32 only: JAX (0.10.2) cannot lower it for
    bfloat16 and float16, and passes it float64 as float32. XLA cannot partition
    the kernel, so each device would compute all rows of a global batch.
    """
    trace = current_trace()
    if trace is not None:
        dtypes = {str(jnp.result_type(a)) for a in (x, *args[:3])}
        if dtypes != {"float32"} or trace.is_global:
            raise NotImplementedError(
                "cuDNN's LSTM must be called with float32 arrays of one "
                "replica's rows. Use `keras.layers.LSTM`, which computes a "
                "loop instead."
            )
    return original(x, *args, **kwargs)


@replacement
def _compute_sizes(
    original: Callable[..., tuple[int, int]], *args: Any
) -> tuple[int, int]:
    """Asks cuDNN for the bytes that an LSTM needs.

    Without GPUs, the workspace and the space that is kept for the gradient are
    estimated: four gates and two states in float32 for each entry of the
    output. JAX caches the answers, so a process with GPUs must not estimate
    them for absent GPUs: its own programs would get the estimate, too.
    """
    if not _is_for_absent_gpus() or has_gpus():
        return original(*args)
    _, width, layers, rows, length, _, is_bidirectional, *_ = args
    entries = layers * (1 + is_bidirectional) * rows * length * width
    return 4 * 6 * entries, 4 * 6 * entries


@replacement
def _draw_seed(original: Callable[[Any], Any], seed: Any) -> Any:
    """Draws the seed of random numbers in Keras.

    Keras's seeds are two numbers, the keys of JAX's other generators four.
    """
    config: Any = jax.config
    drawn = original(seed)
    if config.jax_default_prng_impl not in _WIDE or drawn.shape != (2,):
        return drawn
    return jax.random.wrap_key_data(jnp.tile(drawn, 2).astype("uint32"))


@replacement
def _remat(
    original: Callable[..., Any], fn: Callable[..., Any]
) -> Callable[..., Any]:
    """Rematerializes a layer's function, as Keras does.

    Keras 3.15 makes arrays of all arguments, such as `training`, which layers
    (those of keras-hub with dropout) then cannot use as conditions.
    """

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        places = [k for k, x in enumerate(leaves) if hasattr(x, "dtype")]

        def compute(*arrays: Any) -> Any:
            given = dict(enumerate(leaves))
            for k, array in zip(places, arrays, strict=True):
                set_tensor_attr(array, SOURCE, leaves[k])
                given[k] = array
            args, kwargs = jax.tree.unflatten(structure, given.values())
            return fn(*args, **kwargs)

        return original(compute)(*(leaves[k] for k in places))

    return call


def _find_patches() -> Iterator[Patch]:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn
    from jax.experimental import rnn
    from jaxlib import gpu_rnn

    yield keras_names.NN, "jax", lambda original: _Jax()
    yield cudnn, "check_cudnn_version", _check_cudnn_version
    for name, compare in _COMPARISONS.items():
        function = functools.partial(_compare_capability, compare)
        yield cudnn, name, replacement(function)
    yield jax.nn, "dot_product_attention", _attend
    keras_rnn = importlib.import_module("keras.src.backend.jax.rnn")
    yield keras_rnn, "_is_gpu_available", _is_on_gpu
    yield rnn, "lstm", _compute_lstm
    keras_random = importlib.import_module("keras.src.backend.jax.random")
    yield keras_random, "jax_draw_seed", _draw_seed
    yield keras_names.CORE, "remat", _remat
    sizes = "compute_rnn_workspace_reserve_space_sizes"
    yield gpu_rnn, sizes, _compute_sizes
    yield from find_attention_patches()
    yield from find_block_patches()
    yield from find_head_patches()
    yield from find_layer_patches()
    # Looking at all modules takes longer than the rest.
    modules = list(sys.modules.items()) if "keras_hub" in sys.modules else ()
    for module_name, module in modules:
        if module_name.startswith("keras_hub."):
            for test in _PLATFORM_TESTS.keys() & vars(module).keys():
                yield module, test, _PLATFORM_TESTS[test]


_patches = Patches(_find_patches)
patched = _patches.hold
"""Installs the patches; outside of traces, only `_remat` acts."""
