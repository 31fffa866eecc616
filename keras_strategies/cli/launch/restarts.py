"""Starts a local job again from its last checkpoint when a process fails."""

import dataclasses
import time
from collections.abc import Callable

from keras_strategies.cli.launch.local_job import JobEnd, print_line
from keras_strategies.job.progress_pipe import Progress

# How often in a row the job may end at the same step: by an error in the
# script, which is then raised again, or by the same signal or exit code.
_MAX_ERRORS = 2
_MAX_EQUAL_ENDS = 3
_FIRST_WAIT_S = 1.0
_MAX_WAIT_S = 60.0
_CHECKPOINTS = (
    "the script trains without checkpoints, and would begin again. Use "
    "`ks.callbacks.Checkpoint` or `ks.checkpoint.CheckpointManager`"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restart:
    """The decision to start a job again.

    Attributes:
      num_processes: The number of processes to start.
      without: The number of the process that is left out; None if none is.
      wait_s: The time to wait before the start, in seconds.
    """

    num_processes: int
    without: int | None = None
    wait_s: float


class RestartRules:
    """Decides whether a job that has ended is started again.

    Args:
      maximum: The largest number of restarts.
      min_processes: The least number of processes of the cluster. If a process
        cannot start, the job continues with fewer processes.
    """

    def __init__(self, maximum: int, min_processes: int) -> None:
        self._max = maximum
        self._min_processes = min_processes
        self.num_restarts = 0
        # How the job ended before: its end and step, and how often it ended so
        # in a row; the process that ended before its first step; the newest
        # checkpoint.
        self._end: tuple[int | None, int | None] | None = None
        self._num_equal_ends = 0
        self._never_started: int | None = None
        self._checkpoint: int | None = None
        self._num_in_vain = 0

    def decide(
        self, end: JobEnd, progress: Progress, num_processes: int
    ) -> Restart | str:
        """Returns how to start the job again, or why this is not done.

        The reason is "" if it needs no explanation.

        Args:
          end: The end of the job.
          progress: What the processes have reported; `step` only since the job
            was last started.
          num_processes: The number of processes of the cluster.
        """
        if end.is_final or not self._max:
            return ""
        if self.num_restarts == self._max:
            return f"the limit of {self._max} restarts is reached"
        if progress.has_trained and not progress.has_directory:
            return _CHECKPOINTS
        reason = self._find_problem(end, progress)
        without = self._choose_omitted(end, progress, num_processes)
        if reason and without is None:
            return reason
        self.num_restarts += 1
        return Restart(
            num_processes=self._count(end, num_processes, without),
            without=without,
            wait_s=self._back_off(progress),
        )

    def _find_problem(self, end: JobEnd, progress: Progress) -> str:
        """Returns what would happen again, because the script is at fault."""
        code = end.cause.code if end.cause else end.code
        is_error = end.cause is not None and end.cause.is_error
        # If no step was completed, the job began at its newest checkpoint.
        step = progress.checkpoint if progress.step is None else progress.step
        before, self._end = self._end, (None if is_error else code, step)
        self._num_equal_ends *= self._end == before
        self._num_equal_ends += 1
        where = f" after step {step}" if step else ""
        if is_error and end.num_errors > 1 and not progress.has_trained:
            return f"the script failed in {end.num_errors} processes"
        if is_error and self._num_equal_ends >= _MAX_ERRORS:
            return f"the script failed twice{where}"
        if self._num_equal_ends >= _MAX_EQUAL_ENDS:
            return (
                f"this happened {self._num_equal_ends} times in a row"
                f"{where or ' before the first step'}"
            )
        return ""

    def _choose_omitted(
        self, end: JobEnd, progress: Progress, num_processes: int
    ) -> int | None:
        """Returns a process that twice in a row ended before its first step.

        If it raised an error, it must be the only one that did: otherwise the
        script is at fault.
        """
        failed = None
        if end.cause is not None and progress.step is None:
            is_shared = end.cause.is_error and end.num_errors > 1
            failed = None if is_shared else end.cause.process
        before, self._never_started = self._never_started, failed
        is_omitted = (
            failed is not None
            and failed == before
            and failed < num_processes  # It is not the evaluator.
            and num_processes > self._min_processes
        )
        if not is_omitted:
            return None
        self._never_started = None
        self._num_equal_ends = 1
        return failed

    def _count(
        self, end: JobEnd, num_processes: int, without: int | None
    ) -> int:
        if without is not None:
            return num_processes - 1
        if self._min_processes <= end.num_started < num_processes:
            return end.num_started
        return num_processes

    def _back_off(self, progress: Progress) -> float:
        """Returns how long to wait: longer, if no checkpoint was added."""
        if progress.checkpoint != self._checkpoint:
            self._checkpoint, self._num_in_vain = progress.checkpoint, 0
        wait = _FIRST_WAIT_S * 2.0**self._num_in_vain
        self._num_in_vain += 1
        return min(wait, _MAX_WAIT_S)


def run_with_restarts(
    run: Callable[[int, int | None, Progress], JobEnd],
    num_processes: int,
    *,
    max_restarts: int,
    min_processes: int,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Runs a job, and starts it again if it fails and this is worthwhile.

    Args:
      run: A function that runs the job once. Its arguments are the number of
        processes, the process of the last call to leave out (or None), and the
        record for reports of progress.
      num_processes: The number of processes of the cluster.
      max_restarts: The largest number of restarts.
      min_processes: See `RestartRules`.
      sleep: A function that waits for a number of seconds.

    Returns:
      The exit code of the job's last run.
    """
    rules = RestartRules(max_restarts, min_processes)
    progress, without = Progress(), None
    while True:
        progress = dataclasses.replace(progress, step=None)
        end = run(num_processes, without, progress)
        decision = rules.decide(end, progress, num_processes)
        if isinstance(decision, str):
            if end.text:
                reason = f" It is not restarted: {decision}." * bool(decision)
                print_line(f"{end.text}; the job has ended.{reason}")
            return end.code
        print_line(
            f"{end.text}{_describe_step(progress)}; restart "
            f"{rules.num_restarts} of {max_restarts} "
            f"{_describe_start(decision, num_processes, progress)}."
        )
        sleep(decision.wait_s)
        num_processes, without = decision.num_processes, decision.without


def _describe_step(progress: Progress) -> str:
    return "" if progress.step is None else f" after step {progress.step}"


def _describe_start(
    restart: Restart, num_processes: int, progress: Progress
) -> str:
    parts = [f"in {restart.wait_s:.0f} s"]
    if restart.num_processes < num_processes:
        parts.append(f"with {restart.num_processes} processes")
    parts.append(
        "from the beginning"
        if progress.checkpoint is None
        else f"from the checkpoint of step {progress.checkpoint}"
    )
    return ", ".join(parts)
