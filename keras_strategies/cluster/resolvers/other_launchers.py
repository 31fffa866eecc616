"""The variables of other launchers, in a process that joins no job."""

import dataclasses
from collections.abc import Mapping

_MAX_DIGITS = 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnjoinedJob:
    """A job of several processes, by its launcher.

    Attributes:
      variable: The environment variable that says how many there are.
      count: How many.
      cure: What to give the strategy to join them.
    """

    variable: str
    count: int
    cure: str


# The variable of the number of processes, others that it comes with, and how
# to join: SLURM's steps, Open MPI and torchrun.
_LAUNCHERS = (
    (
        "SLURM_STEP_NUM_TASKS",
        ("SLURM_PROCID",),
        "`cluster_resolver=ks.cluster_resolver.SlurmClusterResolver()`",
    ),
    (
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_RANK",),
        "`coordinator_address`, and the numbers of OMPI_COMM_WORLD_SIZE and "
        "OMPI_COMM_WORLD_RANK as `num_processes` and `process_id`",
    ),
    (
        "WORLD_SIZE",
        ("RANK", "MASTER_ADDR"),
        "`cluster_resolver=ks.cluster_resolver.TorchrunClusterResolver()`",
    ),
)


def unjoined_job(environ: Mapping[str, str]) -> UnjoinedJob | None:
    """The job of several processes that a launcher has started, if any.

    Args:
      environ: The environment.
    """
    for variable, others, cure in _LAUNCHERS:
        text = environ.get(variable, "")
        is_number = text.isascii() and text.isdigit()
        if not is_number or len(text) > _MAX_DIGITS or int(text) < 2:
            continue
        if all(other in environ for other in others):
            return UnjoinedJob(variable=variable, count=int(text), cure=cure)
    return None
