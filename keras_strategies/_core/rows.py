"""The division of a batch's rows over replicas and processes."""

from collections.abc import Sequence


def rows_of_replicas(
    rows: int, batch_size: int, num_replicas: int
) -> tuple[int, ...]:
    """How many rows each replica gets of a batch.

    Of a whole batch the first `batch_size mod num_replicas` replicas get one
    row more than the others. A shorter one fills the same places in order, so
    the last replicas may get fewer rows, or none.

    Args:
      rows: Rows of this batch.
      batch_size: Rows of a whole batch. A batch with more is divided as if
        its own rows were that.
      num_replicas: Number of replicas.

    Returns:
      The numbers of rows, in the order of replica ids; they add up to `rows`.
    """
    floor, extra = divmod(max(rows, batch_size), num_replicas)
    return in_order([floor + (k < extra) for k in range(num_replicas)], rows)


def padded_rows(rows: int, num_replicas: int) -> int:
    """The next multiple of `num_replicas`: rows with their padding."""
    return -(-rows // num_replicas) * num_replicas


def balanced_rows(rows: int, num_replicas: int) -> tuple[int, ...]:
    """How many rows each replica holds of a batch that is padded at its end.

    Args:
      rows: Rows of the batch.
      num_replicas: Number of replicas.
    """
    most = padded_rows(rows, num_replicas) // num_replicas
    return in_order([most] * num_replicas, rows)


def rotated_rows(
    step: int, batch_size: int, num_replicas: int, num_processes: int
) -> tuple[int, ...]:
    """How many rows each replica reads in a step, of rows that are its own.

    As `rows_of_replicas` of a whole batch, whose places move on by a process
    from step to step, as in tf: otherwise the first processes would be through
    with their rows before the others.

    Args:
      step: Number of the step.
      batch_size: Rows of all replicas in a step.
      num_replicas: Number of replicas.
      num_processes: Number of processes that hold them.
    """
    counts = rows_of_replicas(batch_size, batch_size, num_replicas)
    shift = step * (num_replicas // num_processes) % num_replicas
    return counts[shift:] + counts[:shift]


def rows_of_processes(
    counts: Sequence[int], num_processes: int
) -> tuple[int, ...]:
    """How many rows each process holds, of those of the replicas.

    Args:
      counts: The replicas' numbers of rows, equally many of each process.
      num_processes: Number of processes.
    """
    share = len(counts) // num_processes
    return tuple(
        sum(counts[p * share : (p + 1) * share]) for p in range(num_processes)
    )


def filled(counts: Sequence[int], rows: int) -> tuple[int, ...]:
    """The places of a process's replicas, filled in order with its rows.

    Args:
      counts: How many rows each of its replicas takes.
      rows: The rows there are; if more than fit, they are shared evenly.
    """
    if rows > sum(counts):
        return rows_of_replicas(rows, rows, len(counts))
    return in_order(counts, rows)


def in_order(places: Sequence[int], rows: int) -> tuple[int, ...]:
    """How many rows each place takes, of those that are left for it."""
    taken = []
    for size in places:
        taken.append(min(size, rows))
        rows -= taken[-1]
    return tuple(taken)
