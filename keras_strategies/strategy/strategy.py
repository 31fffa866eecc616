"""The behaviour that all strategies share."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from keras_strategies._core import dispatch
from keras_strategies._core.compiled import CompiledProgram, compile_program
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._types import Batch
from keras_strategies.keras_bridge.loops import binding as binding_lib
from keras_strategies.keras_bridge.steps.lower_step import lower_step
from keras_strategies.keras_bridge.variables.abstract_models import materialize
from keras_strategies.keras_bridge.variables.model_variables import (
    all_variables,
)
from keras_strategies.keras_bridge.variables.partitioners import PartitionerLike
from keras_strategies.keras_bridge.variables.variable_creator import check_home
from keras_strategies.strategy import current
from keras_strategies.strategy.custom_loops import CustomLoops
from keras_strategies.strategy.extended import StrategyExtended
from keras_strategies.strategy.plans import PlanMixin
from keras_strategies.strategy.replica_context import replica_scope
from keras_strategies.strategy.runner import Runner
from keras_strategies.strategy.runtime import Runtime
from keras_strategies.strategy.scope import Scope
from keras_strategies.strategy.tf_compat import old_names


class Strategy(CustomLoops, PlanMixin):
    """Distributes Keras models over devices; the base of all strategies.

    A model that is compiled in `scope()` trains, evaluates and predicts on
    every device, in the scope and after it. Losses, metrics and weights are
    those of one device given the same global batches.

    Args:
      mesh: The replicas, a `ks.ReplicaMesh`. A subclass chooses them; without
        one, use `MirroredStrategy` and its like.
      layout_map: Which variables a replica divides over its cores; see
        `TPUStrategy`.
      outputs_on_chief: Whether `predict` returns rows in the chief alone.

    Raises:
      TypeError: `mesh` is not a `ReplicaMesh`.

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
                "A strategy is made of a `ks.ReplicaMesh`. Received: an object "
                f"of type {type(mesh).__name__}. Write "
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

    @staticmethod
    def _over(mesh: ReplicaMesh, **kwargs: Any) -> "Strategy":
        """A strategy over other devices, which are planned for."""
        return Strategy(mesh, **kwargs)

    @property
    def extended(self) -> StrategyExtended:
        """Further methods, for libraries."""
        return self._extended

    @property
    def mesh(self) -> ReplicaMesh:
        """The devices of the replicas, as a mesh; `mesh.mesh` is JAX's."""
        return self._runtime.mesh

    @property
    def cluster_resolver(self) -> Any:
        """The cluster this strategy was made for; none on one machine.

        Returns:
          A resolver, or None.
        """
        return

    def scope(self) -> Scope:
        """Makes the strategy current for a `with` block of this thread.

        In the block every Keras variable is created on the strategy's
        devices, and every model that is made or compiled is bound to the
        strategy: one made here also if it is compiled later, outside.
        Scopes of one strategy may be nested, and entered again.

        Returns:
          A context manager that yields the strategy.

        Raises:
          RuntimeError: (on entering) another strategy's scope is open, or a
            replica's function is running.

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
        """Binds a model without a scope; what `compile` in `scope` does.

        Args:
          model: A model, built or not, compiled or not yet. Its variables
            are moved to the strategy's devices.

        Returns:
          The model.

        Raises:
          ValueError: the model's variables lie on another strategy's
            devices.
        """
        _check_model("attach", model)
        self._check_free(model)
        existing = binding_lib.binding_of(model)
        binding = existing or binding_lib.Binding(
            model, self, self._runtime, self._check_context, replica_scope(self)
        )
        binding.install()
        return model

    def detach(self, model: keras.Model) -> keras.Model:
        """Gives a plain Keras model back: one device, Keras's own loops.

        Collective, where several processes divide variables: each gets all.

        Args:
          model: A model that is bound to this strategy.

        Returns:
          The model, with its weights, optimizer and metric state.

        Raises:
          ValueError: the model is not bound to this strategy.
        """
        self._binding_of("detach", model).remove()
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

        Says what `fit`, `evaluate` or `predict` will ask of each device.
        Works for devices that are not there, too
        (`TPUStrategy.for_topology`). Not in tf.

        Args:
          model: A model of this strategy; built here if it is not yet.
          batch: What a dataset would yield: `x`, `(x, y)` or
            `(x, y, sample_weight)`, nests of arrays or of
            `jax.ShapeDtypeStruct`. Its rows are those of the GLOBAL batch.
          kind: `"train"`, `"test"` or `"predict"`; `"predict"` looks at x
            alone.
          compiler_options: XLA's, by their names. With
            `{"exec_time_optimization_effort": -1.0}` a large program for
            TPUs compiles up to twelve times as fast, with nearly the same
            memory, and without the overlap of collectives.

        Returns:
          The program: its collectives, bytes per chip and text.

        Raises:
          ValueError: the model is not this strategy's, an unknown kind, or
            arrays with different numbers of rows.
          TypeError: something without shape and dtype in `batch`.

        Example:
          ```python
          program = strategy.compile_step(model, (x, y), kind="test")
          print(program)
          ```
        """
        binding = self._binding_of("compile_step", model)
        mesh, build = self._runtime.mesh, binding.build_for_shapes
        lower = functools.partial(
            lower_step,
            model,
            mesh,
            kind,
            batch,
            build,
            replica_scope=binding.replica_scope,
        )
        return compile_program(lower, mesh, f"{kind} step", compiler_options)

    def compile_run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> CompiledProgram:
        """Compiles the program of `run(fn, args, kwargs)`; runs nothing.

        Variables that the function makes on its first call are made. Not in
        tf.

        Args:
          fn: The function.
          args: Positional arguments: nests. Arrays, or
            `jax.ShapeDtypeStruct`, of at least one dimension stand for a
            distributed batch: their rows are those of the GLOBAL batch, a
            multiple of the replicas. Scalars, and arrays within
            `ks.Mirrored`, are passed whole; anything else as it is.
          kwargs: Keyword arguments, likewise.
          compiler_options: See `compile_step`.

        Returns:
          The program: its collectives, bytes per chip and text.

        Raises:
          ValueError: rows that the replicas cannot share evenly.

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
            lambda: runner.lowered(*given)[0], mesh, name, compiler_options
        )

    def materialize(self, model: keras.Model) -> keras.Model:
        """Gives a model of `ks.abstract()` its initial values.

        Each variable's initializer runs, and divided variables are created
        divided; what optimizers hold for its weights starts as ever, those of
        loops of one's own included. A model with values is left as it is.
        Collective. Not in tf.

        Args:
          model: A model of this strategy.

        Returns:
          The model.

        Raises:
          ValueError: the model is not this strategy's, or a layer assigned a
            value that was not kept.
          RuntimeError: the devices can only be compiled for.

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
        self._binding_of("materialize", model)
        mesh = self._runtime.mesh
        mesh.check_can_run()
        variables = all_variables(model)
        materialize(model, variables, mesh, self._runtime.distribution)
        return model

    def describe(self, model: keras.Model | None = None) -> None:
        """Prints the mesh and a table of variables.

        Args:
          model: The model whose variables are listed; without it, those
            created in the strategy's scope that still exist.
        """
        if model is not None:
            _check_model("describe", model)
        from rich.console import Console

        from keras_strategies.strategy.inspect.describe import describe_table

        created = self._runtime.registry
        variables = list(created) if model is None else all_variables(model)
        runtime = self._runtime
        partitioner = runtime.distribution.placements.partitioner
        Console().print(describe_table(runtime.mesh, variables, partitioner))

    def __copy__(self) -> "Strategy":
        raise RuntimeError(
            "Must only deepcopy DistributionStrategy: two objects of one "
            "strategy would not be the same strategy. Received: "
            f"`copy.copy({self!r})`. Use the strategy itself."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Strategy":
        """Itself: a copy of what refers to it has the same strategy."""
        return self

    def __getattr__(self, name: str) -> Any:
        raise old_names.missing(self, name)

    def __repr__(self) -> str:
        mesh = self._runtime.mesh
        names = [str(device) for device in mesh.devices[:4]]
        if len(mesh.devices) > len(names):
            names.append("...")
        cores = mesh.cores_per_replica
        partitioner = self._runtime.distribution.placements.partitioner
        divided = ""
        if partitioner is not None:
            divided = f", {partitioner.name} over {partitioner.shards}"
        return (
            f"<{type(self).__name__} of {mesh.num_replicas} replicas"
            f"{f' of {cores} cores' if cores > 1 else ''} on "
            f"{', '.join(names)}{divided}"
            f"{', to compile for' * mesh.is_abstract}>"
        )

    def _binding_of(self, name: str, model: keras.Model) -> binding_lib.Binding:
        """The binding of a model of this strategy; `name` takes no other."""
        _check_model(name, model)
        existing = binding_lib.binding_of(model)
        if existing is None or existing.owner is not self:
            raise ValueError(
                f"`{name}` takes a model that is bound to this strategy. "
                f"Received: {model.name!r}, bound to "
                f"{existing.owner if existing else None!r}. Compile it in "
                "the scope, or call `attach(model)`, first."
            )
        return existing

    def _check_free(self, model: keras.Model) -> None:
        """Raises ValueError for a model of another strategy."""
        existing = binding_lib.binding_of(model)
        if existing is not None and existing.owner is not self:
            raise ValueError(
                f"Model {model.name!r} is bound to another strategy. "
                f"Received: {existing.owner!r}, now {self!r}. Call "
                "`detach(model)` on that strategy first."
            )
        variables = all_variables(model)
        check_home(variables, self._runtime.mesh)


def _check_model(name: str, model: object) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`{name}` takes a Keras model. Received: {model!r} of type "
            f"{type(model).__name__}. Pass a `keras.Model`."
        )


def _watch_job() -> None:
    """Has the job's guard start what runs on several processes."""
    # One process without others need not spend the time to import it.
    from keras_strategies.cluster.exchange import kv_store
    from keras_strategies.cluster.watchdog import watchdog

    # A mesh of a topology's devices has no job.
    if kv_store.is_available():
        dispatch.start_with(watchdog.start().run)
