"""A call of `fit`, `evaluate` or `predict` whose arguments can be replaced."""

import contextlib
import inspect
from typing import Any

import jax
import keras

from keras_strategies.fit import scope_hooks
from keras_strategies.gpu.memory_note import add_memory_note
from keras_strategies.keras_bridge.ported_code import warn_of_tensorflow_scope
from keras_strategies.names.phases import EVALUATE, Phase
from keras_strategies.passes.traces import check_untransformed

# All processes must run the same epochs.
_COUNTS = ("epochs", "initial_epoch", "validation_freq")


class Call:
    """A call of Keras's `fit`, `evaluate` or `predict` for a model.

    `call[name]` is the argument `name`, or None if the method does not have it.
    """

    def __init__(
        self,
        model: keras.Model,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        check_untransformed(name)
        warn_of_tensorflow_scope()
        self.name = name
        self._model = model
        self._loop = scope_hooks.get_keras_loop(name)
        signature = inspect.signature(self._loop)
        bound = signature.bind(model, *args, **kwargs)
        bound.apply_defaults()
        self.keywords: dict[str, Any] = dict(bound.arguments)
        self.keywords.pop(next(iter(signature.parameters)))
        # `evaluate` has **kwargs, for arguments that Keras uses internally.
        for key, parameter in signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                self.keywords |= self.keywords.pop(key, {})

    def __getitem__(self, name: str) -> Any:
        return self.keywords.get(name)

    def facts(self) -> dict[str, Any]:
        """Returns the arguments that must be equal in all processes."""
        facts = {n: self[n] for n in _COUNTS if n in self.keywords}
        if "validation_data" in self.keywords:
            facts["validation"] = self["validation_data"] is not None
        facts["run_eagerly"] = self._model.run_eagerly
        return facts

    def set(self, **keywords: object) -> None:
        """Replaces arguments; ignores names that the method does not accept."""
        self.keywords |= {
            k: v for k, v in keywords.items() if k in self.keywords
        }

    def set_feed(self, feed: object) -> None:
        """Replaces the data arguments by a feed.

        The feed also yields the targets and the weights.
        """
        self.set(x=feed, y=None, sample_weight=None, class_weight=None)

    def run(self) -> Any:
        """Calls Keras's method with the current arguments.

        Returns:
          The method's result: a `History`, logs or outputs.
        """
        is_training = self.name in ("fit", "train_on_batch")
        with (
            contextlib.nullcontext() if is_training else Phase(EVALUATE),
            scope_hooks.route_loops(self._model, None),
        ):
            try:
                return self._loop(self._model, **self.keywords)
            except jax.errors.JaxRuntimeError as error:
                add_memory_note(error)
                raise
