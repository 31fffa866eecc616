"""The scope of a strategy, which installs the hooks into Keras."""

import contextlib
import functools
from typing import Any, NoReturn

import keras

from keras_strategies.fit import binding as binding_lib
from keras_strategies.fit import scope_hooks
from keras_strategies.hooks import on_read
from keras_strategies.keras_bridge.ported_code import warn_of_tensorflow_scope
from keras_strategies.names import dry_run
from keras_strategies.strategy import current
from keras_strategies.variables import model_variables, variable_creator


class Scope:
    """The context manager of `Strategy.scope`. It can be entered repeatedly."""

    def __init__(self, strategy: current.AnyStrategy) -> None:
        self._strategy = strategy
        # For each open `with` block: its exit stack, and the innermost variable
        # creator. `__exit__` compares the creator to detect wrong nesting.
        self._open: list[tuple[contextlib.ExitStack, Any]] = []

    def __enter__(self) -> current.AnyStrategy:
        strategy, runtime = self._strategy, self._strategy._runtime
        current.check_not_mixing(strategy)
        current.check_cross_replica("scope")
        _check_keras_distribution()
        create = functools.partial(on_read.create, runtime.mesh)
        hooks = current.get_entered_strategy, _check_free, _enter_loop
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            current.stack.entered.append(strategy)
            stack.callback(current.stack.entered.pop)
            enter(variable_creator.distribution_scope(runtime.distribution))
            model_variables.note_devices(runtime.mesh)
            enter(variable_creator.variable_creator_scope(create))
            enter(scope_hooks.keras_hooks(*hooks))
            if (dry := dry_run.get()) is not None:
                enter(dry.scope())
            if current.stack.num_default_scopes:
                enter(variable_creator.variable_creator_scope(self._refuse))
            innermost = variable_creator.innermost_creator()
            self._open.append((stack.pop_all(), innermost))
        return strategy

    def __exit__(self, *error: Any) -> None:
        if variable_creator.innermost_creator() is not self._open[-1][1]:
            raise RuntimeError(
                "Variable creator scope nesting error: scopes must be exited "
                "in the reverse order of entering them. Received: the exit of "
                f"a scope of {self._strategy!r}, inside of which another scope "
                "or a `variable_creator_scope` is open. Exit the inner one "
                "first."
            )
        # After an error, no process must wait for the others.
        self._open.pop()[0].__exit__(*(error or (None, None, None)))

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        current.refuse_mixing(self._strategy, "the default strategy")


def _check_keras_distribution() -> None:
    """Raises if a distribution of Keras's own is set."""
    distribution = keras.distribution.distribution()
    if distribution is not None and not isinstance(
        distribution, variable_creator.ReplicaDistribution
    ):
        raise RuntimeError(
            "A strategy's scope cannot be entered while another distribution "
            "is set in Keras, because both would place the variables. "
            f"Received: {type(distribution).__name__}. Remove the call of "
            "`keras.distribution.set_distribution`, or pass it None."
        )


def _check_free(model: keras.Model) -> None:
    """Raises if a model to be compiled belongs to another strategy."""
    warn_of_tensorflow_scope()
    strategy = current.get_entered_strategy()
    if strategy is not None:
        strategy._check_free(model)


def _enter_loop(
    model: keras.Model, name: str
) -> contextlib.AbstractContextManager[None]:
    """Raises if `fit`, `evaluate` or `predict` gets an unbound model.

    Keras would place the batches of such a model, and the state that the method
    creates, on the scope's devices; the model would be unusable afterwards. For
    a bound model, the returned context manager clears Keras's distribution,
    because the model's binding places the batches.
    """
    strategy = current.get_entered_strategy()
    if strategy is None:
        return contextlib.nullcontext()
    binding = binding_lib.find_binding(model)
    if binding is not None:
        binding.check_context()
        return variable_creator.distribution_scope(None)
    if scope_hooks.is_bound_on_use(model) and not name.startswith("predict"):
        # Keras itself raises an error, because the model is not compiled.
        return contextlib.nullcontext()
    raise RuntimeError(
        "A model that is used in a strategy's scope must have been created or "
        f"compiled in it. Received: a call of the class's `{name}` in the "
        f"scope of {type(strategy).__name__}, on the unbound model "
        f"{model.name!r}. Compile the model in the scope, call "
        f"`strategy.attach(model)` before `{name}`, or leave the scope to use "
        "one device."
    )
