"""Eight virtual CPU devices for all tests, set before jax starts."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    # Compiling is most of the suite's time.
    + " --xla_backend_optimization_level=0"
    + " --xla_llvm_disable_expensive_passes=true"
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["KERAS_BACKEND"] = "jax"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
