"""Measures parts of a fit with a clock that the package does not know."""

import contextlib
import time

import keras

import keras_strategies as ks


class Stopwatch(keras.callbacks.Callback):
    """The seconds of named parts of a fit, and of the fit after its first step.

    Attributes:
      seconds: The seconds after the first step.
      parts: The seconds of each part, after the first step.
    """

    def __init__(self):
        super().__init__()
        self._began, self.seconds, self.parts = None, 0.0, {}

    def on_train_batch_end(self, batch, logs=None):
        if self._began is None:
            self._began = time.perf_counter()

    @contextlib.contextmanager
    def timing(self, part):
        since = time.perf_counter()
        yield
        if self._began is not None:
            since = max(since, self._began)
            spent = time.perf_counter() - since
            self.parts[part] = self.parts.get(part, 0.0) + spent

    def fit(self, model, x, y=None, *, callbacks=(), directory=None, **options):
        """Runs `fit` with a report, and returns the report's figures."""
        report = ks.callbacks.RunReport(directory, verbose=False)
        model.fit(
            x,
            y,
            verbose=0,
            callbacks=[self, *callbacks, report],
            **options,
        )
        self.seconds = time.perf_counter() - self._began
        return report.figures

    def share(self, part):
        return self.parts[part] / self.seconds
