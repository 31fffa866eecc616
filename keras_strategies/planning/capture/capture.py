"""The first training step of a script, caught before it runs.

While a script runs here its strategies are over a slice, their models have no
values, and the first `fit` or `run` ends the script instead.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import keras

from keras_strategies._core import values
from keras_strategies._core.attributes import attribute_set
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._types import Array, Dataset, Tree
from keras_strategies.cluster.resolvers.simple_resolver import (
    SimpleClusterResolver,
)
from keras_strategies.cluster.spec import ClusterSpec
from keras_strategies.data.sources.from_function import InputContext
from keras_strategies.keras_bridge.inputs import feed as feed_lib
from keras_strategies.keras_bridge.inputs.choose_source import source_of_dataset
from keras_strategies.keras_bridge.inputs.loop_data import hold_out
from keras_strategies.keras_bridge.loops.binding import Binding
from keras_strategies.keras_bridge.loops.loop_call import Call
from keras_strategies.keras_bridge.steps.lower_step import shape_of
from keras_strategies.keras_bridge.variables.abstract_models import abstract
from keras_strategies.planning.capture import io_stubs
from keras_strategies.planning.capture.captured_data import (
    CapturedData,
    times_rows,
)
from keras_strategies.planning.compile.candidates import mesh_of
from keras_strategies.planning.compile.fit_step import FitStep
from keras_strategies.planning.compile.layouts import Layout, layout_of
from keras_strategies.planning.compile.run_step import RunStep
from keras_strategies.planning.compile.step import Step
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
from keras_strategies.tpu.replica_meshes import mesh_of_assignments
from keras_strategies.tpu.topology import Topology

_CLASSES = (
    *(MirroredStrategy, MultiWorkerMirroredStrategy, TPUStrategy),
    OneDeviceStrategy,
)
_EX, _FROM = "experimental_", "distribute_datasets_from"
_DATA = ("x", "y", "sample_weight", "class_weight", "batch_size", "shuffle")
_Function = Callable[..., Any]


class StepCaptured(BaseException):
    """Ends a script whose first step was caught."""


class PlanError(Exception):
    """Why a script cannot be planned, in words for its author."""


class ScriptEnded(PlanError):
    """A script that ended itself before it trained."""


class Capture:
    """What a script's strategies are, and its first step.

    Args:
      devices: Those of the slice.
      layout: How models lie on them; None: as the script says.
      layout_map: For replicas of several cores.
      is_per_replica: Whether the script's batches are each replica's; else
        they are global.
      plan: Called with the step and its layout in words while the script is
        at it, so that contexts around its `fit` count (a precision of
        products, say); None: nothing is.

    Attributes:
      step: The step that was caught.
      planned: What `plan` returned; None: it was not called, or raised.
      error: What it raised.
      model: Its model; None for that of a loop of one's own.
      layout: How models lie on the devices, in words.
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
        self.layout = "replicated"
        self._devices, self._layout = devices, layout
        self._layout_map = layout_map
        self._is_per_replica = is_per_replica
        self._host = ReplicaMesh(devices=jax.devices("cpu")[:1])
        self._lock, self._done = threading.Lock(), threading.Event()

    def wait(self) -> None:
        """Waits for the plan of a step that a thread of the script took."""
        if self.step is not None:
            self._done.wait()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """In which strategies are the slice's, and the first step is caught."""
        patches: list[tuple[Any, str, Any]] = [
            (cls, "__init__", functools.partial(self._make, cls.__init__))
            for cls in _CLASSES
        ]
        patches += [
            (Strategy, "scope", functools.partial(_scope, Strategy.scope)),
            (Strategy, "experimental_distribute_dataset", self._distribute),
            (
                Strategy,
                "distribute_datasets_from_function",
                self._from_function,
            ),
            (Strategy, "experimental_distribute_values_from_function", _values),
            (Strategy, "experimental_local_results", _local_results),
            (Binding, "_fit", self._fit),
            (Binding, "_train_on_batch", self._train_on_batch),
            (Binding, "_evaluate", _refuser("evaluate")),
            (Binding, "_predict", _refuser("predict")),
            (Runner, "__call__", self._run),
            (keras.Model, "make_train_function", _refuse_plain),
            (jax.distributed, "initialize", lambda *args, **kwargs: None),
            (experimental, "initialize_tpu_system", self._topology),
        ]
        patches += io_stubs.patches()
        with contextlib.ExitStack() as stack:
            for owner, name, value in patches:
                if isinstance(owner, type) and callable(value):
                    value = _method(value)
                stack.enter_context(attribute_set(owner, name, value))
            yield

    # Strategies.

    def _make(
        self, original: _Function, strategy: Strategy, *args: Any, **kwargs: Any
    ) -> None:
        given = inspect.signature(original).bind(strategy, *args, **kwargs)
        named = given.arguments
        layout, layout_map = self._layout, self._layout_map
        assignment = named.get("device_assignment") or named.get(
            "experimental_device_assignment"
        )
        if layout is None:
            partitioner = named.get("variable_partitioner")
            layout_map = named.get("layout_map")
            layout = Layout()
            if partitioner is not None:
                layout = layout_of(partitioner)
        elif layout.cores == 1 and (assignment or named.get("layout_map")):
            raise PlanError(
                "A script with a `device_assignment` or a `layout_map` says "
                "what the cores of a replica divide. Received: the layout "
                f"'{layout}', which has none. Leave --layout out, or name one "
                "with 'model:N'."
            )
        partitioner = layout.variable_partitioner
        if assignment is not None and layout.cores == 1:
            mesh = mesh_of_assignments(
                assignment, partitioner, is_abstract=True
            )
        else:
            mesh = mesh_of(self._devices, layout)
        self.layout = str(layout)
        self._give_resolver(strategy, named)
        Strategy.__init__(
            strategy,
            mesh,
            layout_map=layout_map,
            variable_partitioner=partitioner,
        )

    def _give_resolver(self, strategy: Strategy, named: dict[str, Any]) -> None:
        """Gives a strategy the resolver that its script asks for."""
        if isinstance(strategy, MultiWorkerMirroredStrategy):
            alone = SimpleClusterResolver(ClusterSpec({}))
            given = named.get("cluster_resolver")
            strategy._cluster_resolver = given or alone
        strategy.__dict__["_resolver"] = named.get("tpu_cluster_resolver")

    def _topology(self, *args: object, **kwargs: object) -> Topology:
        return Topology.from_devices(self._devices)

    # Data.

    def _replicas(self, strategy: Strategy) -> int:
        return strategy.num_replicas_in_sync if self._is_per_replica else 1

    def _distribute(
        self, strategy: Strategy, dataset: Dataset, options: object = None
    ) -> CapturedData:
        source = source_of_dataset(dataset, self._host)
        factor = self._replicas(strategy)
        return CapturedData(source, self._host, strategy.mesh, factor)

    def _from_function(
        self, strategy: Strategy, dataset_fn: _Function, options: object = None
    ) -> CapturedData:
        replicas = strategy.num_replicas_in_sync
        context = InputContext(num_replicas_in_sync=replicas)
        source = source_of_dataset(dataset_fn(context), self._host)
        return CapturedData(source, self._host, strategy.mesh, replicas)

    def _batch(self, binding: Binding, call: Call) -> tuple[Any, int | None]:
        """The shapes of the first batch, of what `fit` was given, and how many
        batches an epoch has, if that is known."""
        strategy = binding.owner
        hold_out(call)
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
        return times_rows(batch, self._replicas(strategy)), number

    # Steps.

    def _fit(self, binding: Binding, *args: object, **kwargs: object) -> None:
        self._catch_fit(binding, Call(binding.model, "fit", args, kwargs))

    def _train_on_batch(
        self, binding: Binding, *args: object, **kwargs: object
    ) -> None:
        call = Call(binding.model, "train_on_batch", args, kwargs)
        self._catch_fit(binding, call)

    def _catch_fit(self, binding: Binding, call: Call) -> None:
        if self.step is not None:
            # The script has gone on, by an `except` or `finally` of its own.
            raise StepCaptured
        strategy, model = binding.owner, binding.model
        self._check_devices(strategy.mesh)
        steps = model.steps_per_execution
        if call.name == "fit":
            batch, number = self._batch(binding, call)
            # Those of an epoch's end are a program of their own.
            steps = min(steps, number or steps)
        else:
            given = (call["x"], call["y"], call["sample_weight"])
            batch, steps = times_rows(given, self._replicas(strategy)), 1

        if not jax.tree.leaves(batch):
            raise PlanError("`fit` was given no data.")
        step = FitStep(model, strategy, batch, steps)
        self._catch(step, model)

    def _catch(self, step: Step, model: keras.Model | None = None) -> NoReturn:
        """Plans a step, and ends the script."""
        with self._lock:
            if self.step is not None:
                # Another thread of the script was first.
                raise StepCaptured
            self.step, self.model = step, model
        try:
            if self._plan is not None:
                self.planned = self._plan(step, self.layout)
        except BaseException as error:
            # The script's own `except` is not to see it.
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
                "The strategies that are planned are "
                f"{', '.join(cls.__name__ for cls in _CLASSES)}, which become "
                "the slice's. Received: a step of another one, over "
                f"{len(mesh.devices)} of {mesh.devices[0].device_kind!r}, as "
                "of the default strategy or of `TPUStrategy.for_topology`. "
                "Train in the scope of one of them."
            )


