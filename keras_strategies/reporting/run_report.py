"""`ks.callbacks.RunReport`: a report of where a run's time goes."""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import jax
import keras
from rich.console import Console

from keras_strategies._types import Logs
from keras_strategies.callbacks.global_step import GlobalStep
from keras_strategies.cluster.checks import check_number
from keras_strategies.fit.callbacks.callback_list import (
    ReportCallback,
)
from keras_strategies.fit.callbacks.resumable_fit import (
    find_fit_state,
)
from keras_strategies.keras_bridge.model_flops import embeds_tokens
from keras_strategies.names.phases import REPORT, Phase
from keras_strategies.reporting import document as files
from keras_strategies.reporting.advice import write_advice
from keras_strategies.reporting.figures import (
    compare_processes,
    compute_figures,
    compute_speed,
    count_flops,
    find_peak,
    pick_logs,
)
from keras_strategies.reporting.recorder import StepRecorder
from keras_strategies.watchdog import watchdog

_WRITE_S = 30.0


class RunReport(ReportCallback):
    """A callback that reports where the time of a `fit` goes.

    At the end of `fit` the chief prints a table and one sentence of advice,
    such as "38 % of the time waits for input: ...". The report is also written
    to `run_report.json` in the directory of the checkpoints, to which each
    start of the run adds an entry. `keras-strategies report DIR` prints it.

    The following values are added to the logs, that is, to the progress bar,
    `History` and `ks.callbacks.Scalars`: `step_ms`, `rows_per_sec`,
    `input_share`, and, if they are known, `tokens_per_sec` and `mfu`. They are
    means over the fit so far.

    `fit` may start programs ahead of the devices. So the report measures
    between moments at which all started programs have ended: at the start of a
    program, where `fit` waits for one (on CPUs, or for logs), before a
    checkpoint or an evaluation, and at an epoch's end. Each step in between
    gets the mean of the time. The report waits for programs only before a
    checkpoint or an evaluation, which wait for them too. Compilations,
    checkpoints and evaluations are not part of a step's time. The shares leave
    out start-up, the time until the first step has started.

    For loops without `fit`, use the object as a context manager, or call
    `begin` and `finish`. Mark each step by `with report.step(rows=...):`.

    Attributes:
      figures: The figures of the last or the running fit or loop, as in
        `run_report.json`.

    Args:
      directory: The directory for `run_report.json`, created if needed. None
        for the directory of the `ks.callbacks.Checkpoint` of the same fit;
        without one, no file is written.
      verbose: Whether the chief prints the report at the end of `fit`.

    Raises:
      TypeError: if `directory` is not a path.
      RuntimeError: in `fit`, if no strategy distributes the model.
      ReportError: in `fit` or `begin`, if `run_report.json` is not a report.
      OSError: in `fit` or `begin`, if the directory cannot be created. If the
        report cannot be written, it warns, and training continues.

    Example:
      ```python
      report = ks.callbacks.RunReport("run")
      model.fit(x, y, epochs=3, callbacks=[report])
      print(report.figures["step_ms"]["median"])
      ```

      A loop without `fit`:

      ```python
      batches = strategy.experimental_distribute_dataset(dataset)
      with ks.callbacks.RunReport("loop") as report:
          for batch in batches:
              with report.step(rows=64):
                  strategy.run(train_step, args=batch)
      ```

    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        verbose: bool = True,
    ) -> None:
        super().__init__()
        path = None if directory is None else os.fspath(directory)
        self._directory, self._verbose = path, verbose
        self._stack = contextlib.ExitStack()
        self._recorder: StepRecorder | None = None
        # Reading `self.model` during a step makes Keras write the step's
        # arrays to all variables.
        self._fitted: keras.Model | None = None
        self._step = GlobalStep()
        self._report_directory: str | None = None
        # The report before this start, and with it.
        self._earlier: files.Document | None = None
        self._document: files.Document | None = None
        self._peak: float | None = None
        self._is_chief, self.is_done = True, False
        self.figures: dict[str, Any] = dict(files.EMPTY)
        self._write_at = 0.0

    # Called by Keras in fit.

    def set_model(self, model: keras.Model) -> None:
        """Sets the model; called by Keras."""
        super().set_model(model)
        self._fitted = model

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Starts to record; reads an earlier report."""
        model = self._fitted
        assert model is not None
        binding = self._step.follow(model, "RunReport")
        self._start(is_chief=binding.is_chief, model=model)
        self._peak = find_peak(binding.owner.mesh)

    def _start(
        self, *, is_chief: bool, model: keras.Model | None = None
    ) -> None:
        """Starts to record; reads an earlier report."""
        self.close()
        self._fitted, self._is_chief = model, is_chief
        self._earlier = self._document = self._peak = None
        loop = None if model is None else find_fit_state(model)
        directory = None if loop is None else loop.directory
        if self._directory is not None:
            directory = self._directory
        self._report_directory = directory if is_chief else None
        if self._report_directory is not None:
            os.makedirs(self._report_directory, exist_ok=True)
            if os.path.exists(os.path.join(self._report_directory, files.NAME)):
                self._earlier = files.load_report(self._report_directory)
        has_tokens = model is not None and embeds_tokens(model)
        self._recorder = recorder = StepRecorder(has_tokens=has_tokens)
        self._write_at, self.is_done = 0.0, False
        self.figures = dict(files.EMPTY)
        self._stack.enter_context(recorder.listening())
        runner = watchdog.get_runner()
        if runner is not None:
            runner.measure_steps = recorder.measure_local

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Determines, in the first epoch, the step that the fit starts at."""
        if self._document is None:
            # All callbacks have restored their state by now.
            self._step.settle(self._fitted)
            self._add_start(self._step.value)

    def _add_start(self, step: int) -> None:
        self._document = files.add_start(self._earlier, time.time(), step)
        if self._report_directory is not None and self._recorder is not None:
            self._write()
            self._recorder.note_steps = self._write_if_due

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Adds the figures to the epoch's logs."""
        recorder = self._recorder
        if recorder is None:
            return
        # Keras has fetched the epoch's logs, so all steps have ended.
        recorder.wait()
        if self._peak is not None:
            # The logs contain the MFU only for known chips.
            self._count_flops()
        if isinstance(logs, dict):
            self.add_logs(logs)
        self._write_if_due()

    def add_logs(self, logs: dict[str, Any]) -> None:
        """Adds the time of a step, speeds and the share of input to logs."""
        recorder = self._recorder
        if recorder is not None:
            now = time.perf_counter()
            logs |= pick_logs(compute_speed(recorder, now, self._peak))

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Notes that the training has ended; `close` writes the report."""
        self.is_done = True

    # Loops other than fit.

    def begin(self, step: int = 0) -> None:
        """Begins to record a training loop. Not collective.

        Call it in each process, in the thread of the loop. `with report:` calls
        `begin`, and, unless the block raises an error, `finish` at its end.

        Args:
          step: The number of steps that were trained before, such as the step
            of a restored checkpoint.
        """
        check_number("`step`", step, "Pass a number of steps.", minimum=0)
        self._start(is_chief=jax.process_index() == 0)
        self._add_start(step)

    @contextlib.contextmanager
    def step(self, *, rows: int = 0, tokens: int = 0) -> Iterator[None]:
        """Marks a step of a training loop, from the batch to its programs.

        Read the batch before the block, from a distributed dataset: the report
        counts this reading as input. It counts all other Python code of the
        loop as Python.

        Args:
          rows: The number of rows of the batch, over all processes, if you
            want rows per second.
          tokens: The number of tokens of the batch, over all processes.

        Raises:
          RuntimeError: if the object is not recording.
        """
        if self._recorder is None:
            raise RuntimeError(
                "`RunReport.step` must be called between `begin` and `finish`. "
                "Write `with report:` around the loop."
            )
        self._recorder.begin_step(rows, tokens)
        yield
        self._recorder.end_step()

    def finish(self) -> dict[str, Any]:
        """Ends the recording of a loop; writes and prints the report.

        Not collective. It waits for this process's last step.

        Returns:
          The figures.
        """
        if self._recorder is not None:
            self._recorder.wait()
            self.is_done = True
            self.close()
        return self.figures

    def __enter__(self) -> "RunReport":
        self.begin()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.finish()
        self.close()

    def close(self) -> None:
        """Stops recording, and writes and prints the report.

        Called when `fit` ends, also after an error, which `is_done` tells.
        """
        recorder = self._recorder
        if recorder is None:
            return
        try:
            if self.is_done:
                self._count_flops()
            self._write()
        finally:
            self._stack.close()
            self._recorder = None
        runner = watchdog.get_runner()
        if runner is not None:
            # Later heartbeats repeat the last times, for a chief that ends
            # later.
            last = recorder.measure_local()
            runner.measure_steps = lambda: last
        document = self._document if self.is_done else None
        if document is not None and self._is_chief and self._verbose:
            files.print_reports(Console(highlight=False), {"run": document})

    # Implementation.

    def _count_flops(self) -> None:
        if self._fitted is not None and self._recorder is not None:
            with Phase(REPORT):
                count_flops(self._fitted, self._recorder)

    def _write_if_due(self) -> None:
        if time.monotonic() >= self._write_at:
            self._write()

    def _write(self) -> None:
        recorder, document = self._recorder, self._document
        if recorder is None or document is None:
            return
        figures = compute_figures(recorder, time.perf_counter(), self._peak)
        model = self._fitted
        figures["is_eager"] = model is not None and model.run_eagerly
        heartbeats = watchdog.get_heartbeats()
        if self._is_chief and heartbeats:
            figures |= compare_processes(heartbeats)
        figures["advice"] = write_advice(figures)
        self.figures = figures
        self._write_at = time.monotonic() + _WRITE_S
        last_step = document["starts"][-1]["first_step"] + recorder.launched
        self._document = files.update_start(
            document, last_step, figures, is_done=self.is_done
        )
        if self._report_directory is not None:
            files.save_report(self._report_directory, self._document)
