"""How the tests' programs are compiled: quickly, for they run briefly."""

import importlib.metadata

# Of LLVM, which comes after all that XLA does itself.
LLVM_FLAGS = " --xla_backend_optimization_level=0"
LLVM_FLAGS += " --xla_llvm_disable_expensive_passes=true"
FLAGS = LLVM_FLAGS
# XLA's newer way to emit fusions takes more than twice as long, and a program
# in 32 parts a quarter longer than in one. A process ends at a flag that its
# XLA does not know: these are for the versions that are known to have them.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
    FLAGS += " --xla_cpu_parallel_codegen_split_count=1"
