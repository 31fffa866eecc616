"""What a compiled program needs on a chip, by one clock for all peers."""

import dataclasses
import time

from keras_strategies.planning.compile.estimates import estimate
from keras_strategies.planning.program.costs import Costs
from keras_strategies.tpu.chips import find_chip

LOW_EFFORT = {"exec_time_optimization_effort": -1.0}


@dataclasses.dataclass(frozen=True)
class Measured:
    """A program's costs, and the estimate of its time."""

    costs: Costs
    milliseconds: float
    link_milliseconds: float

    @property
    def cells(self):
        """Of a table: GB, GB, ms, ms of links, and MB of each collective."""
        costs = self.costs
        sent = (
            f"{kind} {count / 1e6:.1f}"
            for kind, count in costs.sent.items()
            if count >= 1e5
        )
        return (
            f"{costs.argument_bytes / 1e9:.3f}",
            f"{costs.temporary_bytes / 1e9:.3f}",
            f"{self.milliseconds:.2f}",
            f"{self.link_milliseconds:.2f}",
            ", ".join(sent),
        )


def measure(lowered, devices, is_low=True):
    """Compiles a program for devices, and estimates its time."""
    before = time.perf_counter()
    options = dict(LOW_EFFORT) if is_low else None
    executable = lowered.compile(compiler_options=options)
    return read(executable, devices, time.perf_counter() - before)


def read(executable, devices, seconds):
    """Estimates the time of a compiled program."""
    devices = list(devices)
    chip = find_chip(devices[0])
    costs = Costs.measure(executable, seconds, chip, devices)
    found = estimate(costs, chip, None)
    assert found is not None, costs.unread
    return Measured(costs, found.seconds * 1e3, found.link_seconds * 1e3)
