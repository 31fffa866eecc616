"""Bytes of all-reduces in programs' texts."""

from keras_strategies.passes.hlo import find_collective, parse


def count_reduced_bytes(text):
    """Returns the bytes that all-reduces send, in all and in the entry."""
    program = parse(text)

    def count(computations):
        return sum(
            collective.size
            for computation in computations
            for x in computation.instructions
            for collective in find_collective(computation, x)
            if collective.kind == "all-reduce"
        )

    return count(program.computations.values()), count([program.entry])
