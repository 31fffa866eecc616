"""Descriptions of GPUs for XLA, which compiles for them without a GPU.

The values are those of NVIDIA's data sheets and of OpenXLA's target configs.
"""

import dataclasses
import string

CUDNN = (9, 10, 0)
"""The version of cuDNN that programs are compiled for."""

_CONFIG = string.Template("""
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: $shared_memory
  shared_memory_per_block_optin: $max_shared
  threads_per_core_limit: 2048
  core_count: $cores
  fpus_per_core: $fpus_per_core
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: $memory_bandwidth
  l2_cache_size: $cache
  clock_rate_ghz: $clock_ghz
  device_memory_size: $memory
  cuda_compute_capability {
    major: $capability
    feature_extension: $feature
  }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  $matrix_units
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_address_bits: 64
  device_vendor: "NVIDIA Corporation"
  name: "$device_kind"
  driver_version: "12.8.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "$cudnn"
}
platform_name: "CUDA"
runtime_version { major: 12 minor: 8 patch: 0 }
dnn_version_info {
  major: $cudnn_major minor: $cudnn_minor patch: $cudnn_patch
}
device_description_str: "$device_kind"
""")


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
        return _CONFIG.substitute(
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
            f"""
            rate_infos {{
              key: {kind}
              value {{
                clock_rate_ghz: {self.matrix_clock_ghz}
                units_per_core: 4
                ops_per_clock: {int(self.matrix_ops * factor)}
              }}
            }}
            """
            for kind, factor in _PRECISIONS.items()
        ]
        return f"matrix_unit_description {{ {''.join(rates)} }}"


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
