"""`Strategy.plan`: whether, how and how fast a model trains on slices."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import keras

from keras_strategies._types import Batch
from keras_strategies.strategy import current

if TYPE_CHECKING:
    from keras_strategies.planning.report.table import Plan


class PlanMixin:
    """The method of `Strategy` that plans for absent devices.

    The one door from `strategy` into `planning`, which is imported when the
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
        """Says what training steps need on slices, and how long they take.

        For each candidate, a slice and a layout of the model on it, the train
        step is compiled for shapes, by the slice's own compiler and without
        one of its chips. Models have no values meanwhile (`ks.abstract`), so
        that a machine without memory for them plans the largest. Not in tf.

        Bytes and collectives are the compiler's. At low effort, which is
        several times as fast, programs need a tenth more to a third less than
        as they are run; near the limit, and a candidate without others, they
        are compiled as they are run, too. Of models of many equal blocks two
        short ones are compiled, and extrapolated. Times are estimates.

        Args:
          model: A function that makes and compiles the model, called in the
            scope of each candidate's strategy. Or a compiled model, of which
            one is made by its config; it is only looked at.
          batch: `(x, y)` or `(x, y, sample_weight)`, of arrays or of
            `jax.ShapeDtypeStruct`, of a global batch on this strategy.
          topologies: Names of TPU slices, as "v5e:16x16". None: this
            strategy's own devices.
          strategies: Layouts, as "replicated", "slots", "sharded:64" (of
            groups of 64), "model:4" (by `transformer_layout`) or
            "sharded+model:4"; or partitioners. None: several.
          scale: "replica": each replica of a slice gets as many rows as one
            of this strategy; "global": the batch is the slice's global batch.
          effort: "auto", "low" or "full": whether programs are compiled as
            they are run.
          verify: Whether the most rows that fit are found by compiling, at
            full effort, until one row more on each replica does not fit.
          whole: Whether deep models are compiled as they are.
          cache: Whether figures are kept for the next plan, in the user's
            cache folder (`XDG_CACHE_HOME`).
          progress: Whether the table is shown while it is filled, if the
            error output is a terminal.

        Returns:
          The plan: prints as a table; with `to_json` and `to_html`.

        Raises:
          ValueError: no such slice or layout; a batch without rows.
          TypeError: something without shape and dtype in `batch`.
          ImportError: slices by name, and libtpu is not installed.
          Exception: what the function raises that makes the model.

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
