"""Captures a script's first training step before the step runs.

While the script runs, its strategies use a slice's devices and its models'
variables have shapes but no values. The first `fit` or `run` ends the script.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import keras

from keras_strategies._types import Array, Dataset, Tree
from keras_strategies.cluster.resolvers.simple_resolver import (
    SimpleClusterResolver,
)
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.data.sources.from_function import InputContext
from keras_strategies.fit.binding import Binding
from keras_strategies.fit.inputs import feed as feed_lib
from keras_strategies.fit.inputs.choose_source import (
    make_dataset_source,
)
from keras_strategies.fit.inputs.loop_data import split_validation
from keras_strategies.fit.loop_call import Call
from keras_strategies.planning.capture import io_stubs
from keras_strategies.planning.capture.captured_data import (
    CapturedData,
    times_rows,
)
from keras_strategies.planning.capture.early_calls import (
    EARLY_CALLS,
    run_early_call,
    values_on_read,
)
from keras_strategies.planning.capture.errors import PlanError, StepCaptured
from keras_strategies.planning.capture.pretrained import Pretrained
from keras_strategies.planning.compile.candidates import make_mesh
from keras_strategies.planning.compile.fit_step import FitStep
from keras_strategies.planning.compile.layouts import Layout, parse_layout
from keras_strategies.planning.compile.run_step import RunStep
from keras_strategies.planning.compile.step import Step
from keras_strategies.spmd import values
from keras_strategies.spmd.attributes import temporary_attribute
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.step.lower_step import shape_of
from keras_strategies.strategy import reducing
from keras_strategies.strategy.mirrored import (
    MirroredStrategy,
    OneDeviceStrategy,
)
from keras_strategies.strategy.multi_worker import MultiWorkerMirroredStrategy
from keras_strategies.strategy.replica_context import ValueContext
from keras_strategies.strategy.runner import Runner
from keras_strategies.strategy.strategy import Strategy
from keras_strategies.strategy.tpu import TPUStrategy
from keras_strategies.tpu import experimental
from keras_strategies.tpu.replica_meshes import make_assigned_mesh
from keras_strategies.tpu.topology import Topology
from keras_strategies.variables.abstract_models import abstract

_CLASSES = (
    *(MirroredStrategy, MultiWorkerMirroredStrategy, TPUStrategy),
    OneDeviceStrategy,
)
_EX, _FROM = "experimental_", "distribute_datasets_from"
_DATA = ("x", "y", "sample_weight", "class_weight", "batch_size", "shuffle")
_Function = Callable[..., Any]


class Capture:
    """Runs a script's strategies on a slice, and captures a training step.

    Args:
      devices: The devices of the slice.
      layout: How models are sharded. None for what the script's code requests.
      layout_map: The sharding of variables within replicas of several cores.
      is_per_replica: Whether each of the script's batches is for one replica.
        Otherwise they are global batches.
      plan: A function of the step and the layout's name, or None. It is called
        in place of the script's `fit` or `run`, inside contexts such as
        `jax.default_matmul_precision` that the script has entered.

    Attributes:
      step: The step that was captured, or None.
      planned: The result of `plan`. None if it was not called or has failed.
      error: The error that `plan` raised, or None.
      model: The step's model, or None for the step of a custom loop.
      layout: The name of the layout that the strategies use.
      pretrained: Notes which weights the script did not load.
    """

    def __init__(
        self,
        devices: Sequence[jax.Device],
        layout: Layout | None,
        *,
        layout_map: Mapping[str, Any] | None = None,
        is_per_replica: bool = False,
        plan: Callable[[Step, str], Any] | None = None,
    ) -> None:
        self.step: Step | None = None
        self.planned: Any = None
        self.error: BaseException | None = None
        self._plan = plan
        self.model: keras.Model | None = None
        self.layout, self.pretrained = "replicated", Pretrained()
        self._devices, self._layout = devices, layout
        self._layout_map = layout_map
        self._is_per_replica = is_per_replica
        self._host = ReplicaMesh(devices=jax.devices("cpu")[:1])
        self._lock, self._done = threading.Lock(), threading.Event()

    def wait(self) -> None:
        """Waits until a step that another thread has captured is planned."""
        if self.step is not None:
            self._done.wait()

    @contextlib.contextmanager
    def install(self) -> Iterator[None]:
        """Makes strategies use the slice, and captures the first step."""
        patches: list[tuple[Any, str, Any]] = [
            (
                cls,
                "__init__",
                functools.partial(self._init_strategy, cls.__init__),
            )
            for cls in _CLASSES
        ]
        patches += [
            (Strategy, "scope", functools.partial(_open_scope, Strategy.scope)),
            (Strategy, "experimental_distribute_dataset", self._distribute),
            (
                Strategy,
                "distribute_datasets_from_function",
                self._distribute_from_function,
            ),
            (
                Strategy,
                "experimental_distribute_values_from_function",
                _make_value_shapes,
            ),
            (Strategy, "experimental_local_results", _list_local_results),
            (Binding, "_fit", self._fit),
            (Binding, "_train_on_batch", self._train_on_batch),
            *(
                (Binding, f"_{name}", functools.partial(self._run_early, name))
                for name in EARLY_CALLS
            ),
            (Runner, "__call__", self._run),
            (keras.Model, "make_train_function", _refuse_plain),
            (jax.distributed, "initialize", lambda *args, **kwargs: None),
            (experimental, "initialize_tpu_system", self._make_topology),
        ]
        patches += io_stubs.patches()
        with contextlib.ExitStack() as stack:
            stack.enter_context(values_on_read())
            stack.enter_context(self.pretrained.install())
            for owner, name, value in patches:
                if isinstance(owner, type) and callable(value):
                    value = _as_method(value)
                stack.enter_context(temporary_attribute(owner, name, value))
            yield

    # Strategies.

    def _init_strategy(
        self, original: _Function, strategy: Strategy, *args: Any, **kwargs: Any
    ) -> None:
        signature = inspect.signature(original)
        named = signature.bind(strategy, *args, **kwargs).arguments
        layout, layout_map = self._layout, self._layout_map
        assignment = named.get("device_assignment") or named.get(
            "experimental_device_assignment"
        )
        if layout is None:
            partitioner = named.get("variable_partitioner")
            layout_map = named.get("layout_map")
            layout = Layout()
            if partitioner is not None:
                layout = parse_layout(partitioner)
        elif layout.cores == 1 and (assignment or named.get("layout_map")):
            raise PlanError(
                "The layout must have a model axis if the script passes a "
                "`device_assignment` or a `layout_map`. Received: the layout "
                f"'{layout}'. Omit --layout, or pass one with 'model:N'."
            )
        partitioner = layout.variable_partitioner
        if assignment is not None and layout.cores == 1:
            mesh = make_assigned_mesh(assignment, partitioner, is_abstract=True)
        else:
            mesh = make_mesh(self._devices, layout)
        self.layout = str(layout)
        self._set_resolver(strategy, named)
        Strategy.__init__(
            strategy,
            mesh,
            layout_map=layout_map,
            variable_partitioner=partitioner,
        )

    def _set_resolver(self, strategy: Strategy, named: dict[str, Any]) -> None:
        """Sets a strategy's cluster resolver to the one that was passed."""
        if isinstance(strategy, MultiWorkerMirroredStrategy):
            alone = SimpleClusterResolver(ClusterSpec({}))
            given = named.get("cluster_resolver")
            strategy._cluster_resolver = given or alone
        strategy.__dict__["_resolver"] = named.get("tpu_cluster_resolver")

    def _make_topology(self, *args: object, **kwargs: object) -> Topology:
        return Topology.from_devices(self._devices)

    # Data.

    def _find_factor(self, strategy: Strategy) -> int:
        return strategy.num_replicas_in_sync if self._is_per_replica else 1

    def _distribute(
        self, strategy: Strategy, dataset: Dataset, options: object = None
    ) -> CapturedData:
        source = make_dataset_source(dataset, self._host)
        factor = self._find_factor(strategy)
        return CapturedData(source, self._host, strategy.mesh, factor)

    def _distribute_from_function(
        self, strategy: Strategy, dataset_fn: _Function, options: object = None
    ) -> CapturedData:
        replicas = strategy.num_replicas_in_sync
        context = InputContext(num_replicas_in_sync=replicas)
        source = make_dataset_source(dataset_fn(context), self._host)
        return CapturedData(source, self._host, strategy.mesh, replicas)

    def _read_shapes(
        self, binding: Binding, call: Call
    ) -> tuple[Any, int | None]:
        """Returns a batch's shapes, and steps per epoch (None if unknown)."""
        strategy = binding.owner
        split_validation(call)
        if isinstance(call["x"], CapturedData):
            data = call["x"]
            number = call["steps_per_epoch"] or data.source.num_batches
            return data.first_shapes(), number
        feed = feed_lib.make_feed(
            self._host,
            **{name: call[name] for name in _DATA},
            steps_per_epoch=call["steps_per_epoch"],
            steps_per_execution=1,
            name="fit",
        )
        batch = next(iter(feed.get_numpy_iterator()))
        number = call["steps_per_epoch"] or feed.num_batches
        return times_rows(batch, self._find_factor(strategy)), number

    # Steps.

    def _run_early(
        self, name: str, binding: Binding, *args: object, **kwargs: object
    ) -> Any:
        if self.step is not None:
            raise StepCaptured
        call = Call(binding.model, name, args, kwargs)
        return run_early_call(binding, call, self._host)

    def _fit(self, binding: Binding, *args: object, **kwargs: object) -> None:
        self._catch_fit(binding, Call(binding.model, "fit", args, kwargs))

    def _train_on_batch(
        self, binding: Binding, *args: object, **kwargs: object
    ) -> None:
        call = Call(binding.model, "train_on_batch", args, kwargs)
        self._catch_fit(binding, call)

    def _catch_fit(self, binding: Binding, call: Call) -> None:
        if self.step is not None:
            # The script continued after the capture, in `except` or `finally`.
            raise StepCaptured
        strategy, model = binding.owner, binding.model
        self._check_devices(strategy.mesh)
        steps = model.steps_per_execution
        if call.name == "fit":
            batch, number = self._read_shapes(binding, call)
            # An epoch with fewer steps runs in one shorter execution.
            steps = min(steps, number or steps)
        else:
            given = (call["x"], call["y"], call["sample_weight"])
            batch, steps = times_rows(given, self._find_factor(strategy)), 1

        if not jax.tree.leaves(batch):
            raise PlanError("`fit` needs data. Received: no data. Pass `x`.")
        step = FitStep(model, strategy, batch, steps)
        self._catch(step, model)

    def _catch(self, step: Step, model: keras.Model | None = None) -> NoReturn:
        """Plans a step and ends the script."""
        with self._lock:
            if self.step is not None:
                # Another thread of the script has already captured its step.
                raise StepCaptured
            self.step, self.model = step, model
        try:
            if self._plan is not None:
                self.planned = self._plan(step, self.layout)
        except BaseException as error:
            # The script could catch the error, so it is stored, not raised.
            self.error = error
        finally:
            self._done.set()
        raise StepCaptured

    def _run(
        self,
        runner: Runner,
        fn: _Function,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        is_update: bool = False,
    ) -> None:
        if self.step is not None:
            raise StepCaptured
        self._check_devices(runner._mesh)
        self._catch(RunStep(runner, fn, args, kwargs))

    def _check_devices(self, mesh: ReplicaMesh) -> None:
        if not set(mesh.devices) <= set(self._devices):
            raise PlanError(
                "A planned step must use one of the strategies "
                f"{', '.join(cls.__name__ for cls in _CLASSES)}. Received: a "
                "step of another strategy (such as the default strategy or "
                f"`TPUStrategy.for_topology`), on {len(mesh.devices)} x "
                f"{mesh.devices[0].device_kind!r}. Train in the scope of one "
                "of the listed strategies."
            )


