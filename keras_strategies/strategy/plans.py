"""`Strategy.plan`: the memory and time of training a model elsewhere."""

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_strategies._types import Batch
from keras_strategies.names import lazy_names
from keras_strategies.strategy import current


class PlanMixin:
    """The method of `Strategy` that plans training on absent hardware.

    `planning` is above this room. `keras_strategies/__init__.py` enters its
    function in `names/lazy_names.py`.
    """

    def plan(
        self,
        model: Callable[[], keras.Model],
        batch: Batch,
        topologies: str | Sequence[str] | None = None,
        strategies: Any = None,
        *,
        scale: str = "replica",
        effort: str = "auto",
        progress: bool = True,
    ) -> Any:
        """Estimates the memory and time of train steps on TPUs and GPUs.

        A candidate is a TPU slice, or several GPUs, together with a layout of
        the model on it. For each candidate, the train step is compiled from
        shapes alone, with the compiler for these devices but without them.
        Models have no values during the
        plan (see `ks.abstract`), so even the largest model can be planned on a
        machine that could not store it. Not in tf.

        Bytes and collectives are reported by the compiler. For TPUs, compiling
        at low effort is several times as fast; the reported memory is then
        between a third less and a quarter more than at full effort, which
        training uses. A candidate near the memory limit is also compiled at
        full effort. Times are estimates.

        Args:
          model: A function that makes and compiles the model, called in the
            scope of each candidate's strategy.
          batch: `(x, y)` or `(x, y, sample_weight)`, of arrays or of
            `jax.ShapeDtypeStruct`: a global batch of this strategy.
          topologies: The names of TPU slices, such as "v5e:16x16", or of GPUs,
            such as "h100:8" (one host) or "h100:8x8" (hosts and GPUs of each).
            None for the devices of this strategy.
          strategies: The layouts to compare: names such as "replicated",
            "slots" (only optimizer slots are sharded), "sharded:64" (in groups
            of 64 replicas), "model:4" (with `transformer_layout` over 4 cores)
            or "sharded+model:4"; or partitioners. None for the
            `variable_partitioner` of this strategy and several common layouts.
          scale: "replica" if each replica of a candidate gets the same number
            of rows as a replica of this strategy; "global" if `batch` is the
            global batch of every candidate.
          effort: The compiler's effort: "auto", "low" or "full".
          progress: Whether to write a line for each planned candidate, if
            stderr is a terminal.

        Returns:
          The plan, a `ks.Plan`. It prints as a table, and has `to_json` and
          `to_html`.

        Raises:
          ValueError: if a topology or a layout is unknown, or the batch has no
            rows.
          TypeError: if a leaf of `batch` has no shape and dtype.
          ImportError: if TPU slices are named and libtpu is not installed, or
            GPUs are named and JAX's CUDA plugin is not installed, or not
            loaded because JAX found no CUDA.
          Exception: if the function that makes the model raises one.

        Example:
          ```python
          print(strategy.plan(make_model, (x, y)))
          ```

        References:
          https://github.com/AI-Hypercomputer/maxtext (train_compile, which
          compiles ahead of time for a slice by its name)
        """
        current.check_outside("plan")
        return lazy_names.call(
            "plan",
            self,
            model,
            batch,
            topologies,
            strategies,
            scale=scale,
            effort=effort,
            progress=progress,
        )
