"""The methods of a strategy for custom training loops."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from keras_strategies._types import Dataset, Tree
from keras_strategies.data.distributed import DistributedDataset
from keras_strategies.data.options import (
    InputOptions,
    InputReplicationMode,
    check_input_options,
)
from keras_strategies.data.sources.from_function import (
    FunctionSource,
    InputContext,
)
from keras_strategies.data.sources.numpy_dataset import NumpyDataset
from keras_strategies.fit.inputs import agree_source
from keras_strategies.fit.inputs.choose_source import (
    make_dataset_source,
)
from keras_strategies.names import dry_run
from keras_strategies.spmd.values import ReduceOp
from keras_strategies.strategy import current, reducing
from keras_strategies.strategy.replica_context import (
    ValueContext,
    distribute_values,
)
from keras_strategies.strategy.runner import Runner
from keras_strategies.strategy.runtime import Runtime
from keras_strategies.strategy.tf_compat.options import RunOptions

if TYPE_CHECKING:
    from keras_strategies.strategy.inspect.explain_input import InputExplanation


_VALUES_FROM = "experimental_distribute_values_from_function"


class CustomLoops:
    """The methods of `Strategy` for custom training loops."""

    _runtime: Runtime
    _runner: Runner

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that gradients are aggregated over."""
        return self._runtime.mesh.num_replicas

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Tree:
        """Runs `fn(*args, **kwargs)` once on every replica. Collective.

        All replicas run one compiled program. A new program is compiled if the
        function, the structure, shapes or dtypes of its arguments, or a Python
        number or object among them are new. If a training loop creates an equal
        function again, such as a `def` or a lambda, the program is reused.

        In the function, Keras layers, losses, optimizers and metrics work on
        the replica's rows. An optimizer's `apply` sums the gradients over the
        replicas, so divide the loss by the number of rows in the global batch.
        Metrics combine the updates of all replicas. Collectives are methods of
        `get_replica_context()`.

        Args:
          fn: The function. It returns a nest of arrays, numbers, strings or
            None. Later calls reuse the variables that its first call creates.
          args: Positional arguments: nests. Each `PerReplica` is replaced by
            the replica's component; other values are passed unchanged.
          kwargs: Keyword arguments, treated like `args`.
          options: Not used; accepted as in tf.

        Returns:
          The nest of results. Arrays become `PerReplica` if there are several
          replicas; Python numbers, strings and None are unchanged.

        Raises:
          RuntimeError: if called inside of a function given to `run`, or in
            another strategy's scope.
          TypeError: if `fn` returns an object of another type.

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
        del options
        current.check_outside("run")
        return self._runner(fn, args, kwargs or {})

    def experimental_run_v2(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Tree:
        """Calls `run`, and warns once that this method was renamed."""
        current.warn_of_old_name("experimental_run_v2", "run")
        return self.run(fn, args, kwargs)

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Tree,
        axis: int | tuple[int, ...] | None,
    ) -> Tree:
        """Sums or averages per-replica values over the replicas.

        Args:
          reduce_op: `ReduceOp.SUM` or `ReduceOp.MEAN`, or its name.
          value: A nest of results of `run`.
          axis: None to reduce elementwise over the replicas only. A dimension,
            or a tuple of dimensions, to reduce over them, too; `MEAN` then
            divides by the number of reduced entries on all replicas together.

        Returns:
          The nest of arrays, replicated on every device.

        Raises:
          ValueError: if shapes differ with axis=None, a component does not have
            the dimension, the reduction is unknown, or `SUM` is applied to a
            value that is not distributed.
          RuntimeError: if called inside of a function given to `run`.
        """
        self._check_call("reduce")
        return reducing.reduce(reduce_op, value, axis, self._runtime.mesh)

    def gather(self, value: Tree, axis: int) -> Tree:
        """Concatenates the components of values along a dimension.

        Args:
          value: A nest of results of `run`; plain values are returned
            unchanged.
          axis: The dimension. Its size may differ between replicas.

        Returns:
          The nest of arrays, with components in the order of replica ids.

        Raises:
          ValueError: if a component does not have the dimension.
          TypeError: if other dimensions differ.
          RuntimeError: if called inside of a function given to `run`.
        """
        self._check_call("gather")
        return reducing.gather(value, axis, self._runtime.mesh)

    def experimental_local_results(self, value: Tree) -> tuple[Any, ...]:
        """Returns the components of a nest on this process's devices.

        Args:
          value: A nest of distributed and other values.

        Returns:
          A tuple with a nest of components for each local replica. If no value
          is distributed, the tuple contains only `value`.
        """
        if dry_run.get() is None:
            self._runtime.mesh.check_can_run()
        return reducing.list_local_results(value, self._runtime.mesh)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Tree:
        """Makes one value for each replica. Collective.

        Args:
          value_fn: A function of a `ValueContext`, called for each replica of
            this process. It returns a nest of arrays or numbers. With several
            processes, shapes must be equal on all replicas.

        Returns:
          The nest of `PerReplica`, or of plain values if there is one replica.

        Raises:
          ValueError: if the replicas' nests differ in structure or, with
            several processes, in shapes or dtypes. All processes raise it.
        """
        self._check_call(_VALUES_FROM)
        return distribute_values(_VALUES_FROM, value_fn, self._runtime.mesh)

    def experimental_distribute_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Splits the batches of a dataset between the replicas.

        If N replicas cannot share a global batch of B rows evenly, the first B
        mod N replicas get one row more than the others. A shorter last batch
        fills one replica after the other: if batches of 8 rows are split over 2
        replicas, a last batch of 6 rows is split into 4 and 2. No row is left
        out.

        Args:
          dataset: A dataset that yields global batches: a `tf.data.Dataset`,
            the result of `experimental_make_numpy_dataset(...).batch(B)` or of
            `ks.data.files`, a `keras.utils.PyDataset`, a dataset or loader of
            grain or torch, or an iterable of nests of arrays. With several
            processes, each reads the whole iterable and uses its own rows,
            unless `options` select another policy.
          options: How several processes share the dataset.

        Returns:
          An iterable of nests of `PerReplica`, for `run`.

        Raises:
          TypeError: if `dataset` does not yield batches.
          NotImplementedError: if `options` select `PER_REPLICA`, as in tf.
        """
        if (dry := dry_run.get()) is not None:
            return dry.distribute(self, dataset)
        self._check_call("experimental_distribute_dataset")
        mesh, policy = self._runtime.mesh, None
        if options is not None:
            check_input_options(options)
            mode = options.experimental_replication_mode
            if mode is InputReplicationMode.PER_REPLICA:
                raise NotImplementedError(
                    "`InputReplicationMode.PER_REPLICA` needs a function that "
                    "makes a dataset for each replica. For a dataset, use "
                    "`distribute_datasets_from_function`."
                )
            if options.distribute is not None:
                policy = options.distribute.policy
        source = make_dataset_source(dataset, mesh, policy=policy)
        return DistributedDataset(source, self._runtime.mesh)

    def experimental_make_numpy_dataset(self, arrays: Tree) -> NumpyDataset:
        """Makes a dataset from the rows of arrays; `.batch(B)` batches it.

        Args:
          arrays: A nest of arrays with equal first dimensions; lists become
            arrays.

        Raises:
          ValueError: if the arrays have no rows, or different numbers of rows.
        """
        return NumpyDataset(arrays)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Iterable[Any]],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Distributes a dataset that already yields per-replica batches.

        Args:
          dataset_fn: A function of an `InputContext`, called once for each
            process. It returns an iterable of batches for one replica, with
            `context.get_per_replica_batch_size(global_batch_size)` rows. In a
            step, each replica gets the next batch; if the iterable ends within
            a step, the remaining replicas get batches without rows.
          options: With `InputReplicationMode.PER_REPLICA` the function is
            called once for each replica; this needs a single process.

        Returns:
          An iterable of nests of `PerReplica`, for `run`.

        Raises:
          TypeError: if the function's result does not yield batches.
        """
        if (dry := dry_run.get()) is not None:
            return dry.distribute(self, dataset_fn, is_function=True)
        self._check_call("distribute_datasets_from_function")
        check_input_options(options)
        mode = getattr(options, "experimental_replication_mode", None)
        is_per_replica = mode is InputReplicationMode.PER_REPLICA
        mesh = self._runtime.mesh
        source = agree_source.build_on_all_processes(
            mesh,
            "`distribute_datasets_from_function`",
            lambda _: FunctionSource(
                dataset_fn, mesh, is_per_replica=is_per_replica
            ),
        )
        return DistributedDataset(source, self._runtime.mesh)

    def experimental_distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Iterable[Any]],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Calls `distribute_datasets_from_function` under its old name."""
        current.warn_of_old_name(
            "experimental_distribute_datasets_from_function",
            "distribute_datasets_from_function",
        )
        return self.distribute_datasets_from_function(dataset_fn, options)

    def debug(self) -> contextlib.AbstractContextManager[None]:
        """Runs functions given to `run` eagerly while the block runs.

        The replicas execute the Python code one at a time, in the order of
        their ids; each runs up to its next collective. Prints, breakpoints and
        branches on the replica's id (a Python int here) work, and results equal
        those of the compiled program. It is slow, and affects only this thread.

        Example:
          ```python
          with strategy.debug():
              strategy.run(step, args=batch)
          ```
        """
        return self._runner.enable_debugging()

    def explain_input(
        self,
        dataset: Dataset,
        batch_size: int | None = None,
        options: InputOptions | None = None,
    ) -> "InputExplanation":
        """Explains which process and replica reads which rows of a dataset.

        Nothing is trained, no process waits for another, and no data is read:
        what only the data could tell is "unknown".

        Args:
          dataset: Data for `fit` or `experimental_distribute_dataset`: a nest
            of arrays, such as (x, y), a dataset, or a distributed dataset.
          batch_size: The number of rows of a global batch, for arrays and torch
            datasets; 32 by default.
          options: See `experimental_distribute_dataset`.

        Returns:
          An object that prints as a table: the policy that divides the data,
          its reason, and each replica's rows in a full batch and in the last
          batch.

        Raises:
          TypeError: if `dataset` is not a dataset.
          ValueError: if the policy does not apply to `dataset`.

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
