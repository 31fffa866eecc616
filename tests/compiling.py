"""How the tests' programs are compiled: quickly, for they run briefly."""

import importlib.metadata

FLAGS = " --xla_backend_optimization_level=0"
FLAGS += " --xla_llvm_disable_expensive_passes=true"
# XLA's newer way to emit fusions compiles more than twice as long. A process
# ends at a flag that its XLA does not know: this one is said to be going.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
