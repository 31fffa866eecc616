"""Divides the rows of a batch over replicas and processes."""

from collections.abc import Sequence


def rows_of_replicas(
    rows: int, batch_size: int, num_replicas: int
) -> tuple[int, ...]:
    """Divides the rows of a batch over the replicas.

    The replicas get equal numbers of rows of a full batch, except that each of
    the first `batch_size mod num_replicas` replicas gets one additional row.
    With a shorter batch, the replicas are filled up to these numbers one after
    another, so the last replicas may get fewer rows, or none. For example, with
    a batch size of 8 on 2 replicas, a last batch of 6 rows is split into 4 and
    2 rows.

    Args:
      rows: Number of rows of this batch.
      batch_size: Number of rows of a full batch. If `rows` is larger, the batch
        is divided as if it were a full batch.
      num_replicas: Number of replicas.

    Returns:
      The number of rows of each replica, in the order of replica ids. Their sum
      is `rows`.
    """
    floor, extra = divmod(max(rows, batch_size), num_replicas)
    limits = [floor + (k < extra) for k in range(num_replicas)]
    return fill_in_order(limits, rows)


def padded_rows(rows: int, num_replicas: int) -> int:
    """Rounds a number of rows up to a multiple of `num_replicas`."""
    return -(-rows // num_replicas) * num_replicas


def balanced_rows(rows: int, num_replicas: int) -> tuple[int, ...]:
    """Returns each replica's number of true rows in a batch padded at its end.

    Args:
      rows: Number of rows of the batch, without the padding.
      num_replicas: Number of replicas.
    """
    maximum = padded_rows(rows, num_replicas) // num_replicas
    return fill_in_order([maximum] * num_replicas, rows)


def rotated_rows(
    step: int, batch_size: int, num_replicas: int, num_processes: int
) -> tuple[int, ...]:
    """Returns how many rows of process-local data each replica reads.

    These are the numbers that `rows_of_replicas` returns for a full batch, but
    each further step rotates them by the number of replicas of one process, as
    in TensorFlow. Without the rotation, the first processes would always read
    more rows and would run out of data before the other processes.

    Args:
      step: Index of the step.
      batch_size: Total number of rows of all replicas in a step.
      num_replicas: Number of replicas.
      num_processes: Number of processes that the replicas belong to.
    """
    counts = rows_of_replicas(batch_size, batch_size, num_replicas)
    shift = step * (num_replicas // num_processes) % num_replicas
    return counts[shift:] + counts[:shift]


def rows_of_processes(
    counts: Sequence[int], num_processes: int
) -> tuple[int, ...]:
    """Returns the number of rows of each process, summed over its replicas.

    Args:
      counts: The number of rows of each replica, in the order of replica ids.
        All processes have the same number of replicas.
      num_processes: Number of processes.
    """
    share = len(counts) // num_processes
    starts = range(0, len(counts), share)
    return tuple(sum(counts[k : k + share]) for k in starts)


def fill_replicas(counts: Sequence[int], rows: int) -> tuple[int, ...]:
    """Divides a process's rows among its replicas, which are filled in order.

    Args:
      counts: The maximum number of rows of each replica of the process.
      rows: Number of rows of the process. If it exceeds the sum of `counts`,
        the rows are divided evenly over the replicas instead.
    """
    if rows > sum(counts):
        return rows_of_replicas(rows, rows, len(counts))
    return fill_in_order(counts, rows)


def fill_in_order(places: Sequence[int], rows: int) -> tuple[int, ...]:
    """Assigns rows to replicas or processes in order, each up to its limit.

    For example, 5 rows for three replicas with the limits 2, 2 and 2 are
    divided into 2, 2 and 1 rows.
    """
    counts = []
    for size in places:
        counts.append(min(size, rows))
        rows -= counts[-1]
    return tuple(counts)
