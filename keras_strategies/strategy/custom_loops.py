"""The methods of a strategy for custom training loops."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from keras_strategies._core.host_arrays import from_tensor
from keras_strategies._core.values import STACKED, PerReplica, ReduceOp, stacked
from keras_strategies._types import Dataset, Tree
from keras_strategies.data.distributed import DistributedDataset
from keras_strategies.data.options import (
    InputOptions,
    InputReplicationMode,
    check_input_options,
)
from keras_strategies.data.source import Source
from keras_strategies.data.sources.from_function import (
    FunctionSource,
    InputContext,
)
from keras_strategies.data.sources.numpy_dataset import NumpyDataset
from keras_strategies.keras_bridge.inputs import agree_source
from keras_strategies.keras_bridge.inputs.choose_source import (
    densify,
    make_dataset_source,
)
from keras_strategies.strategy import current, reducing
from keras_strategies.strategy.replica_context import ValueContext
from keras_strategies.strategy.runner import Runner
from keras_strategies.strategy.runtime import Runtime
from keras_strategies.strategy.tf_compat.options import (
    RunOptions,
    check_options,
)

if TYPE_CHECKING:
    from keras_strategies.strategy.inspect.explain_input import InputExplanation


_VALUES_FROM = "experimental_distribute_values_from_function"


class CustomLoops:
    """The methods of `Strategy` that loops of one's own call."""

    _runtime: Runtime
    _runner: Runner

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that gradients are aggregated over."""
        return self._runtime.mesh.num_replicas

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Tree:
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
        check_options(options)
        current.check_outside("run")
        return self._runner(fn, args, kwargs or {})

    def experimental_run_v2(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Tree:
        """The old name of `run`; warns once.

        Returns:
          What `run` returns.
        """
        current.warn_of_old_name("experimental_run_v2", "run")
        return self.run(fn, args, kwargs)

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Tree,
        axis: int | tuple[int, ...] | None,
    ) -> Tree:
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
        self._check_call("reduce")
        return reducing.reduce(reduce_op, value, axis, self._runtime.mesh)

    def gather(self, value: Tree, axis: int) -> Tree:
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
        self._check_call("gather")
        return reducing.gather(value, axis, self._runtime.mesh)

    def experimental_local_results(self, value: Tree) -> tuple[Any, ...]:
        """The components of a nest on this process's devices.

        Args:
          value: A nest of distributed and other values.

        Returns:
          A tuple: of components, one for each local replica; of nests of
          them; or of the one value, if nothing in it is distributed.
        """
        self._runtime.mesh.check_can_run()
        return reducing.local_results(value, self._runtime.mesh)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Tree:
        """Makes one value for each replica. Collective.

        Args:
          value_fn: Called with a `ValueContext` for each replica of this
            process; returns a nest of arrays or numbers, of the same shapes
            in all processes if there are several.

        Returns:
          The nest, of `PerReplica`; with one replica, of plain values.

        Raises:
          ValueError: the structures differ; or, of several processes, the
            shapes or dtypes, where all raise.
        """
        self._check_call(_VALUES_FROM)
        count, mesh = self.num_replicas_in_sync, self._runtime.mesh

        def make() -> list[Any]:
            ids = mesh.local_replicas
            made = [value_fn(ValueContext(i, count)) for i in ids]
            return jax.tree.map(from_tensor, made)

        made = agree_source.build_equal_replicas(
            mesh, f"`{_VALUES_FROM}`", make
        )
        if count == 1:
            return made[0]
        structures = [jax.tree.structure(nest) for nest in made]
        if any(one != structures[0] for one in structures):
            raise ValueError(
                f"`{_VALUES_FROM}` makes a nest of one structure for each "
                f"replica. Received: {structures}. Make them alike."
            )
        if mesh.num_processes == 1:
            return jax.tree.map(lambda *parts: PerReplica(parts), *made)
        return jax.tree.map(
            lambda *parts: PerReplica.of(stacked(parts, mesh), STACKED), *made
        )

    def experimental_distribute_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Divides the batches of a dataset over the replicas.

        Of a global batch of B rows the first B mod N of N replicas get a row
        more than the others; a shorter last batch fills the same places in
        order (6 rows of 8 over 2 replicas: 4 and 2). No row is left out.

        Args:
          dataset: Yields global batches: a `tf.data.Dataset`, what
            `experimental_make_numpy_dataset(...).batch(B)` returns, a
            `keras.utils.PyDataset`, a dataset or loader of grain or torch,
            what `ks.data.files` returns, or an iterable of nests of arrays.
            On several processes an iterable is run whole by each, which keeps
            its rows, unless `options` say otherwise.
          options: How several processes share the dataset.

        Returns:
          An iterable of nests of `PerReplica`, for `run`.

        Raises:
          TypeError: something that does not yield batches.
          NotImplementedError: options with `PER_REPLICA`, as in tf.
        """
        self._check_call("experimental_distribute_dataset")
        mesh, policy = self._runtime.mesh, None
        if options is not None:
            check_input_options(options)
            mode = options.experimental_replication_mode
            if mode is InputReplicationMode.PER_REPLICA:
                raise NotImplementedError(
                    "A dataset for each replica is made by a function. "
                    "Received: `InputReplicationMode.PER_REPLICA` and a "
                    "dataset. Use `distribute_datasets_from_function`."
                )
            if options.distribute is not None:
                policy = options.distribute.policy
        return self._distributed(
            make_dataset_source(dataset, mesh, policy=policy)
        )

    def experimental_make_numpy_dataset(self, arrays: Tree) -> NumpyDataset:
        """Makes a dataset of the rows of arrays; `.batch(B)` batches it.

        Args:
          arrays: A nest of arrays with equal first dimensions; lists in it
            are stacked to arrays.

        Raises:
          ValueError: arrays of different lengths, or without rows.
        """
        return NumpyDataset(arrays)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Iterable[Any]],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Distributes a dataset that has a replica's batches already.

        Args:
          dataset_fn: Called once for each process, with an `InputContext`;
            returns an iterable of batches of one replica (of the size
            `context.get_per_replica_batch_size(global_batch_size)`). Each
            replica of a step gets the next one; where they end within a
            step, the replicas that are left get batches without rows.
          options: With `InputReplicationMode.PER_REPLICA` it is called once
            for each replica; on one process.

        Returns:
          An iterable of nests of `PerReplica`, for `run`.

        Raises:
          TypeError: what it returns does not yield batches.
        """
        self._check_call("distribute_datasets_from_function")
        check_input_options(options)
        is_per_replica = (
            options is not None
            and options.experimental_replication_mode
            is InputReplicationMode.PER_REPLICA
        )
        mesh = self._runtime.mesh
        source = agree_source.build_on_all_processes(
            mesh,
            "`distribute_datasets_from_function`",
            lambda _: FunctionSource(
                dataset_fn, mesh, is_per_replica=is_per_replica, prepare=densify
            ),
        )
        return self._distributed(source)

    def _distributed(self, source: Source) -> DistributedDataset:
        return DistributedDataset(source, self._runtime.mesh)

    def experimental_distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Iterable[Any]],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """The old name of `distribute_datasets_from_function`; warns once."""
        current.warn_of_old_name(
            "experimental_distribute_datasets_from_function",
            "distribute_datasets_from_function",
        )
        return self.distribute_datasets_from_function(dataset_fn, options)

    def debug(self) -> contextlib.AbstractContextManager[None]:
        """Runs functions given to `run` eagerly while the block runs.

        Each replica runs the Python code itself, one at a time and in the
        order of their ids, each up to its next collective: prints,
        breakpoints and branches on the replica's id (a Python int then) work,
        and results are those of the compiled program. Slow. Holds for this
        thread.

        Example:
          ```python
          with strategy.debug():
              strategy.run(step, args=batch)
          ```
        """
        return self._runner.debugging()

    def explain_input(
        self,
        dataset: Dataset,
        batch_size: int | None = None,
        options: InputOptions | None = None,
    ) -> "InputExplanation":
        """Explains which process and replica reads what of a dataset.

        Nothing is trained and no process waits for another. Of the data a
        first batch is read at most, and nothing of an iterable, which might
        be used up: the answer is "unknown" then.

        Args:
          dataset: What `fit` or `experimental_distribute_dataset` takes:
            arrays in a nest, as (x, y), or a dataset; or a distributed one.
          batch_size: Rows of a global batch: of arrays and torch datasets,
            32 if left out.
          options: Those of `experimental_distribute_dataset`.

        Returns:
          An object that prints as a table: the policy and the reason for it,
          and each replica's rows of a whole batch and of the last one. In
          notebooks it is an SVG picture (`_repr_svg_()`).

        Raises:
          TypeError: not a dataset.
          ValueError: arguments that do not go together.

        Example:
          ```python
          print(strategy.explain_input((x, y), batch_size=256))
          ```
        """
        from keras_strategies.strategy.inspect.explain_input import (
            explain_input,
        )

        mesh = self._runtime.mesh
        return explain_input(dataset, mesh, batch_size, options)

    def _check_context(self) -> None:
        current.check_not_mixing(self)
        self._runtime.mesh.check_can_run()

    def _check_call(self, name: str) -> None:
        self._check_context()
        current.check_cross_replica(name)
