"""GPUs by name, such as "h100:8x8", for compilation, and GPUs that are here.

XLA compiles for the GPUs of a name without them, by a description of each. Its
values are those of NVIDIA's data sheets and of OpenXLA's target configs.
"""

import dataclasses
import os
import pathlib
import re
import string
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from keras_strategies.gpu.xla_flags import DETERMINISM, is_deterministic
from keras_strategies.names.versions import installed_version

CUDNN = (9, 10, 0)
"""The version of cuDNN that programs are compiled for."""

_CONFIG = pathlib.Path(__file__).with_name("target_config.textproto")
"""The template of a GpuTargetConfigProto."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A model of GPU.

    Attributes:
      device_kind: The name that JAX shows as the `device_kind`.
      capability: The major version of the CUDA compute capability.
      cores: The number of streaming multiprocessors.
      fpus_per_core: The number of float32 units of a multiprocessor.
      clock_ghz: The clock rate of the float32 units, in GHz.
      matrix_clock_ghz: The clock rate of the tensor cores, in GHz.
      matrix_ops: The multiplications and additions in bfloat16 of a tensor core
        in each cycle.
      shared_memory: Bytes of shared memory of a multiprocessor.
      cache: Bytes of the level 2 cache.
      memory: Bytes of the memory.
      memory_bandwidth: Bandwidth of the memory, in bytes per second.
    """

    device_kind: str
    capability: int
    cores: int
    fpus_per_core: int
    clock_ghz: float
    matrix_clock_ghz: float
    matrix_ops: int
    shared_memory: int
    cache: int
    memory: int
    memory_bandwidth: int

    def format(self) -> str:
        """Returns XLA's target config: the text of a GpuTargetConfigProto."""
        # Each multiprocessor reserves one KiB of a block's shared memory.
        max_shared = self.shared_memory - 1024
        feature = "ACCELERATED_FEATURES" if self.capability > 8 else "NONE"
        major, minor, patch = CUDNN
        return string.Template(_CONFIG.read_text("utf-8")).substitute(
            dataclasses.asdict(self),
            max_shared=max_shared,
            feature=feature,
            matrix_units=self._format_matrix_units(),
            cudnn=".".join(map(str, CUDNN)),
            cudnn_major=major,
            cudnn_minor=minor,
            cudnn_patch=patch,
        )

    def _format_matrix_units(self) -> str:
        rates = [
            f"rate_infos {{ key: {kind} value {{ "
            f"clock_rate_ghz: {self.matrix_clock_ghz} units_per_core: 4 "
            f"ops_per_clock: {int(self.matrix_ops * factor)} }} }}"
            for kind, factor in _PRECISIONS.items()
        ]
        return f"matrix_unit_description {{ {' '.join(rates)} }}"


_PRECISIONS = {2: 2, 10: 1, 11: 0.5, 16: 1}
"""The speed of tensor cores relative to bfloat16, by XLA's primitive type: S8,
F16, F32 (as TF32) and BF16."""

_HOPPER = {
    "capability": 9,
    "cores": 132,
    "fpus_per_core": 128,
    "clock_ghz": 1.98,
    "matrix_clock_ghz": 1.8295,
    "matrix_ops": 512,
    "shared_memory": 233472,
    "cache": 52428800,
}

TARGETS = {
    "a100": Target(
        device_kind="NVIDIA A100-SXM4-80GB",
        capability=8,
        cores=108,
        fpus_per_core=64,
        clock_ghz=1.41,
        matrix_clock_ghz=1.41,
        matrix_ops=256,
        shared_memory=167936,
        cache=41943040,
        memory=85100068864,
        memory_bandwidth=2039040000000,
    ),
    "h100": Target(
        device_kind="NVIDIA H100 80GB HBM3",
        memory=85017493504,
        memory_bandwidth=3352320000000,
        **_HOPPER,
    ),
    "h200": Target(
        device_kind="NVIDIA H200",
        memory=151397597184,
        memory_bandwidth=4800000000000,
        **_HOPPER,
    ),
    "b200": Target(
        device_kind="NVIDIA B200",
        capability=10,
        cores=148,
        fpus_per_core=128,
        clock_ghz=1.965,
        matrix_clock_ghz=1.8353,
        matrix_ops=1024,
        shared_memory=233472,
        cache=132644864,
        memory=191514411008,
        memory_bandwidth=7672320000000,
    ),
}


# XLA creates an object for each GPU.
_MAX_GPUS = 2**13
_NAME = re.compile(
    r"(?P<gpu>[a-z]+\d+):(?:(?P<hosts>\d{1,6})x)?(?P<gpus>\d{1,6})", re.ASCII
)
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_TOOLKIT = pathlib.Path(__file__).parent / "toolkit"
_UNLIMITED = 2**50
"""Bytes of memory that no program needs."""


def is_gpu_name(name: object) -> bool:
    """Returns whether a name such as "h100:8" begins with a GPU's name."""
    return isinstance(name, str) and name.partition(":")[0] in TARGETS


