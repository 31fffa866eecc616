"""XLA's flags in the environment, and determinism on GPUs, by one of them."""

import contextlib
import os
import pathlib
import shlex
from collections.abc import Mapping

XLA_FLAGS = "XLA_FLAGS"
DETERMINISM = "xla_gpu_deterministic_ops"
"""The option with which GPUs compute the same bits in every run."""

_FLAG = f"--{DETERMINISM}"
_OTHERS = {
    # cuBLAS, which cuDNN's LSTM calls, has one size of workspaces, so it does
    # not choose a kernel by the workspace that is free.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # NCCL does not sum in NVLink switches, in an order that they choose
    # (github.com/NVIDIA/nccl/issues/1497).
    "NCCL_NVLS_ENABLE": "0",
}


def read_flags(environ: Mapping[str, str]) -> str:
    """Returns XLA's flags, from the variable or from the file that it names.

    Like XLA, it takes a value that does not begin with "-" for a file's name.

    Args:
      environ: The environment variables.

    Raises:
      ValueError: if there is no such file, a quote is not closed, or a word is
        no flag.
    """
    flags = environ.get(XLA_FLAGS, "").strip()
    try:
        if flags[:1] not in ("", "-"):
            file = pathlib.Path(flags)
            flags = file.read_text("utf-8", errors="surrogateescape").strip()
        # XLA skips what follows an open quote or a word that is no flag.
        is_valid = all(word[:1] == "-" for word in shlex.split(flags))
    except (OSError, ValueError):
        is_valid = False
    if not is_valid:
        raise ValueError(
            f"{XLA_FLAGS} must consist of flags that begin with '-', or name a "
            "file of such flags, and each quote must be closed. Received: "
            f"{environ[XLA_FLAGS]!r:.200}. Correct the variable, or unset it."
        )
    return flags


def is_deterministic(environ: Mapping[str, str]) -> bool:
    """Returns whether XLA's flags ask for determinism on GPUs.

    Args:
      environ: The environment variables.
    """
    try:
        flags = shlex.split(read_flags(environ))
    except ValueError:
        return False
    # If a flag is repeated, XLA uses the last one.
    values = [
        value.lower()
        for name, _, value in (flag.partition("=") for flag in flags)
        if name == _FLAG
    ]
    return values[-1:] in (["true"], ["1"], [""])


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
    import jax

    # JAX has no public name for this (tests/contract/test_jax_contract.py).
    from jax._src import xla_bridge

    if xla_bridge.backends_are_initialized():
        with contextlib.suppress(RuntimeError):
            return bool(jax.devices("gpu"))
    return False
