"""Settings with which programs for GPUs compute the same bits in every run."""

import os

from keras_strategies.gpu.xla_flags import (
    DETERMINISM,
    XLA_FLAGS,
    is_deterministic,
    read_flags,
)

_FLAG = f"--{DETERMINISM}"
_OTHERS = {
    # cuBLAS, which cuDNN's LSTM calls, has one size of workspaces, so it does
    # not choose a kernel by the workspace that is free.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # NCCL does not sum in NVLink switches, in an order that they choose
    # (github.com/NVIDIA/nccl/issues/1497).
    "NCCL_NVLS_ENABLE": "0",
}


def enable_determinism() -> None:
    """Makes programs for GPUs compute the same bits in every run.

    By default, GPUs add up some sums in an order that differs from run to run
    (the gradient of an embedding, for example), and XLA chooses kernels by
    their times, which differ, too. A resumed fit is then equal to an
    uninterrupted one only up to rounding errors. After this call, it is equal
    bit for bit on the same number and type of GPUs, with the same versions of
    JAX, the driver and NVIDIA's libraries. Steps may be slower.

    Call it in each process, before anything uses JAX's devices. It sets
    environment variables, which child processes inherit: the XLA flag
    `--xla_gpu_deterministic_ops`, and unless they are set,
    `CUBLAS_WORKSPACE_CONFIG` and `NCCL_NVLS_ENABLE`. On CPUs and TPUs it has no
    effect: their programs are deterministic.

    Differs from tf: `tf.config.experimental.enable_op_determinism` may be
    called later, and then requires seeds. This function leaves seeds as they
    are; see `keras.utils.set_random_seed`.

    Raises:
      RuntimeError: if JAX has started GPUs, unless the environment had the flag
        already.
      ValueError: if XLA_FLAGS names a file that cannot be read, or contains
        something else than flags.

    Example:
      ```python
      import keras_strategies as ks

      ks.enable_determinism()
      strategy = ks.MirroredStrategy()
      ```
    """
    if not is_deterministic(os.environ):
        if _has_started_gpus():
            raise RuntimeError(
                "`enable_determinism` must be called before JAX starts GPUs, "
                "because XLA reads its flags then. JAX has already started "
                "them. Call it at the beginning of the script, "
                f"or set the environment variable {XLA_FLAGS}={_FLAG}=true."
            )
        flags = read_flags(os.environ)
        os.environ[XLA_FLAGS] = f"{flags} {_FLAG}=true".strip()
    for name, value in _OTHERS.items():
        os.environ.setdefault(name, value)


def _has_started_gpus() -> bool:
    # JAX has no public name for this (tests/contract/test_jax_contract.py).
    from jax._src import xla_bridge

    from keras_strategies.gpu.topology_devices import has_gpus

    return xla_bridge.backends_are_initialized() and has_gpus()