def make_gpu_devices(
    name: str, *, has_unlimited_memory: bool = False
) -> tuple[jax.Device, ...]:
    """Returns the devices of machines such as "h100:8x8", without a GPU.

    Programs can be compiled for these devices, but cannot run on them. This
    needs JAX's CUDA plugin, which the extra `gpu-compile` of this package
    installs.

    Args:
      name: The GPU, a colon, the number of hosts (1 if it is left out) and the
        number of GPUs of a host, such as "h100:8" or "h100:8x8".
      has_unlimited_memory: Whether to compile as if the GPUs had unlimited
        memory. Otherwise, XLA changes programs that need more than 76 percent
        of it: it computes values again, instead of storing them.

    Returns:
      The GPUs, ordered by host. Each host is a process.

    Raises:
      ValueError: if the GPU is unknown, or the numbers are not valid.
      ImportError: if the plugin is not installed, has another version than
        jaxlib, or JAX did not load it because it found no CUDA.
    """
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    gpu, hosts, gpus = match.groups() if match else ("", "", "")
    count = int(hosts or 1) * int(gpus or 0)
    if gpu not in TARGETS or not 0 < count <= _MAX_GPUS:
        raise ValueError(
            "No such GPUs exist to compile for. The name must be a GPU "
            f"({', '.join(TARGETS)}), a colon, and the number of hosts and of "
            f"GPUs per host, at most {_MAX_GPUS:,} in total. Received: "
            f"{name!r:.100}. Pass, for example, 'h100:8' or 'h100:8x8'."
        )
    from jax.experimental import topologies

    target = TARGETS[gpu]
    if has_unlimited_memory:
        target = dataclasses.replace(target, memory=_UNLIMITED)
    try:
        described = topologies.get_topology_desc(
            platform="cuda",
            target_config=target.format(),
            topology=f"{int(hosts or 1)}x1x{int(gpus)}",
        )
    except (NotImplementedError, RuntimeError) as error:
        raise _explain(name) from error
    return tuple(described.devices)


def is_absent_gpu(device: jax.Device) -> bool:
    """Returns whether a device is a GPU that programs are only compiled for."""
    client: Any = getattr(device, "client", None)
    runtime = getattr(client, "runtime_type", None)
    return device.platform == "gpu" and runtime == "compile_only_runtime"


def has_gpus() -> bool:
    """Returns whether this process has GPUs. Starts JAX's devices."""
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False


def complete_options(
    options: Mapping[str, Any] | None, devices: Sequence[jax.Device]
) -> dict[str, Any] | None:
    """Returns a program's compiler options, with those that its GPUs need.

    For absent GPUs, XLA uses this package's stand-ins for the assembler and the
    library of device functions in NVIDIA's toolkit, because machine code is not
    needed. Matrix products call cuBLAS: XLA measures on a GPU whether kernels
    that it generates are faster. Without a GPU it would always use these
    kernels, with which programs need less memory. XLA has read its flags before
    a planned script calls `enable_determinism`, so that flag is also passed as
    an option.

    Args:
      options: XLA compiler options by name, or None.
      devices: The devices to compile for.
    """
    needed: dict[str, Any] = {}
    if is_absent_gpu(devices[0]):
        needed["xla_gpu_cuda_data_dir"] = str(_TOOLKIT)
        needed["xla_gpu_enable_triton_gemm"] = False
        if is_deterministic(os.environ):
            needed[DETERMINISM] = True
    return {**needed, **(options or {})} or None


def _explain(name: str) -> ImportError:
    """Returns an error that names why JAX cannot compile for GPUs."""
    wanted = installed_version("jaxlib")
    versions = {plugin: installed_version(plugin) for plugin in _PLUGINS}
    return ImportError(
        "Compiling for GPUs needs JAX's CUDA plugin, in the version of jaxlib. "
        f"Received: name={name!r} with {versions}, jaxlib {wanted} and "
        f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')!r}. Run `pip install "
        f"jax-cuda12-plugin=={wanted}`, which needs neither a GPU nor CUDA. If "
        "the plugin is installed and JAX found no CUDA, set the environment "
        "variable JAX_PLATFORMS=cpu, or JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1, "
        "before JAX is first used."
    )


_uses_gpus = False


def note_platform(platform: str) -> None:
    """Records a strategy's platform; hides GPUs from TensorFlow if JAX has any.

    Args:
      platform: `"cpu"`, `"gpu"` or `"tpu"`.
    """
    global _uses_gpus
    _uses_gpus = _uses_gpus or platform == "gpu"
    hide_gpus()


def hide_gpus() -> None:
    """Hides GPUs from TensorFlow, before this package uses it.

    A TensorFlow with support for GPUs takes almost all memory of each GPU when
    it runs its first operation, and every dataset of tf.data runs some.

    Nothing happens if no strategy uses GPUs, TensorFlow has not been imported,
    sees no GPUs, or takes their memory only as needed (`set_memory_growth`).

    Warns:
      UserWarning: if TensorFlow has already initialized its GPUs.
    """
    tensorflow: Any = sys.modules.get("tensorflow")
    if not _uses_gpus or not hasattr(tensorflow, "config"):
        return
    config = tensorflow.config
    if not tensorflow.test.is_built_with_gpu_support():
        return
    gpus = config.get_visible_devices("GPU")
    if any(map(config.experimental.get_memory_growth, gpus)) or not gpus:
        return
    try:
        config.set_visible_devices([], "GPU")
    except RuntimeError:
        warnings.warn(
            "TensorFlow must not take the memory of GPUs that JAX uses. "
            f"Received: a TensorFlow that has initialized {len(gpus)} GPUs. "
            "Call `tf.config.set_visible_devices([], 'GPU')` directly after "
            "`import tensorflow as tf`, or create the strategy before you use "
            "TensorFlow.",
            stacklevel=3,
        )