class _AbstractScope:
    """A strategy's scope in which variables are created without values."""

    def __init__(self, scope: Any) -> None:
        self._scope = scope
        self._open: list[contextlib.ExitStack] = []

    def __enter__(self) -> Strategy:
        with contextlib.ExitStack() as stack:
            strategy = stack.enter_context(self._scope)
            stack.enter_context(abstract())
            self._open.append(stack.pop_all())
        return strategy

    def __exit__(self, *error: object) -> None:
        self._open.pop().close()


def _open_scope(original: _Function, strategy: Strategy) -> _AbstractScope:
    return _AbstractScope(original(strategy))


def _make_value_shapes(strategy: Strategy, value_fn: _Function) -> Tree:
    """Calls `value_fn` for one replica; returns the shapes for all replicas."""
    count, mesh = strategy.num_replicas_in_sync, strategy.mesh
    first = value_fn(ValueContext(0, count))

    def stand_in(leaf: Array) -> values.PerReplica:
        shape = shape_of(jax.numpy.asarray(leaf))
        stacked = jax.ShapeDtypeStruct(
            (count, *shape.shape), shape.dtype, sharding=mesh.split
        )
        return values.PerReplica.of(stacked, values.STACKED)

    return jax.tree.map(stand_in, first)


def _list_local_results(strategy: Strategy, value: Tree) -> Tree:
    """Returns each replica's values; for a batch, each replica's shapes."""
    return reducing.list_local_results(value, strategy.mesh)


def _refuse_plain(model: keras.Model, *args: object, **kwargs: object) -> None:
    raise PlanError(
        "A planned script must first train a strategy's model. Received: a "
        f"script that first trains {model.name!r}, which was not created or "
        "compiled in a strategy's scope. Create and compile it in the scope."
    )


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a callable in a function that can be set as a class's method."""

    @functools.wraps(function, assigned=("__name__", "__doc__"))
    def method(self: object, *args: object, **kwargs: object) -> object:
        return function(self, *args, **kwargs)

    return method
