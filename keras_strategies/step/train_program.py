"""The compiled programs of train and test steps."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from keras_strategies._types import Groups
from keras_strategies.spmd.batches import Segment, unstack_steps
from keras_strategies.spmd.dispatch import dispatch
from keras_strategies.step.model_program import ModelProgram
from keras_strategies.step.record import TraceKind
from keras_strategies.step.route import Form, Route
from keras_strategies.step.state.layout import OPTIMIZER, PLAIN, Layout


class StepProgram(ModelProgram):
    """The programs of a model's train or test step, which return logs.

    Args:
      *args: See `ModelProgram`.
      layout: The layout of the state in mapped programs.
      **options: See `ModelProgram`.
    """

    def __init__(
        self, *args: Any, layout: Layout = PLAIN, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._layout, self._is_layout_known = layout, layout is PLAIN
        self._is_packed = True
        self._router.kind = TraceKind(sums_later=bool(layout.local_sums))
        sizes = [len(self._variables[i]) for i in self._written]
        # The weights and the other variables come before the optimizer's.
        places = [sum(sizes[:OPTIMIZER]) + i for i in layout.local_sums]
        self._router.summands = places, sum(sizes)
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

    def _start(
        self, call: Callable[..., Any], state: Groups, segment: Segment
    ) -> Any:
        if not self._is_layout_known:
            self._find_layout(state, segment)
        return super()._start(call, state, segment)

    def _find_layout(self, state: Groups, segment: Segment) -> None:
        """Traces a mapped program, to find whether it keeps the layout."""
        route = self.find_route(segment)
        if route.is_mapped:
            args = self._arguments(route, state, segment)
            self._programs[route.form].trace(*args)
            self._is_packed = self._layout.is_kept
            self._is_layout_known = True

    def _arguments(
        self, route: Route, state: Groups, segment: Segment
    ) -> tuple[Any, ...]:
        is_packed = route.is_mapped and self._mapped_layout is not PLAIN
        self._layout.convert(state, is_packed=is_packed)
        return super()._arguments(route, state, segment)

    @property
    def _mapped_layout(self) -> Layout:
        """The layout of mapped programs."""
        has_sums = bool(self._layout.local_sums)
        is_used = self._is_packed and has_sums == self._router.kind.sums_later
        return self._layout if is_used else PLAIN
