"""The compiled programs of train and test steps."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from keras_strategies._types import Groups
from keras_strategies.spmd.batches import Segment, unstack_steps
from keras_strategies.spmd.dispatch import dispatch
from keras_strategies.step.model_program import ModelProgram
from keras_strategies.step.route import Form


class StepProgram(ModelProgram):
    """The programs of a model's train or test step, which return logs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._unstack = jax.jit(
            unstack_steps, static_argnums=1, out_shardings=self._mesh.split
        )

    def __call__(
        self, state: Groups, segment: Segment
    ) -> Iterator[tuple[Any, Groups]]:
        """Runs the steps of stacked batches, in one program or in several.

        Yields:
          After each program, the logs of the program's last step, and the new
          state. The program has donated the earlier state, so the caller must
          store the new state immediately.
        """
        if segment.steps == 1 or self.find_route(segment).form is not Form.EVEN:
            yield self._run(state, segment)
            return
        batches = dispatch(
            self._mesh, self._unstack, segment.data, segment.steps
        )
        for data in batches:
            one = dataclasses.replace(segment, data=data, steps=1)
            logs, state = self._run(state, one)
            yield logs, state
