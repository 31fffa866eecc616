"""A model bound to a strategy: `fit` runs steps mapped over the replicas.

Keras has no hook that receives the model at `compile()`, so `Trainer.compile`
is wrapped while a scope is open. Binding sets attributes on that model only
(`fit`, `evaluate`, `predict`, `*_on_batch` and `make_*_function`). It does not
change the model's class, nor how the model is saved, cloned and pickled.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import keras
from keras.src.trainers.epoch_iterator import EpochIterator

from keras_strategies._types import Batch
from keras_strategies.fit import generating, scope_hooks
from keras_strategies.fit.callbacks.callback_list import (
    close_reports,
    set_quiet_list,
)
from keras_strategies.fit.callbacks.chief_callbacks import (
    SAVERS,
    make_saves_safe,
    read_variables_together,
    select_callbacks,
)
from keras_strategies.fit.callbacks.resumable_fit import (
    find_checkpointer,
    run_resumable_fit,
)
from keras_strategies.fit.inputs import feed as adapter
from keras_strategies.fit.inputs import keras_sources
from keras_strategies.fit.scope_hooks import (
    BINDING,
    LOOPS,
    ON_USE,
    STRATEGY,
    Call,
)
from keras_strategies.keras_bridge import keras_names
from keras_strategies.keras_bridge.ported_code import explaining_errors
from keras_strategies.keras_bridge.step_context import ReplicaScope, building
from keras_strategies.names import dry_run
from keras_strategies.spmd.identity import temporary_attribute
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.step.in_place_step import build_model, read_first_batch
from keras_strategies.step.step_functions import StepFunctionCache
from keras_strategies.variables import variable_creator
from keras_strategies.variables.abstract_models import creating_like
from keras_strategies.variables.abstract_variables import inferring_shapes
from keras_strategies.variables.model_variables import all_variables

if TYPE_CHECKING:
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter

_DATA = ("x", "y", "sample_weight", "class_weight", "batch_size", "shuffle")
_BUILDER = "_symbolic_build"
_VALIDATES = "_use_cached_eval_dataset"


class Binding:
    """The connection between a strategy and a model that it trains.

    Args:
      model: The model.
      owner: The strategy.
      runtime: The strategy's runtime: its mesh, distribution and registry.
      check_context: A function that raises if another strategy's scope is open.
      replica_scope: Makes the context manager of a step's replica context.
    """

    def __init__(
        self,
        model: keras.Model,
        owner: Any,
        runtime: Any,
        check_context: Callable[[], None],
        replica_scope: ReplicaScope,
    ) -> None:
        self.replica_scope = replica_scope
        self.model, self.owner = model, owner
        self._mesh: ReplicaMesh = runtime.mesh
        self._distribution = runtime.distribution
        self._registry = runtime.registry
        self.check_context = check_context
        self.is_chief = self._mesh.is_chief
        self._functions = StepFunctionCache(
            model,
            self._mesh,
            keeps_outputs=self.is_chief or not runtime.outputs_on_chief,
            replica_scope=replica_scope,
        )
        self.trained = self._functions.trained
        # In a dry run, another object has the methods that `_route` calls.
        dry = dry_run.get()
        self._calls: Any = self if dry is None else dry.bind(self)
        self._is_in_session = False
        # The validation data of a running fit, for an overridden `evaluate`.
        self._validation: dict[str, Any] = {}

    def install(self) -> None:
        """Replaces the model's `fit`, `evaluate` and similar methods.

        Raises:
          ValueError: if the variables are on another strategy's devices.
        """
        self._adopt()
        attributes = self._make_step_attributes() if self._calls is self else {}
        attributes |= {BINDING: self, STRATEGY: self.owner}
        for name, value in attributes.items():
            object.__setattr__(self.model, name, value)
        scope_hooks.replace_methods(self.model, LOOPS, self._loop)
        make_saves_safe(self.model, self._mesh, self._adopt)
        self._functions.reset()

    def _make_step_attributes(self) -> dict[str, Any]:
        # Keras's `fit` builds the model from the first batch. A bound model is
        # built already when Keras's `fit` is called.
        attributes = generating.find_maker(self.model, self._mesh)
        attributes |= self._functions.makers()
        attributes[_BUILDER] = self._build_for_others
        if keras_names.BUILDS_FIRST:
            attributes[keras_names.MAYBE_BUILD] = self._maybe_build_for_others
        return attributes

    def remove(self) -> None:
        """Turns the model back into a plain Keras model on one device."""
        names = (*LOOPS, *self._make_step_attributes(), BINDING, STRATEGY)
        for name in (*names, *ON_USE, *SAVERS):
            self.model.__dict__.pop(name, None)
        self._functions.reset()
        variable_creator.release(all_variables(self.model))

    def _loop(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the class's override of a method such as `fit`, else `_route`.

        If the override calls Keras's method, `_route` is called instead.
        """
        loop = scope_hooks.find_overridden_loop(self.model, name)
        if loop is None:
            return self._route(name, args, kwargs)
        if kwargs.get(_VALIDATES):
            # An overridden `evaluate` may use the data that it receives.
            kwargs |= self._validation
        # It may be a patch that calls Keras's method, taken before the scope.
        without = variable_creator.distribution_scope(None)
        with scope_hooks.route_loops(self.model, self._route), without:
            return loop(*args, **kwargs)

    def _route(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with explaining_errors(name):
            return getattr(self._calls, f"_{name}")(*args, **kwargs)

    def _fit(self, *args: Any, **kwargs: Any) -> Any:
        call = self._make_call("fit", args, kwargs)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._session("train"))
            keras_sources.split_validation(call)
            feed = self._make_feed(call, steps=call["steps_per_epoch"])
            if call["validation_data"] is not None:
                validation_feed = self._make_validation_feed(call, stack)
                call.set(validation_data=validation_feed)
            call.set_feed(feed)
            stack.callback(close_reports, call["callbacks"])
            self._build_on_feed("train", feed)
            is_together = read_variables_together(
                self.model, call["callbacks"], self._mesh
            )
            stack.enter_context(
                temporary_attribute(
                    self._functions, "are_read_together", is_together
                )
            )
            checkpointer = find_checkpointer(call["callbacks"])
            if checkpointer is not None:
                return run_resumable_fit(
                    checkpointer, call, feed, self._functions
                )
            set_quiet_list(call, self.model, feed)
            return call.run()

    def _make_validation_feed(
        self, call: Call, stack: contextlib.ExitStack
    ) -> "DataAdapter":
        parts = keras.utils.unpack_x_y_sample_weight(call["validation_data"])
        data = dict(zip(("x", "y", "sample_weight"), parts, strict=True))
        stack.enter_context(temporary_attribute(self, "_validation", data))
        return adapter.make_feed(
            self._mesh,
            **data,
            batch_size=call["validation_batch_size"] or call["batch_size"],
            steps_per_epoch=call["validation_steps"],
            steps_per_execution=self.model.steps_per_execution,
            name="validation_data",
        )

    def _pass(self, name: str, kind: str, *args: Any, **kwargs: Any) -> Any:
        """Runs `evaluate` or `predict`."""
        call = self._make_call(name, args, kwargs)
        with self._session(kind):
            if not call.keywords.get(_VALIDATES):
                feed = self._make_feed(call, steps=call["steps"])
                call.set_feed(feed)
                if kind == "predict":
                    self._build_for_call(EpochIterator(feed))
                else:
                    self._build_on_feed(kind, feed)
                set_quiet_list(call, self.model, feed)
            return call.run()

    _evaluate = functools.partialmethod(_pass, "evaluate", "test")
    _predict = functools.partialmethod(_pass, "predict", "predict")

    def _on_batch(self, kind: str, *args: Any, **kwargs: Any) -> Any:
        call = Call(self.model, f"{kind}_on_batch", args, kwargs)
        weight = keras_sources.compute_batch_weights(
            call["y"], call["sample_weight"], call["class_weight"]
        )
        batch = (call["x"], call["y"], weight)
        batch = batch[:1] if kind == "predict" else batch
        with self._session(kind):
            execution = adapter.place_batch(batch, self._mesh)
            if kind == "predict":
                self._build_for_call([(0, 0, [batch])])
            else:
                self.model._assert_compile_called(call.name)
                self._build(kind, data_batch=batch)
            call.set_feed(execution)
            return call.run()

    _train_on_batch = functools.partialmethod(_on_batch, "train")
    _test_on_batch = functools.partialmethod(_on_batch, "test")
    _predict_on_batch = functools.partialmethod(_on_batch, "predict")

    def _make_call(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call:
        call = Call(self.model, name, args, kwargs)
        if not self._mesh.is_chief:
            # Only the chief shows the progress.
            call.set(verbose=0)
        call.set(callbacks=select_callbacks(call["callbacks"], self._mesh))
        return call

    def _make_feed(self, call: Call, *, steps: int | None) -> "DataAdapter":
        feed = adapter.make_feed(
            self._mesh,
            **{name: call[name] for name in _DATA},
            steps_per_epoch=steps,
            steps_per_execution=self.model.steps_per_execution,
            name=call.name,
            facts=call.facts(),
        )
        self._distribution.compare(lambda: all_variables(self.model))
        return feed

    # Building the model and adopting its variables.

    @contextlib.contextmanager
    def _session(self, kind: str) -> Iterator[None]:
        """Clears Keras's distribution, so that Keras places no data itself."""
        self.check_context()
        try:
            with (
                temporary_attribute(self, "_is_in_session", True),
                variable_creator.distribution_scope(None),
            ):
                yield
        finally:
            self._functions.forget(kind)

    def _build_on_feed(self, kind: str, feed: "DataAdapter") -> None:
        self.model._assert_compile_called("fit")
        self._build(kind, iterator=EpochIterator(feed))
        self._distribution.compare(list)

    @contextlib.contextmanager
    def _building(self) -> Iterator[None]:
        with (
            variable_creator.distribution_scope(self._distribution),
            creating_like(self.model),
            building(self._mesh, self.replica_scope),
        ):
            yield

    def _build(self, kind: str, **data: object) -> None:
        with self._building():
            build_model(self.model, kind, **data)
        self._adopt_built()

    def _build_for_others(
        self, iterator: Any = None, data_batch: Any = None
    ) -> None:
        """Replaces `_symbolic_build`, which Keras's `fit` and `evaluate` call.

        Within `_session` the model is built. Otherwise, for example if a
        library has patched `keras.Model.fit`, it is built here.
        """
        if self._is_in_session:
            return

        def first() -> Iterator[Any]:
            # If a distribution were set, Keras would place the batch.
            with variable_creator.distribution_scope(None):
                batch = read_first_batch(iterator)
            yield 0, 0, [batch]

        data = None if iterator is None else first()
        self._build("train", iterator=data, data_batch=data_batch)

    def _maybe_build_for_others(self, *args: Any, **kwargs: Any) -> None:
        """Replaces `_maybe_symbolic_build`, which may use up an epoch."""
        if not self._is_in_session:
            maybe_build = getattr(type(self.model), keras_names.MAYBE_BUILD)
            maybe_build(self.model, *args, **kwargs)

    def build_for_shapes(self, data: Batch) -> None:
        """Builds the model from the shapes of a batch.

        Args:
          data: `(x,)`, or `(x, y, sample_weight)` for a compiled model.
        """
        if len(data) > 1:
            self.model._assert_compile_called("compile_step")
            batch = keras.utils.pack_x_y_sample_weight(*data)
            self._build("train", data_batch=batch)
            return
        if not scope_hooks.is_built(self.model):
            with self._building(), inferring_shapes(), keras.StatelessScope():
                jax.eval_shape(self.model, data[0])
        self._adopt_built()

    def _build_for_call(self, iterator: Iterable[Any]) -> None:
        """Builds a model that was never called, from the first batch."""
        if not scope_hooks.is_built(self.model):
            batch = read_first_batch(iterator)
            x = keras.utils.unpack_x_y_sample_weight(batch)[0]
            with self._building(), keras.StatelessScope():
                self.model(x)
            if isinstance(iterator, EpochIterator):
                # Reading the batch began an epoch of the data: end it.
                iterator.reset()
        self._adopt_built()

    def _adopt_built(self) -> None:
        self._adopt()
        variables = [*all_variables(self.model), *self._registry]
        self._distribution.placements.layout_map.check_keys(variables)

    def _adopt(self) -> None:
        variable_creator.adopt(
            all_variables(self.model), self._mesh, self._distribution.placements
        )


def find_binding(model: keras.Model) -> Binding | None:
    """Returns a model's binding, or None if it is not bound to a strategy."""
    return vars(model).get(BINDING)
