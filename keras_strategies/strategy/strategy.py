"""The behavior that all strategies share."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from keras_strategies._types import Batch
from keras_strategies.fit import binding as binding_lib
from keras_strategies.spmd import dispatch
from keras_strategies.spmd.compiled import CompiledProgram, compile_program
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.step.lower_step import lower_step
from keras_strategies.strategy import current
from keras_strategies.strategy.custom_loops import CustomLoops
from keras_strategies.strategy.extended import StrategyExtended
from keras_strategies.strategy.plans import PlanMixin
from keras_strategies.strategy.replica_context import ReplicaContext
from keras_strategies.strategy.runner import Runner
from keras_strategies.strategy.runtime import Runtime
from keras_strategies.strategy.scope import Scope
from keras_strategies.variables.abstract_models import materialize
from keras_strategies.variables.model_variables import all_variables
from keras_strategies.variables.partitioners import PartitionerLike
from keras_strategies.variables.variable_creator import check_home


class Strategy(CustomLoops, PlanMixin):
    """Distributes Keras models over devices; the base class of strategies.

    A model that is compiled in `scope()` trains, evaluates and predicts on
    every device, even after the scope has ended. Losses, metrics and weights
    equal those of the same training on one device with the same global batches.

    Args:
      mesh: The replicas, a `ks.ReplicaMesh`. Most users call a subclass such as
        `MirroredStrategy`, which makes the mesh.
      layout_map: How each replica shards variables over its cores; see
        `TPUStrategy`.
      variable_partitioner: Chooses which variables the replicas shard; see
        `MirroredStrategy`.
      outputs_on_chief: Whether `predict` returns rows only in process 0.

    Raises:
      TypeError: if `mesh` is not a `ReplicaMesh`.

    Example:
      ```python
      strategy = ks.Strategy(ks.ReplicaMesh(devices=jax.devices()[:2]))
      with strategy.scope():
          model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(1)])
          model.compile("adam", "mse")
      ```
    """

    def __init__(
        self,
        mesh: ReplicaMesh,
        *,
        layout_map: Mapping[str, Any] | None = None,
        variable_partitioner: PartitionerLike | None = None,
        outputs_on_chief: bool = False,
    ) -> None:
        if not isinstance(mesh, ReplicaMesh):
            raise TypeError(
                "`mesh` must be a `ks.ReplicaMesh`. Received: an object "
                f"of type {type(mesh).__name__}. Pass "
                "`ks.ReplicaMesh(devices=jax.devices())`, or use "
                "`ks.MirroredStrategy(devices)`."
            )
        if mesh.num_processes > 1:
            _watch_job()
        self._runtime = Runtime.over(
            mesh,
            layout_map=layout_map,
            variable_partitioner=variable_partitioner,
            outputs_on_chief=outputs_on_chief,
        )
        self._runner = Runner(self, self._runtime.mesh)
        self._extended = StrategyExtended(self._runtime, self._runner)

    @property
    def extended(self) -> StrategyExtended:
        """The methods intended for library authors, as in TensorFlow."""
        return self._extended

    @property
    def mesh(self) -> ReplicaMesh:
        """The mesh of the replicas; `mesh.mesh` is the underlying JAX mesh."""
        return self._runtime.mesh

    @property
    def cluster_resolver(self) -> object | None:
        """The resolver of the strategy's cluster; None on one machine."""
        return

    def scope(self) -> Scope:
        """Makes the strategy current in this thread while the block runs.

        In the block every Keras variable is created on the strategy's devices,
        and every model that is created or compiled is bound to the strategy. A
        model created in the block may also be compiled after the block. Scopes
        of one strategy may be nested, and a scope may be entered repeatedly.

        Returns:
          A context manager that yields the strategy.

        Raises:
          RuntimeError: on entering, if another strategy's scope is open or a
            function given to `run` is running.

        Example:
          ```python
          strategy = ks.MirroredStrategy()
          with strategy.scope():
              model = keras.Sequential([keras.layers.Dense(1)])
              model.compile("adam", "mse")
          model.fit(x, y, batch_size=256)
          ```
        """
        return Scope(self)

    def attach(self, model: keras.Model) -> keras.Model:
        """Binds a model to the strategy, as `compile` in `scope` does.

        Args:
          model: The model; it need not be built or compiled. Its variables are
            moved to the strategy's devices.

        Returns:
          The model.

        Raises:
          ValueError: if the model is bound to another strategy, or its
            variables are on that strategy's devices.
        """
        _check_model("attach", model)
        self._check_free(model)
        existing = binding_lib.find_binding(model)
        binding = existing or binding_lib.Binding(
            model,
            self,
            self._runtime,
            self._check_context,
            functools.partial(ReplicaContext, self),
        )
        binding.install()
        return model

    def detach(self, model: keras.Model) -> keras.Model:
        """Turns a bound model back into a plain Keras model on one device.

        If processes shard variables, all must call it, and get all values.

        Args:
          model: A model that is bound to this strategy.

        Returns:
          The model, with its weights, optimizer and metric state.

        Raises:
          ValueError: if the model is not bound to this strategy.
        """
        self._get_binding("detach", model).remove()
        return model

    def compile_step(
        self,
        model: keras.Model,
        batch: Batch,
        *,
        kind: str = "train",
        compiler_options: Mapping[str, Any] | None = None,
    ) -> CompiledProgram:
        """Compiles a step of a model, without running it.

        The program reports what one step of `fit`, `evaluate` or `predict`
        needs on each device, whatever `steps_per_execution` is. The devices
        need not be present (see `TPUStrategy.for_topology`). Not in tf.

        Args:
          model: A model of this strategy; it is built here if necessary.
          batch: A batch as a dataset would yield it: `x`, `(x, y)` or
            `(x, y, sample_weight)`, as nests of arrays or of
            `jax.ShapeDtypeStruct`, with all rows of the GLOBAL batch.
          kind: `"train"`, `"test"` or `"predict"`; `"predict"` uses only x.
          compiler_options: XLA options by name. With
            `{"exec_time_optimization_effort": -1.0}` a large program for TPUs
            compiles up to twelve times as fast and needs nearly the same
            memory, but its collectives do not overlap with computation.

        Returns:
          The compiled program, with its collectives, bytes per chip and text.

        Raises:
          ValueError: if the model is not bound to this strategy, `kind` is
            unknown, or arrays of `batch` have different numbers of rows.
          TypeError: if a leaf of `batch` has no shape and dtype.

        Example:
          ```python
          program = strategy.compile_step(model, (x, y), kind="test")
          print(program)
          ```
        """
        binding = self._get_binding("compile_step", model)
        mesh, build = self._runtime.mesh, binding.build_for_shapes
        arguments = model, mesh, kind, batch, build
        scope = binding.replica_scope
        return compile_program(
            lambda: lower_step(*arguments, replica_scope=scope),
            mesh,
            f"{kind} step",
            compiler_options,
        )

    def compile_run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> CompiledProgram:
        """Compiles the program of `run(fn, args, kwargs)`, without running it.

        Also creates the variables that a first call of `fn` creates. Not in tf.

        Args:
          fn: The function.
          args: Positional arguments: nests. An array or `jax.ShapeDtypeStruct`
            with at least one dimension stands for a distributed batch: it has
            all rows of the GLOBAL batch, a multiple of the number of replicas.
            Scalars, and arrays within `ks.Mirrored`, are replicated; other
            values are passed unchanged.
          kwargs: Keyword arguments, treated like `args`.
          compiler_options: See `compile_step`.

        Returns:
          The compiled program, with its collectives, bytes per chip and text.

        Raises:
          ValueError: if rows cannot be split evenly among the replicas.

        Example:
          ```python
          rows = jax.ShapeDtypeStruct((256, 32), "float32")
          print(strategy.compile_run(step, (rows,)))
          ```
        """
        current.check_outside("compile_run")
        runner, given = self._runner, (fn, args, kwargs or {})
        name = f"run of {getattr(fn, '__name__', 'a function')}"
        mesh = self._runtime.mesh
        return compile_program(
            lambda: runner.lower(*given)[0], mesh, name, compiler_options
        )

    def materialize(self, model: keras.Model) -> keras.Model:
        """Initializes a model that was created under `ks.abstract()`.

        Runs each variable's initializer; sharded variables are created directly
        as shards. Optimizer slots for the model's weights get their initial
        values, even if the optimizer belongs to a custom loop. A model that
        already has values is not changed. Collective. Not in tf.

        Args:
          model: A model of this strategy.

        Returns:
          The model.

        Raises:
          ValueError: if the model is not bound to this strategy.
          RuntimeError: if the strategy can only compile.

        Example:
          ```python
          with strategy.scope(), ks.abstract():
              model = make_model()
              model.compile("adam", "mse")
          if strategy.compile_step(model, (x, y)).bytes_per_chip < 16e9:
              strategy.materialize(model)
              model.fit(x, y)
          ```
        """
        self._get_binding("materialize", model)
        mesh = self._runtime.mesh
        mesh.check_can_run()
        variables = all_variables(model)
        materialize(model, variables, mesh, self._runtime.distribution)
        return model

    def describe(self, model: keras.Model | None = None) -> None:
        """Prints the processes of the mesh, and variables.

        If all are replicated, they are one line, else a table is added.

        Args:
          model: The model whose variables are listed. None for all variables
            that were created in the strategy's scope and still exist.
        """
        if model is not None:
            _check_model("describe", model)
        from rich.console import Console

        from keras_strategies.strategy.inspect.describe import describe_table

        created = self._runtime.registry
        variables = list(created) if model is None else all_variables(model)
        runtime = self._runtime
        partitioner = runtime.distribution.placements.partitioner
        optimizer = getattr(model, "optimizer", None)
        slots = optimizer.variables if optimizer else ()
        table = describe_table(runtime.mesh, variables, partitioner, slots)
        Console().print(table)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Strategy":
        """Returns the strategy itself, so that copied objects share it."""
        return self

    def __copy__(self) -> "Strategy":
        return self

    def __repr__(self) -> str:
        mesh = self._runtime.mesh
        names = ", ".join(map(str, mesh.devices[:4]))
        names += ", ..." * (len(mesh.devices) > 4)
        cores = mesh.cores_per_replica
        partitioner = self._runtime.distribution.placements.partitioner
        divided = "" if partitioner is None else f", {partitioner.describe()}"
        return (
            f"<{type(self).__name__} of {mesh.num_replicas} replicas"
            f"{f' of {cores} cores' if cores > 1 else ''} on {names}{divided}"
            f"{', to compile for' * mesh.is_abstract}>"
        )

    def _get_binding(
        self, name: str, model: keras.Model
    ) -> binding_lib.Binding:
        """Returns the binding of a model of this strategy, or raises."""
        _check_model(name, model)
        existing = binding_lib.find_binding(model)
        if existing is None or existing.owner is not self:
            raise ValueError(
                f"`{name}` needs a model that is bound to this strategy. "
                f"Received: {model.name!r}, which is bound to "
                f"{existing.owner if existing else None!r}. Compile the model "
                "in the strategy's scope, or call `strategy.attach(model)`."
            )
        return existing

    def _check_free(self, model: keras.Model) -> None:
        """Raises ValueError if a model belongs to another strategy."""
        existing = binding_lib.find_binding(model)
        if existing is not None and existing.owner is not self:
            raise ValueError(
                f"Model {model.name!r} cannot be bound to {self!r}, because it "
                "is bound to another strategy. Received: a model of "
                f"{existing.owner!r}. Call `detach(model)` on the other first."
            )
        variables = all_variables(model)
        check_home(variables, self._runtime.mesh)


def _check_model(name: str, model: object) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`{name}` expects a Keras model. Received: {model!r} of type "
            f"{type(model).__name__}. Pass a `keras.Model`."
        )


def _watch_job() -> None:
    """Makes the job's watchdog run all programs that span processes."""
    # Imported here because a single process does not need it.
    from keras_strategies.cluster.exchange import kv_store
    from keras_strategies.watchdog import watchdog

    # If the mesh consists of absent devices, there may be no job to watch.
    if kv_store.is_available():
        dispatch.set_starter(watchdog.start().run)
