"""`Strategy.plan`: whether, how and how fast a model trains on slices."""

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies._core.compiled import without_jax_cache
from keras_strategies.keras_bridge.fresh_names import names_kept
from keras_strategies.strategy import current
from keras_strategies.strategy.runtime import Runtime

if TYPE_CHECKING:
    from keras_strategies.strategy.planning.plan import Plan, PlannedStep

_SCALES = ("replica", "global")
_EFFORTS = ("auto", "low", "full")


class Plans:
    """The methods of `Strategy` that plan for devices that are not there."""

    _runtime: Runtime
    _over: Callable[..., Any]

    def plan(
        self,
        model: keras.Model | Callable[[], keras.Model],
        batch: Any,
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
        from keras_strategies.strategy.planning import (
            compiling,
            fit_candidates,
            planner,
        )
        from keras_strategies.strategy.planning.plan import NOTES, Plan

        current.check_outside("plan")
        for name, value, values in (
            ("scale", scale, _SCALES),
            ("effort", effort, _EFFORTS),
        ):
            if value not in values:
                raise ValueError(
                    f"`{name}` is one of {', '.join(map(repr, values))}. "
                    f"Received: {name}={value!r}. Pass one of them."
                )
        mesh = self._runtime.mesh
        candidates = list(
            fit_candidates.candidates_of(
                mesh,
                fit_candidates.maker_of(model),
                fit_candidates.Batch(
                    batch, mesh.num_replicas, is_global=scale == "global"
                ),
                topologies,
                strategies,
                self._over,
            )
        )
        is_full = {"auto": None, "low": False, "full": True}[effort]
        thorough = planner.Effort(
            is_full=is_full,
            is_alone=len(candidates) == 1,
            is_verified=verify,
            is_whole=whole,
        )
        folder = compiling.cache_folder() if cache else None
        compiler = compiling.Compiler(folder=folder)
        done: list[PlannedStep] = []
        try:
            with (
                without_jax_cache(),
                _seeds_kept(),
                names_kept(),
                _shown(done, progress) as on_stage,
            ):
                for step in planner.planned(
                    candidates, compiler, thorough, on_stage
                ):
                    done.append(step)
        except fit_candidates.MakingFailed as failed:
            # The user's own error.
            raise failed.__cause__ or failed from None
        finally:
            compiler.close()
        return Plan(steps=tuple(done), notes=NOTES)


@contextlib.contextmanager
def _seeds_kept() -> Iterator[None]:
    """After which Keras draws the seeds that it would have drawn before.

    Of layers that are given none it draws them when models are made.
    """
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)


@contextlib.contextmanager
def _shown(
    done: "list[PlannedStep]", is_shown: bool
) -> Iterator[Callable[[Any, str], None]]:
    """Shows the table on the error output while it is filled."""
    if not is_shown or not sys.stderr.isatty():
        yield lambda candidate, stage: None
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.spinner import Spinner

    from keras_strategies.strategy.planning.plan import Plan

    with Live(console=Console(stderr=True), transient=True) as live:

        def on_stage(candidate: Any, stage: str) -> None:
            text = f"{candidate.topology} {candidate.layout}: {stage}"
            live.update(Group(Plan(steps=tuple(done)), Spinner("dots", text)))

        yield on_stage
