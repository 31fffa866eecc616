"""Captures a script's first training step before the step runs.

While the script runs, its strategies use a slice's devices and its models'
variables have shapes but no values. The first `fit` or `run` ends the script.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax

from keras_strategies.planning.capture.captured_data import (
    EARLY_CALLS,
    CapturedData,
    read_first_batch,
    run_early_call,
    times_rows,
    values_on_read,
)
from keras_strategies.planning.capture.errors import PlanError, StepCaptured
from keras_strategies.planning.capture.library_patches import LibraryPatches
from keras_strategies.planning.compile.candidates import (
    make_mesh,
    omit_default_shards,
)
from keras_strategies.planning.compile.fit_step import FitStep
from keras_strategies.planning.compile.layouts import Layout, parse_layout
from keras_strategies.planning.compile.run_step import RunStep
from keras_strategies.planning.compile.step import Step
from keras_strategies.planning.seam import (
    Binding,
    Call,
    InputContext,
    ReplicaMesh,
    Runner,
    Strategy,
    abstract,
    all_variables,
    dry_run,
    get_default_context,
    get_default_strategy,
    make_dataset_source,
    replica_meshes,
    split_validation,
    transformer_layout,
)


class Capture:
    """Runs a script's strategies on a slice, and captures a training step.

    Args:
      devices: The devices of the slice.
      layout: How models are sharded. None for what the script's code requests.
      is_per_replica: Whether each of the script's batches is for one replica.
        Otherwise they are global batches.
      plan: A function of the step and the layout's name. It is called in place
        of the script's `fit` or `run`, inside contexts such as
        `jax.default_matmul_precision` that the script has entered.

    Attributes:
      step: The step that was captured, or None.
      layout: The name of the layout that the strategies use.
      done: Is set when the captured step was planned.
    """

    def __init__(
        self,
        devices: Sequence[jax.Device],
        layout: Layout | None,
        *,
        is_per_replica: bool = False,
        plan: Callable[[Step, str], object] = lambda step, layout: None,
    ) -> None:
        self.step: Step | None = None
        self._plan = plan
        self.layout, self._patches = "replicated", LibraryPatches()
        self.devices, self._layout = devices, layout
        # The meshes of strategies without and with a device assignment.
        self._slice = make_mesh(devices, Layout())
        self._assigned: ReplicaMesh | None = None
        self._is_per_replica = is_per_replica
        self._host = ReplicaMesh(devices=jax.devices("cpu")[:1])
        self._lock, self.done = threading.Lock(), threading.Event()

    @contextlib.contextmanager
    def install(self) -> Iterator[None]:
        """Makes strategies use the slice, and captures the first step."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(values_on_read())
            stack.enter_context(self._patches.install())
            stack.enter_context(dry_run.running(self))
            # The default strategy of a dry run does not run functions.
            for function in (get_default_strategy, get_default_context):
                function.cache_clear()
                stack.callback(function.cache_clear)
            yield

    # The questions of strategies, bindings and runners.

    def make_mesh(self, assignment: Any, partitioner: Any) -> ReplicaMesh:
        """Returns a strategy's mesh, for its device assignment or None."""
        if assignment is None:
            return self._slice
        if self._layout is not None:
            partitioner = self._layout.partitioner
        self._assigned = replica_meshes.make_assigned_mesh(
            assignment, partitioner, is_abstract=True
        )
        return self._assigned

    def lay_out(
        self,
        mesh: ReplicaMesh,
        layout_map: Mapping[str, Any] | None,
        partitioner: Any,
    ) -> tuple[ReplicaMesh, Mapping[str, Any] | None, Any]:
        """Returns the mesh, layout map and partitioner that a strategy uses.

        Strategies over other devices are not changed.
        """
        # A strategy may have made a copy of the mesh.
        is_slice, is_assigned = (
            known is not None and mesh.devices is known.devices
            for known in (self._slice, self._assigned)
        )
        if not is_slice and not is_assigned:
            return mesh, layout_map, partitioner
        layout = self._layout
        if layout is None:
            layout = parse_layout(partitioner or "replicated")
            if is_slice:
                layout = omit_default_shards(layout, self.devices)
        elif layout.cores == 1 and (is_assigned or layout_map):
            raise PlanError(
                "The layout must have a model axis if the script passes a "
                "`device_assignment` or a `layout_map`. Received: the layout "
                f"'{layout}'. Omit --layout, or pass one with 'model:N'."
            )
        else:
            # See `_catch_fit`.
            layout_map = None
        self.layout = str(layout)
        if not is_assigned or layout.cores > 1:
            mesh = make_mesh(self.devices, layout)
        return mesh, layout_map, layout.partitioner

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context for strategies' scopes: variables get no values."""
        self._patches.patch_hub()
        return abstract()

    # Data.

    def _find_factor(self, strategy: Strategy) -> int:
        return strategy.num_replicas_in_sync if self._is_per_replica else 1

    def distribute(
        self, strategy: Strategy, data: Any, *, is_function: bool = False
    ) -> CapturedData:
        """Distributes a dataset, or the one that a function returns."""
        factor = self._find_factor(strategy)
        if is_function:
            factor = strategy.num_replicas_in_sync
            data = data(InputContext(num_replicas_in_sync=factor))
        source = make_dataset_source(data, self._host)
        return CapturedData(source, self._host, strategy.mesh, factor)

    # Steps.

    def bind(self, binding: Binding) -> "_Calls":
        """Returns an object that has `_fit` etc. in place of a binding."""
        return _Calls(self, binding)

    def call(
        self,
        binding: Binding,
        name: str,
        *args: object,
        **kwargs: object,
    ) -> Any:
        """Catches a call of `fit`, or runs one of `EARLY_CALLS`."""
        if self.step is not None:
            # The script continued after the capture, in `except` or `finally`.
            raise StepCaptured
        call = Call(binding.model, name, args, kwargs)
        if name not in EARLY_CALLS:
            self._catch_fit(binding, call)
        return run_early_call(binding, call, self._host)

    def _catch_fit(self, binding: Binding, call: Call) -> NoReturn:
        strategy, model = binding.owner, binding.model
        self._check_devices(strategy.mesh)
        steps = model.steps_per_execution
        if call.name == "fit":
            split_validation(call)
            batch, number = read_first_batch(call, self._host)
            if not isinstance(call["x"], CapturedData):
                batch = times_rows(batch, self._find_factor(strategy))
            # An epoch with fewer steps runs in one shorter execution.
            steps = min(steps, number or steps)
        else:
            given = (call["x"], call["y"], call["sample_weight"])
            batch, steps = times_rows(given, self._find_factor(strategy)), 1
        if not jax.tree.leaves(batch):
            raise PlanError("`fit` needs data. Pass `x`.")
        step = FitStep(model, strategy, batch, steps)
        if self._layout is not None and self._layout.cores > 1:
            # The map is computed from the built model, which is placed again.
            layout_map = transformer_layout(model, self._layout.cores)
            placements = strategy._runtime.distribution.placements
            placements.replace_layout_map(layout_map, all_variables(model))
            step = FitStep(model, strategy, batch, steps)
        self._catch(step)

    def _catch(self, step: Step) -> NoReturn:
        """Plans a step and ends the script."""
        with self._lock:
            if self.step is not None:
                # Another thread of the script has already captured its step.
                raise StepCaptured
            self.step = step
        try:
            self._plan(step, self.layout)
        finally:
            self.done.set()
        raise StepCaptured

    def run(
        self,
        runner: Runner,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> NoReturn:
        """Catches a call of a strategy's `run`."""
        if self.step is not None:
            raise StepCaptured
        self._check_devices(runner._mesh)
        if self._layout is not None and self._layout.cores > 1:
            raise PlanError(
                "A layout with 'model' can only be planned for models that "
                "`fit` trains. This script has a custom training loop. Use a "
                "layout without 'model'."
            )
        self._catch(RunStep(runner, fn, args, kwargs))

    def _check_devices(self, mesh: ReplicaMesh) -> None:
        if not set(mesh.devices) <= set(self.devices):
            raise PlanError(
                "A planned step must use one of the strategies "
                "MirroredStrategy, MultiWorkerMirroredStrategy, TPUStrategy, "
                "OneDeviceStrategy. This step uses another one (such as the "
                "default strategy or `TPUStrategy.for_topology`), on "
                f"{len(mesh.devices)} x {mesh.devices[0].device_kind!r}. Train "
                "in the scope of one of the listed strategies."
            )


class _Calls:
    """Passes the calls of a model's methods, such as `fit`, to a capture."""

    def __init__(self, capture: Capture, binding: Binding) -> None:
        self._call = functools.partial(capture.call, binding)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self._call, name.removeprefix("_"))
