"""The behaviour that all strategies share."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import keras

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.reduce_op import ReduceOp
from keras_strategies._core.values import PerReplica
from keras_strategies.data.distributed import (
    DistributedDataset,
    NumpyDataset,
)
from keras_strategies.keras_bridge import binding as binding_lib
from keras_strategies.keras_bridge.layout import check_home
from keras_strategies.strategy import current, reducing
from keras_strategies.strategy.extended import StrategyExtended
from keras_strategies.strategy.replica_context import ValueContext
from keras_strategies.strategy.runner import Runner
from keras_strategies.strategy.runtime import Runtime
from keras_strategies.strategy.scope import Scope


class Strategy:
    """Distributes Keras models over devices; the base of all strategies.

    A model that is compiled in `scope()` trains, evaluates and predicts on
    every device, in the scope and after it. Losses, metrics and weights are
    those of one device given the same global batches.

    Args:
      mesh: The replicas. Users make a concrete strategy instead.
    """

    def __init__(self, mesh: ReplicaMesh) -> None:
        self._runtime = Runtime.over(mesh)
        self._extended = StrategyExtended(self._runtime)
        self._runner = Runner(self, mesh)

    @property
    def extended(self) -> StrategyExtended:
        """Further methods, for libraries."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that gradients are aggregated over."""
        return self._runtime.mesh.num_replicas

    @property
    def cluster_resolver(self) -> None:
        """The cluster this strategy was made for; none on one machine."""
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
          RuntimeError: (on entering) another strategy's scope is open.

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

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Runs `fn(*args, **kwargs)` once on every replica. Collective.

        One compiled program over all replicas. It is compiled once for the
        function (one that is equal to the last, too: a `def` or lambda made
        anew in a loop), the structure, shapes and dtypes of its arguments,
        and the Python numbers and objects among them.

        In the function Keras layers, losses, optimizers and metrics work on
        the replica's rows. An optimizer's `apply` sums the gradients over the
        replicas: divide the loss by the global batch's rows. Metrics add up
        what the replicas add. `get_replica_context()` has the collectives.

        Args:
          fn: The function. It returns arrays, numbers, strings or None, in
            nests. Variables that it makes on its first call are kept.
          args: Positional arguments: nests, in which a `PerReplica` is
            replaced by the replica's component; anything else is passed as
            it is.
          kwargs: Keyword arguments, likewise.
          options: Not used; for tf's signature.

        Returns:
          The nest of results: arrays as `PerReplica`, with one replica as
          they are; Python numbers, strings and None as they are.

        Raises:
          RuntimeError: called inside of a replica's function, or in another
            strategy's scope.
          TypeError: a result that is no array.

        Example:
          ```python
          def step(x, y):
              loss, grads = ks.value_and_grad(
                  lambda: loss_of(model(x, training=True), y),
                  model.trainable_variables,
              )()
              optimizer.apply(grads, model.trainable_variables)
              return loss

          per_replica = strategy.run(step, args=batch)
          loss = strategy.reduce("sum", per_replica, axis=None)
          ```
        """
        self._check_context()
        current.check_cross_replica("run")
        return self._runner(fn, args, kwargs or {})

    def experimental_run_v2(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """The old name of `run`; warns once."""
        current.warn_of_old_name("experimental_run_v2", "run")
        return self.run(fn, args, kwargs)

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: int | tuple[int, ...] | None,
    ) -> Any:
        """Reduces values of several replicas to one.

        Args:
          reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or their names.
          value: A nest of what `run` returned.
          axis: None reduces over the replicas alone, elementwise. A dimension
            (or several) is summed over as well; `MEAN` then divides by the
            number of entries of all replicas together.

        Returns:
          The nest of arrays, on every device.

        Raises:
          ValueError: shapes that differ with axis=None, a dimension that a
            component does not have, an unknown reduction, or `SUM` of one
            plain value.
          RuntimeError: called inside of a replica's function.
        """
        self._check_context()
        current.check_cross_replica("reduce")
        return reducing.reduce(reduce_op, value, axis, self._runtime.mesh)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the components of values along a dimension.

        Args:
          value: A nest of what `run` returned; plain values are returned as
            they are.
          axis: The dimension; its size may differ between replicas.

        Returns:
          The nest of arrays, components in the order of replica ids.

        Raises:
          ValueError: other dimensions differ, or there is no such one.
          RuntimeError: called inside of a replica's function.
        """
        self._check_context()
        current.check_cross_replica("gather")
        return reducing.gather(value, axis, self._runtime.mesh)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The components of a nest on this process's devices.

        Args:
          value: A nest of distributed and other values.

        Returns:
          A tuple: of components, one for each local replica; of nests of
          them; or of the one value, if nothing in it is distributed.
        """
        return reducing.local_results(value)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Makes one value for each replica.

        Args:
          value_fn: Called with a `ValueContext` for each replica; returns a
            nest of arrays or numbers.

        Returns:
          The nest, of `PerReplica`; with one replica, of plain values.
        """
        self._check_context()
        current.check_cross_replica(
            "experimental_distribute_values_from_function"
        )
        count = self.num_replicas_in_sync
        made = [value_fn(ValueContext(i, count)) for i in range(count)]
        if count == 1:
            return made[0]
        return jax.tree.map(lambda *parts: PerReplica(parts), *made)

    def experimental_distribute_dataset(
        self, dataset: Iterable[Any], options: Any = None
    ) -> DistributedDataset:
        """Divides the batches of a dataset over the replicas.

        Of a global batch of B rows the first B mod N of N replicas get a row
        more than the others; a shorter last batch fills the same places in
        order (6 rows of 8 over 2 replicas: 4 and 2). No row is left out.

        Args:
          dataset: Yields global batches: a `tf.data.Dataset`, what
            `experimental_make_numpy_dataset(...).batch(B)` returns, a
            `keras.utils.PyDataset`, or an iterable of nests of arrays.
          options: Not used; for tf's signature.

        Returns:
          An iterable of nests of `PerReplica`, for `run`.

        Raises:
          TypeError: something that does not yield batches.
        """
        self._check_context()
        current.check_cross_replica("experimental_distribute_dataset")
        return DistributedDataset(dataset, self._runtime.mesh)

    def experimental_make_numpy_dataset(self, arrays: Any) -> NumpyDataset:
        """Makes a dataset of the rows of arrays; `.batch(B)` batches it.

        Args:
          arrays: A nest of arrays with equal first dimensions; lists in it
            are stacked to arrays.

        Raises:
          ValueError: arrays of different lengths, or without rows.
        """
        return NumpyDataset(arrays)

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
            model,
            owner=self,
            mesh=self._runtime.mesh,
            distribution=self._runtime.distribution,
            registry=self._runtime.registry,
            check_context=self._check_context,
        )
        binding.install()
        return model

    def detach(self, model: keras.Model) -> keras.Model:
        """Gives a plain Keras model back: one device, Keras's own loops.

        Args:
          model: A model that is bound to this strategy.

        Returns:
          The model, with its weights, optimizer and metric state.

        Raises:
          ValueError: the model is not bound to this strategy.
        """
        _check_model("detach", model)
        existing = binding_lib.binding_of(model)
        if existing is None or existing.owner is not self:
            raise ValueError(
                "Only a model that is bound to this strategy can be "
                f"detached. Received: {model.name!r}, bound to "
                f"{existing.owner if existing else None!r}. Compile it in "
                "the scope, or call `attach(model)`, first."
            )
        existing.remove()
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

        from keras_strategies.strategy.describe import describe_table

        mesh = self._runtime.mesh
        if model is None:
            variables = list(self._runtime.registry)
        else:
            variables = binding_lib.all_variables(model)
        Console().print(describe_table(mesh.devices, mesh.axis, variables))

    def __repr__(self) -> str:
        mesh = self._runtime.mesh
        names = [str(device) for device in mesh.devices[:4]]
        if mesh.num_replicas > len(names):
            names.append("...")
        return (
            f"<{type(self).__name__} of {mesh.num_replicas} replicas on "
            f"{', '.join(names)}>"
        )

    def _check_free(self, model: keras.Model) -> None:
        """Raises ValueError for a model of another strategy."""
        existing = binding_lib.binding_of(model)
        if existing is not None and existing.owner is not self:
            raise ValueError(
                f"Model {model.name!r} is bound to another strategy. "
                f"Received: {existing.owner!r}, now {self!r}. Call "
                "`detach(model)` on that strategy first."
            )
        variables = binding_lib.all_variables(model)
        check_home(variables, self._runtime.mesh)

    def _check_context(self) -> None:
        current.check_not_mixing(self)


def _check_model(name: str, model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`{name}` takes a Keras model. Received: {model!r} of type "
            f"{type(model).__name__}. Pass a `keras.Model`."
        )
