"""The hosts and tasks of a SLURM job step, parsed from srun's variables."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from keras_strategies.cluster.addresses import read_number, shorten

SETTER = "srun, in a SLURM step"
"""The program that sets the variables, for error messages."""

_MAX_HOSTS = 100_000
_MAX_LENGTH = 253
"""The maximum length of a host's name, as in DNS."""
_PARTS = re.compile(r"\[[^\[\]]*\]|[^\[\],]+|,", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)
_DISTRIBUTION = "SLURM_DISTRIBUTION"
_PLANE_SIZE = "SLURM_DIST_PLANESIZE"
_HOST = "SLURMD_NODENAME"
_LOCAL_ID = "SLURM_LOCALID"


def expand_hostlist(hostlist: str) -> list[str]:
    """Expands SLURM's compact list of hosts to a list of host names.

    Args:
      hostlist: A list in the format of SLURM_STEP_NODELIST. For example,
        `"n[1-2],m5,o[3-4,06]"` becomes n1, n2, m5, o3, o4, o06; and
        `"r[1-2]n[1-2]"` becomes r1n1, r1n2, r2n1, r2n2.

    Returns:
      The host names, in the order of the list.

    Raises:
      ValueError: if `hostlist` does not have this format, or describes more
        than 100 000 hosts.
    """
    hosts: list[str] = []
    for parts in _split(hostlist):
        choices = [list(_expand_ranges(part, hostlist)) for part in parts]
        count = math.prod(map(len, choices))
        if len(hosts) + count > _MAX_HOSTS:
            raise _make_error(hostlist, "it has too many hosts")
        if (
            sum(max(map(len, names), default=0) for names in choices)
            > _MAX_LENGTH
        ):
            raise _make_error(hostlist, "a host's name is too long")
        hosts += ["".join(host) for host in itertools.product(*choices)]
    return hosts


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Expands SLURM's compact list of task counts to one number per host.

    Args:
      tasks_per_node: A list in the format of SLURM_STEP_TASKS_PER_NODE. For
        example, `"3(x2),2,1"` becomes 3, 3, 2, 1.

    Raises:
      ValueError: if `tasks_per_node` does not have this format, or describes
        more than 100 000 hosts.
    """
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = _COUNT.fullmatch(part)
        repeats = int(match[2] or 1) if match else 0
        if not match or len(counts) + repeats > _MAX_HOSTS:
            raise ValueError(
                "Invalid tasks-per-node list format: it must be numbers such "
                f"as '3(x2),2,1'. Received: {shorten(tasks_per_node)}. It is "
                "normally set by srun. Check whether something else also sets "
                "SLURM_STEP_TASKS_PER_NODE."
            )
        counts += [int(match[1])] * repeats
    return counts


def place_tasks(
    environ: Mapping[str, str], hosts: Sequence[tuple[str, int]], rank: int
) -> list[tuple[str, int]]:
    """Computes the host on which each task runs.

    Args:
      environ: The variables of one task. SLURM_DISTRIBUTION is "block",
        "cyclic" or "plane". A suffix after a colon is ignored, because it
        concerns only sockets and cores.
      hosts: Pairs of a host and its number of tasks, in SLURM's order.
      rank: The rank of the task that has the variables in `environ`.

    Returns:
      A pair for each task, in the order of ranks: its host, and its index
      among the tasks on that host.

    Raises:
      RuntimeError: if the task's actual host and index, in SLURMD_NODENAME and
        SLURM_LOCALID, differ from the computed ones. This happens if a file
        assigns the tasks to hosts.
      ValueError: if a variable is not a number.

    References:
      https://slurm.schedmd.com/srun.html#OPT_distribution
    """
    places = _deal(hosts, _read_round_size(environ, hosts))
    if environ.get(_HOST) in dict(hosts) and environ.get(_LOCAL_ID):
        actual = environ[_HOST], read_number(environ, _LOCAL_ID, SETTER)
        if places[rank] != actual:
            distribution = shorten(environ.get(_DISTRIBUTION, "block"))
            raise RuntimeError(
                "SLURM must distribute the tasks as 'block', 'cyclic' or "
                f"'plane'. Received: the distribution {distribution}, and task "
                f"{rank} at {shorten(actual)}, not at {places[rank]}. Start "
                "the program with `srun -m block`, or use TF_CONFIG and "
                "TFConfigClusterResolver."
            )
    return places


def _split(hostlist: str) -> Iterator[list[str]]:
    """Splits the entries of a host list at commas and around brackets.

    For example, "n[1-2],m5" yields ["n", "[1-2]"] and ["m5"].
    """
    parts = _PARTS.findall(hostlist)
    if "".join(parts) != hostlist:
        raise _make_error(hostlist, "brackets do not match")
    entry: list[str] = []
    for part in [*parts, ","]:
        if part != ",":
            entry.append(part)
            continue
        if not entry:
            raise _make_error(hostlist, "a host is missing")
        yield entry
        entry = []


def _expand_ranges(text: str, hostlist: str) -> Iterator[str]:
    if not text.startswith("["):
        yield text
        return
    total = 0
    for part in text[1:-1].split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise _make_error(
                hostlist, "the text in brackets is not a list of ranges"
            )
        first, last = match[1], match[2] or match[1]
        total += int(last) - int(first) + 1
        if int(last) < int(first) or total > _MAX_HOSTS:
            raise _make_error(hostlist, "a range is empty or too long")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _make_error(hostlist: str, problem: str) -> ValueError:
    return ValueError(
        f"Invalid hostlist format: {problem}. Received: {shorten(hostlist)}. "
        "It is normally set by srun, for example to 'n[1-4],m5'. Check whether "
        "something else also sets SLURM_STEP_NODELIST."
    )


def _read_round_size(
    environ: Mapping[str, str], hosts: Sequence[tuple[str, int]]
) -> int:
    """Returns the number of consecutive tasks that a host gets per round."""
    distribution = environ.get(_DISTRIBUTION, "").partition(":")[0].lower()
    if distribution == "cyclic":
        return 1
    if distribution == "plane" and environ.get(_PLANE_SIZE):
        return read_number(environ, _PLANE_SIZE, SETTER, minimum=1)
    return max(count for _, count in hosts)


def _deal(
    hosts: Sequence[tuple[str, int]], round_size: int
) -> list[tuple[str, int]]:
    rounds = range(0, max(count for _, count in hosts), round_size)
    return [
        (host, local)
        for first in rounds
        for host, count in hosts
        for local in range(first, min(first + round_size, count))
    ]
