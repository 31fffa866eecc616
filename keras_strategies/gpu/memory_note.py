"""Explains errors of GPUs whose memory is exhausted."""

import jax

_EXHAUSTED = "RESOURCE_EXHAUSTED"


def add_memory_note(error: jax.errors.JaxRuntimeError) -> None:
    """Adds a note to an error, if it says that a GPU's memory is exhausted."""
    if _EXHAUSTED in str(error) and jax.default_backend() == "gpu":
        error.add_note(
            "If another process uses this GPU, it may hold most of its memory: "
            "JAX takes 75 percent when it starts. `nvidia-smi` lists the "
            "processes. Use different GPUs (`CUDA_VISIBLE_DEVICES`), or set "
            "XLA_PYTHON_CLIENT_MEM_FRACTION in both processes. Otherwise use "
            "fewer rows; `strategy.plan` shows how much memory a step needs."
        )
