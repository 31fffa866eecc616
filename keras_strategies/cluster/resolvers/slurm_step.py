"""The hosts and the tasks of a SLURM step, from srun's variables."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from keras_strategies.cluster.addresses import read_number, shown

SETTER = "srun, in a SLURM step"
"""Who sets the variables, for messages."""

_MAX_HOSTS = 100_000
_LONGEST = 253
"""Characters of a host's name, as in the DNS."""
_PARTS = re.compile(r"\[[^\[\]]*\]|[^\[\],]+|,", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)
_DISTRIBUTION = "SLURM_DISTRIBUTION"
_PLANE_SIZE = "SLURM_DIST_PLANESIZE"
_HOST = "SLURMD_NODENAME"
_LOCAL_ID = "SLURM_LOCALID"


def expand_hostlist(hostlist: str) -> list[str]:
    """The hosts that a list such as SLURM_STEP_NODELIST means, in its order.

    Args:
      hostlist: `"n[1-2],m5,o[3-4,06]"` is n1, n2, m5, o3, o4, o06;
        `"r[1-2]n[1-2]"` is r1n1, r1n2, r2n1, r2n2.

    Raises:
      ValueError: it is no such list, or one of more than 100 000 hosts.
    """
    hosts: list[str] = []
    for parts in _split(hostlist):
        choices = [
            list(_expand_ranges(part[1:-1], hostlist))
            if part.startswith("[")
            else [part]
            for part in parts
        ]
        count = math.prod(map(len, choices))
        if len(hosts) + count > _MAX_HOSTS:
            raise _fault(hostlist, "it has too many hosts")
        if sum(max(map(len, names), default=0) for names in choices) > _LONGEST:
            raise _fault(hostlist, "a host's name is too long")
        hosts += ["".join(host) for host in itertools.product(*choices)]
    return hosts


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """The numbers that a list such as SLURM_STEP_TASKS_PER_NODE means.

    Args:
      tasks_per_node: `"3(x2),2,1"` is 3, 3, 2, 1.

    Raises:
      ValueError: it is no such list, or one of more than 100 000 hosts.
    """
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = _COUNT.fullmatch(part)
        repeats = int(match[2] or 1) if match else 0
        if not match or len(counts) + repeats > _MAX_HOSTS:
            raise ValueError(
                "Invalid tasks-per-node list format: it is numbers such as "
                f"'3(x2),2,1'. Received: {shown(tasks_per_node)}. It is set "
                "by srun: look at what else sets SLURM_STEP_TASKS_PER_NODE."
            )
        counts += [int(match[1])] * repeats
    return counts


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
        own = environ[_HOST], read_number(environ, _LOCAL_ID, SETTER)
        if places[rank] != own:
            raise _elsewhere(environ, rank, places[rank], own)
    return places


def _split(hostlist: str) -> Iterator[list[str]]:
    """The texts and the ranges in brackets that each entry is made of."""
    parts = _PARTS.findall(hostlist)
    if "".join(parts) != hostlist:
        raise _fault(hostlist, "brackets do not match")
    entry: list[str] = []
    for part in [*parts, ","]:
        if part != ",":
            entry.append(part)
            continue
        if not entry:
            raise _fault(hostlist, "a host is missing")
        yield entry
        entry = []


def _expand_ranges(ranges: str, hostlist: str) -> Iterator[str]:
    total = 0
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise _fault(hostlist, "what is in brackets is no list of ranges")
        first, last = match[1], match[2] or match[1]
        total += int(last) - int(first) + 1
        if int(last) < int(first) or total > _MAX_HOSTS:
            raise _fault(hostlist, "a range is empty or too long")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _fault(hostlist: str, fault: str) -> ValueError:
    return ValueError(
        f"Invalid hostlist format: {fault}. Received: {shown(hostlist)}. It "
        "is set by srun as 'n[1-4],m5': look at what else sets "
        "SLURM_STEP_NODELIST."
    )


def _tasks_a_turn(
    environ: Mapping[str, str], hosts: Sequence[tuple[str, int]]
) -> int:
    """How many tasks a host is given before the next host's turn."""
    distribution = environ.get(_DISTRIBUTION, "").partition(":")[0].lower()
    if distribution == "cyclic":
        return 1
    if distribution == "plane" and environ.get(_PLANE_SIZE):
        return read_number(environ, _PLANE_SIZE, SETTER, least=1)
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
