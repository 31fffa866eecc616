"""The compiled programs of predict steps.

If the replicas cannot share a batch evenly, the step also runs on the padding,
which does not affect the prediction of any row; the padding is cut off on the
host. If an output does not have exactly one entry for each row, the step runs
once over the global batch, because only then is the order of the entries known.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from keras_strategies._types import Batch, Groups, Tree
from keras_strategies.hooks import merge as merge_lib
from keras_strategies.hooks import seeds
from keras_strategies.keras_bridge.step_context import Group, StepContext
from keras_strategies.spmd.batches import Segment
from keras_strategies.spmd.dispatch import dispatch
from keras_strategies.step.analysis import is_by_rows
from keras_strategies.step.model_program import ModelProgram
from keras_strategies.step.ragged_step import RaggedCall
from keras_strategies.step.state.layout import Step


class PredictProgram(ModelProgram):
    """The programs of a model's predict step, which return outputs.

    The state consists of the trainable and the non-trainable variables. The
    model's step returns only the non-trainable ones.
    """

    _returns_rows = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Each process returns the rows of all processes.
        self._gather = jax.jit(_same, out_shardings=self._mesh.whole)

    def __call__(
        self, state: Groups, segment: Segment
    ) -> Iterator[tuple[Any, Groups]]:
        """Predicts stacked batches; yields (outputs, new state) once."""
        outputs, state = self._run(state, segment)
        yield self._cut_rows(outputs, segment), state

    def _cut_rows(self, outputs: Tree, segment: Segment) -> Tree:
        is_mapped = self._router.global_reason is None
        is_padded = is_mapped and segment.is_padded
        if is_mapped and self._mesh.num_processes > 1:
            (outputs,) = dispatch(self._mesh, self._gather, (outputs,))
        if segment.steps == 1 and not is_padded:
            return outputs

        def cut(output: jax.Array) -> np.ndarray:
            host = np.asarray(output)
            if segment.steps == 1:
                host = host[None]
            if is_padded:
                host = segment.shape.without_padding(host, 1)
            return host.reshape(-1, *host.shape[2:])

        return jax.tree.map(cut, outputs)

    def _merge_replicas(
        self, step: StepContext, written: Group, read: Group, data: Batch
    ) -> tuple[Any, ...]:
        trainable, old = read
        folded = seeds.fold_seeds(self._variables[1], old, step)
        outputs, (_, new) = self._model_call.on_replica(
            step, (trainable, folded), data
        )
        plans = merge_lib.plan_group(step, self._variables[1], old, folded, new)
        (merged,), _ = merge_lib.combine(step, [plans])
        return outputs, *self._select_changes(read, (trainable, merged))

    def _on_rows(
        self, step: StepContext, state: Sequence[Group], data: Batch
    ) -> tuple[Any, Any]:
        outputs, new = self._model_call.on_replica(step, state, data)
        if not is_by_rows(outputs, step.facts.rows):
            raise RuntimeError(
                "A predict step that uses its replica context must return one "
                "entry for each row. Received: outputs of shapes "
                f"{jax.tree.map(np.shape, outputs)} for {step.facts.rows} "
                "rows. Return an entry for each row, or use batch sizes that "
                "are divisible by the number of replicas."
            )
        return outputs, new

    def _ragged_results(self, called: RaggedCall) -> Tree:
        return jax.tree.unflatten(called.structure, called.outputs)

    def _scan_steps(self, body: Step) -> Step:
        """Turns a step into a loop over batches that returns all outputs."""

        def many(written: Group, read: Group, data: Batch) -> tuple[Any, ...]:
            keys: list[str] = []
            trainable, others = read

            def one(carry: list[Any], batch: Batch) -> tuple[Any, ...]:
                read = [trainable, carry]
                outputs, _, (_, changed) = body(written, read, batch)
                keys[:] = list(changed)
                return merge_lib.apply_changes(carry, changed), outputs

            carry, outputs = jax.lax.scan(one, list(others), data)
            return outputs, [], [{}, {k: carry[int(k)] for k in keys}]

        return many


def _same(value: Tree) -> Tree:
    return value
