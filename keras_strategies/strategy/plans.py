"""`Strategy.plan`: memory and speed of a model's training on slices."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import keras

from keras_strategies._types import Batch
from keras_strategies.strategy import current

if TYPE_CHECKING:
    from keras_strategies.planning.report.table import Plan


class PlanMixin:
    """The method of `Strategy` that plans for absent devices.

    This is the only import of `planning` in `strategy`; it happens when the
    method is called.
    """

    def plan(
        self,
        model: keras.Model | Callable[[], keras.Model],
        batch: Batch,
        topologies: str | Sequence[str] | None = None,
        strategies: Any = None,
        *,
        scale: str = "replica",
        effort: str = "auto",
        verify: bool = False,
        whole: bool = False,
        cache: bool = True,
        progress: bool = True,
    ) -> "Plan":
        """Plans training: the memory and time that steps need on slices.

        A candidate is a slice and a layout of the model on it. For each, the
        train step is compiled for shapes, by the slice's compiler but without
        its chips. Models have no values during the plan (`ks.abstract`), so a
        machine without memory for them can plan the largest. Not in tf.

        Bytes and collectives are from the compiler. At low effort, which is
        several times as fast, programs need a tenth more to a third less than
        at full effort, which is used for training. Near the limit, and if
        there is only one candidate, they are compiled at full effort, too. For
        models of many equal blocks two short models are compiled, and their
        figures are extrapolated. Times are estimates.

        Args:
          model: A function that makes and compiles the model, called in the
            scope of each candidate's strategy. Or a compiled model, which is
            cloned from its config and not changed.
          batch: `(x, y)` or `(x, y, sample_weight)`, of arrays or of
            `jax.ShapeDtypeStruct`: a global batch of this strategy.
          topologies: Names of TPU slices, such as "v5e:16x16". None: this
            strategy's devices.
          strategies: Layouts, such as "replicated", "slots", "sharded:64" (in
            groups of 64), "model:4" (by `transformer_layout`) or
            "sharded+model:4"; or partitioners. None: several.
          scale: "replica": each replica of a slice gets the rows of one of
            this strategy; "global": the batch is the slice's global batch.
          effort: The effort of compiling: "auto", "low" or "full".
          verify: Whether the most rows that fit are found by compiling, at
            full effort, until one more row on each replica does not fit.
          whole: Whether to compile all blocks of deep models.
          cache: Whether figures are kept for later plans, in the user's cache
            folder (`XDG_CACHE_HOME`).
          progress: Whether the table is shown as it fills, if stderr is a
            terminal.

        Returns:
          The plan, which prints as a table and has `to_json` and `to_html`.

        Raises:
          ValueError: if a slice or a layout is unknown, or the batch has no
            rows.
          TypeError: if a leaf of `batch` has no shape and dtype.
          ImportError: if slices are named and libtpu is not installed.
          Exception: if the function that makes the model raises it.

        Example:
          ```python
          print(strategy.plan(model, (x, y)))
          ```

        References:
          https://github.com/AI-Hypercomputer/maxtext (train_compile, which
          compiles ahead of time for a slice by its name)
        """
        from keras_strategies.planning.plan_api import make_plan

        current.check_outside("plan")
        return make_plan(
            cast("Any", self),
            model,
            batch,
            topologies,
            strategies,
            scale=scale,
            effort=effort,
            verify=verify,
            whole=whole,
            cache=cache,
            progress=progress,
        )
