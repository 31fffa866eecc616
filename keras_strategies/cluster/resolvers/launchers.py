"""A table of the launchers that start clusters, by their variables."""

import dataclasses
from collections.abc import Callable, Mapping

from keras_strategies.cluster.resolvers.kubernetes_resolver import (
    KubernetesClusterResolver,
    is_pod_of_job,
)
from keras_strategies.cluster.resolvers.resolver import ClusterResolver
from keras_strategies.cluster.resolvers.slurm_resolver import (
    SlurmClusterResolver,
)
from keras_strategies.cluster.resolvers.tf_config_resolver import (
    TFConfigClusterResolver,
)
from keras_strategies.cluster.resolvers.torchrun_resolver import (
    TorchrunClusterResolver,
)


@dataclasses.dataclass(frozen=True)
class Launcher:
    """A program that starts the processes of a cluster.

    Attributes:
      name: The name of the launcher, such as "SLURM".
      variables: The variables that it sets, separated by spaces. If the first
        `num_marks` are set, the launcher has started this process.
      num_marks: The number of these variables.
      use: The strategy or resolver that a script should use.
      resolver: The resolver for the variables; None if JAX reads them itself.
      setter: The program that sets the variables; the default is `name`.
      counts: The variables with the number of processes in the job, this
        process's index on its host, and the number of processes there.
      argument: The argument with which a strategy joins the job; the default
        is the resolver.
    """

    name: str
    variables: str
    num_marks: int
    use: str
    resolver: Callable[..., ClusterResolver] | None = None
    setter: str = ""
    counts: str = ""
    argument: str = ""

    def has_started(self, environ: Mapping[str, str]) -> bool:
        """Returns whether the launcher has set its variables."""
        if self.resolver is KubernetesClusterResolver:
            return is_pod_of_job(environ)
        return all(map(environ.get, self.variables.split()[: self.num_marks]))


# If several launchers have set variables, the first one is used, as in
# `MultiWorkerMirroredStrategy()`.
LAUNCHERS = (
    Launcher(
        "TF_CONFIG",
        "TF_CONFIG",
        1,
        "MultiWorkerMirroredStrategy(), or TFConfigClusterResolver()",
        TFConfigClusterResolver,
        "the program that started this process",
    ),
    Launcher(
        "SLURM",
        "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_STEP_NODELIST "
        "SLURM_STEP_TASKS_PER_NODE",
        2,
        "SlurmClusterResolver()",
        SlurmClusterResolver,
        "srun",
        "SLURM_STEP_NUM_TASKS",
    ),
    Launcher(
        "Kubernetes",
        "JOB_COMPLETION_INDEX JAX_PROCESS_COUNT JAX_COORDINATOR_ADDRESS "
        "JAX_COORDINATOR_PORT JOBSET_NAME PROCESS_ID NUM_PROCESSES "
        "COORDINATOR_ADDRESS",
        0,
        "KubernetesClusterResolver()",
        KubernetesClusterResolver,
    ),
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE",
        2,
        "jax.distributed.initialize() before the strategy",
        setter="mpirun",
        counts="OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK "
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        argument="`coordinator_address`, and the values of "
        "OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_RANK as `num_processes` and "
        "`process_id`",
    ),
    Launcher(
        "torchrun",
        "RANK WORLD_SIZE MASTER_ADDR MASTER_PORT",
        2,
        "TorchrunClusterResolver()",
        TorchrunClusterResolver,
        counts="WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE",
    ),
    Launcher(
        "Cloud TPU",
        "TPU_WORKER_ID TPU_WORKER_HOSTNAMES TPU_TOPOLOGY",
        1,
        "TPUStrategy(), after jax.distributed.initialize()",
    ),
)
