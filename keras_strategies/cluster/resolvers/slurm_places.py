"""The host of each task of a SLURM step, by its distribution of tasks."""

from collections.abc import Mapping, Sequence

from keras_strategies.cluster.addresses import read_number, shown

_SETTER = "srun, in a SLURM step"
_DISTRIBUTION = "SLURM_DISTRIBUTION"
_PLANE_SIZE = "SLURM_DIST_PLANESIZE"
_HOST = "SLURMD_NODENAME"
_LOCAL_ID = "SLURM_LOCALID"


def places_of_tasks(
    environ: Mapping[str, str], hosts: Sequence[tuple[str, int]], rank: int
) -> list[tuple[str, int]]:
    """Each task's host and its number there, in the order of ranks.

    Args:
      environ: The variables of one task. SLURM_DISTRIBUTION is "block",
        "cyclic" or "plane"; what follows a colon is about sockets and cores.
      hosts: The hosts in SLURM's order, and how many tasks each one runs.
      rank: The task that `environ` is of.

    Raises:
      RuntimeError: the task runs elsewhere, by SLURMD_NODENAME and
        SLURM_LOCALID. So it is where tasks are distributed by a file.
      ValueError: a variable is no number.

    References:
      https://slurm.schedmd.com/srun.html#OPT_distribution
    """
    places = _deal(hosts, _tasks_a_turn(environ, hosts))
    if environ.get(_HOST) in dict(hosts) and environ.get(_LOCAL_ID):
        own = environ[_HOST], read_number(environ, _LOCAL_ID, _SETTER)
        if places[rank] != own:
            raise _elsewhere(environ, rank, places[rank], own)
    return places


def _tasks_a_turn(
    environ: Mapping[str, str], hosts: Sequence[tuple[str, int]]
) -> int:
    """How many tasks a host is given before the next host's turn."""
    distribution = environ.get(_DISTRIBUTION, "").partition(":")[0].lower()
    if distribution == "cyclic":
        return 1
    if distribution == "plane" and environ.get(_PLANE_SIZE):
        return read_number(environ, _PLANE_SIZE, _SETTER, least=1)
    return max(count for _, count in hosts)


def _deal(
    hosts: Sequence[tuple[str, int]], a_turn: int
) -> list[tuple[str, int]]:
    turns = range(0, max(count for _, count in hosts), a_turn)
    return [
        (host, local)
        for first in turns
        for host, count in hosts
        for local in range(first, min(first + a_turn, count))
    ]


def _elsewhere(
    environ: Mapping[str, str],
    rank: int,
    expected: tuple[str, int],
    own: tuple[str, int],
) -> RuntimeError:
    distribution = shown(environ.get(_DISTRIBUTION, "block"))
    return RuntimeError(
        "Tasks are numbered in blocks, in turns (cyclic) or in planes of "
        f"hosts. Received: task {rank}, which runs as task {own[1]} of "
        f"{shown(own[0])}, and by the distribution {distribution} is task "
        f"{expected[1]} of {shown(expected[0])}. Start the program with "
        "`srun -m block`, or give TF_CONFIG and TFConfigClusterResolver."
    )
