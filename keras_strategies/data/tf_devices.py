"""The GPUs of TensorFlow, which reads data but must leave GPUs to JAX.

A TensorFlow with support for GPUs takes almost all memory of each GPU when it
runs its first operation, and every dataset of tf.data runs some.
"""

import sys
import warnings
from typing import Any

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
