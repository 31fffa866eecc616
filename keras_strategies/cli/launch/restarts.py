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


class RestartRules:
    """Decides whether a job that has ended is started again.

    Args:
      maximum: The largest number of restarts.
    """

    def __init__(self, maximum: int) -> None:
        self._max = maximum
        self.num_restarts = 0
        # How the job ended before: its end and step, and how often it ended so
        # in a row; the newest checkpoint.
        self._end: tuple[int | None, int | None] | None = None
        self._num_equal_ends = 0
        self._checkpoint: int | None = None
        self._num_in_vain = 0

    def decide(self, end: JobEnd, progress: Progress) -> float | str:
        """Returns the seconds until the job is started again, or why it is not.

        The reason is "" if it needs no explanation.

        Args:
          end: The end of the job.
          progress: What the processes have reported; `step` only since the job
            was last started.
        """
        if end.is_final or self._max <= 0:
            return ""
        if self.num_restarts == self._max:
            return f"the limit of {self._max} restarts is reached"
        if progress.has_trained and not progress.has_directory:
            return _CHECKPOINTS
        reason = self._find_problem(end, progress)
        if reason:
            return reason
        self.num_restarts += 1
        return self._back_off(progress)

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
        if is_error and self._num_equal_ends >= _MAX_ERRORS:
            return f"the script failed twice{where}"
        if self._num_equal_ends >= _MAX_EQUAL_ENDS:
            return (
                f"this happened {self._num_equal_ends} times in a row"
                f"{where or ' before the first step'}"
            )
        return ""

    def _back_off(self, progress: Progress) -> float:
        """Returns how long to wait: longer, if no checkpoint was added."""
        if progress.checkpoint != self._checkpoint:
            self._checkpoint, self._num_in_vain = progress.checkpoint, 0
        wait = _FIRST_WAIT_S * 2.0**self._num_in_vain
        self._num_in_vain += 1
        return min(wait, _MAX_WAIT_S)


def run_with_restarts(
    run: Callable[[Progress], JobEnd],
    *,
    max_restarts: int,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Runs a job, and starts it again if it fails and this is worthwhile.

    Args:
      run: A function that runs the job once. Its argument is the record for
        reports of progress.
      max_restarts: The largest number of restarts.
      sleep: A function that waits for a number of seconds.

    Returns:
      The exit code of the job's last run.
    """
    rules, progress = RestartRules(max_restarts), Progress()
    while True:
        progress = dataclasses.replace(progress, step=None)
        end = run(progress)
        decision = rules.decide(end, progress)
        if isinstance(decision, str):
            if end.text:
                reason = f" It is not restarted: {decision}." * bool(decision)
                print_line(f"{end.text}; the job has ended.{reason}")
            return end.code
        step, checkpoint = progress.step, progress.checkpoint
        after = "" if step is None else f" after step {step}"
        start = f"from the checkpoint of step {checkpoint}"
        if checkpoint is None:
            start = "from the beginning"
        print_line(
            f"{end.text}{after}; restart {rules.num_restarts} of "
            f"{max_restarts} in {decision:.0f} s, {start}."
        )
        sleep(decision)
