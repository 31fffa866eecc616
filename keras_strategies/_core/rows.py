"""Which rows of a batch go to which replica."""


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
    counts = []
    left = rows
    for replica in range(num_replicas):
        count = min(floor + (replica < extra), left)
        counts.append(count)
        left -= count
    return tuple(counts)
