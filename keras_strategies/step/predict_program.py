"""The compiled programs of predict steps.

If the replicas cannot share a batch evenly, the step also runs on the padding,
which does not affect the prediction of any row; the padding is cut off on the
host. If an output does not have exactly one entry for each row, the step runs
once over the global batch, because only then is the order of the entries known.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from keras_strategies._types import Groups, Tree
from keras_strategies.spmd.batches import Segment, cut_padding
from keras_strategies.spmd.dispatch import dispatch
from keras_strategies.step.model_program import ModelProgram


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
            host, axis = np.asarray(output), int(segment.steps > 1)
            if is_padded:
                host = cut_padding(host, segment.shape)
            return host.reshape(-1, *host.shape[axis + 1 :])

        return jax.tree.map(cut, outputs)


def _same(value: Tree) -> Tree:
    return value
