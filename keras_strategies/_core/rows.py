"""The division of a batch's rows over replicas and processes."""

from collections.abc import Sequence


def rows_of_replicas(
    rows: int, batch_size: int, num_replicas: int
) -> tuple[int, ...]:
    """Returns the number of rows that each replica gets of a batch.

    The first `batch_size mod num_replicas` replicas get one row more of a full
    batch than the others. A shorter batch fills the same places in order, so
    the last replicas may get fewer rows, or none.

    Args:
      rows: Number of rows of this batch.
      batch_size: Number of rows of a full batch. A batch with more rows is
        divided as if it were a full one.
      num_replicas: Number of replicas.

    Returns:
      The numbers of rows, in the order of replica ids; they add up to `rows`.
    """
    floor, extra = divmod(max(rows, batch_size), num_replicas)
    return fill_in_order(
        [floor + (k < extra) for k in range(num_replicas)], rows
    )


def padded_rows(rows: int, num_replicas: int) -> int:
    """Rounds a number of rows up to a multiple of `num_replicas`."""
    return -(-rows // num_replicas) * num_replicas


def balanced_rows(rows: int, num_replicas: int) -> tuple[int, ...]:
    """Returns each replica's number of rows of a batch padded at its end.

    Args:
      rows: Number of rows of the batch, without the padding.
      num_replicas: Number of replicas.
    """
    most = padded_rows(rows, num_replicas) // num_replicas
    return fill_in_order([most] * num_replicas, rows)


def rotated_rows(
    step: int, batch_size: int, num_replicas: int, num_processes: int
) -> tuple[int, ...]:
    """Returns the number of process-local rows that each replica reads.

    These are the numbers that `rows_of_replicas` returns for a full batch,
    rotated by one process in each step, as in TensorFlow. Without the rotation
    the first processes would run out of rows before the others.

    Args:
      step: Index of the step.
      batch_size: Number of rows of all replicas in a step.
      num_replicas: Number of replicas.
      num_processes: Number of processes that the replicas belong to.
    """
    counts = rows_of_replicas(batch_size, batch_size, num_replicas)
    shift = step * (num_replicas // num_processes) % num_replicas
    return counts[shift:] + counts[:shift]


def rows_of_processes(
    counts: Sequence[int], num_processes: int
) -> tuple[int, ...]:
    """Returns the number of rows of each process, from those of the replicas.

    Args:
      counts: Numbers of rows of the replicas; all processes have the same
        number of replicas.
      num_processes: Number of processes.
    """
    share = len(counts) // num_processes
    return tuple(
        sum(counts[p * share : (p + 1) * share]) for p in range(num_processes)
    )


def fill_replicas(counts: Sequence[int], rows: int) -> tuple[int, ...]:
    """Returns each replica's number of rows if a process fills them in order.

    Args:
      counts: Number of rows that each replica of the process can take.
      rows: Number of rows of the process. If there are more than fit, the
        replicas share them evenly.
    """
    if rows > sum(counts):
        return rows_of_replicas(rows, rows, len(counts))
    return fill_in_order(counts, rows)


def fill_in_order(places: Sequence[int], rows: int) -> tuple[int, ...]:
    """Returns the rows in each place when the places are filled in order."""
    taken = []
    for size in places:
        taken.append(min(size, rows))
        rows -= taken[-1]
    return tuple(taken)