class _AbstractScope:
    """A strategy's scope in which variables have no values."""

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


def _scope(original: _Function, strategy: Strategy) -> _AbstractScope:
    return _AbstractScope(original(strategy))


def _values(strategy: Strategy, value_fn: _Function) -> Tree:
    """One value for each replica, by the shapes of the first one's."""
    count, mesh = strategy.num_replicas_in_sync, strategy.mesh
    made = value_fn(ValueContext(0, count))

    def stand_in(leaf: Array) -> values.PerReplica:
        shape = shape_of(jax.numpy.asarray(leaf))
        stacked = jax.ShapeDtypeStruct(
            (count, *shape.shape), shape.dtype, sharding=mesh.split
        )
        return values.PerReplica.of(stacked, values.STACKED)

    return jax.tree.map(stand_in, made)


def _local_results(strategy: Strategy, value: Tree) -> Tree:
    """The components of all replicas, of batches their shapes."""
    return reducing.local_results(value, strategy.mesh)


def _refuser(name: str) -> Callable[..., None]:
    def refuse(binding: Binding, *args: object, **kwargs: object) -> None:
        raise PlanError(
            f"A plan is for training, up to the first `fit` or `run`. "
            f"Received: a script that calls `{name}` of "
            f"{binding.model.name!r} before. Leave it out for the plan, as "
            "under a flag of the script's."
        )

    return refuse


def _refuse_plain(model: keras.Model, *args: object, **kwargs: object) -> None:
    raise PlanError(
        "A plan is for models of a strategy. Received: a script that trains "
        f"{model.name!r}, which no strategy's scope has made or compiled, "
        "first. Make and compile it in the scope."
    )


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a class binds, also one that is bound already."""

    @functools.wraps(function, assigned=("__name__", "__doc__"))
    def method(self: object, *args: object, **kwargs: object) -> object:
        return function(self, *args, **kwargs)

    return method
