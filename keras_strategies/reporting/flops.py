"""The operations of a model, and the share of the chips' peak that they are."""

import contextlib
from typing import Any

import keras

from keras_strategies.keras_bridge.model_flops import count_model_flops
from keras_strategies.reporting.recorder import StepRecorder
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.tpu.chips import find_chip

_MAX_SHAPES = 8


class FlopsCounter:
    """Counts the operations of a model's steps, once for each shape.

    Args:
      model: The model.
      mesh: The mesh of its replicas.
    """

    def __init__(self, model: keras.Model, mesh: ReplicaMesh) -> None:
        self._model = model
        chip = find_chip(mesh.devices[0])
        self.peak = None if chip is None else chip.flops * len(mesh.devices)
        self._flops: dict[Any, float | None] = {}

    def count(self, recorder: StepRecorder) -> None:
        """Counts the operations for shapes that are new. Traces the model."""
        for key, shape in list(recorder.shapes.items())[:_MAX_SHAPES]:
            if key not in self._flops:
                self._flops[key] = None
                # A model that cannot be traced has no operations to report.
                with contextlib.suppress(Exception):
                    self._flops[key] = count_model_flops(self._model, shape.x)

    def compute(self, recorder: StepRecorder) -> dict[str, float]:
        """Returns the operations per second and the MFU, if they are known."""
        steps = total = 0.0
        for key, shape in recorder.shapes.items():
            flops = self._flops.get(key)
            if flops is None:
                return {}
            steps += shape.steps
            total += shape.steps * flops
        if not total or recorder.window_seconds <= 0:
            return {}
        rate = recorder.steps / recorder.window_seconds * total / steps
        found = {"flops_per_sec": rate}
        if self.peak is not None:
            found["mfu"] = rate / self.peak
        return found
