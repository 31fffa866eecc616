"""A call of one of a model's loops, as Keras's own loop is to see it."""

import inspect
from typing import Any

import keras

from keras_strategies.keras_bridge.loops import scope_hooks

# Of the epochs that all processes must run alike.
_COUNTS = ("epochs", "initial_epoch", "validation_freq")


class Call:
    """A call of one of Keras's loops of a model, its arguments by name."""

    def __init__(
        self,
        model: keras.Model,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.name = name
        self._model = model
        self._loop = scope_hooks.keras_loop(name)
        signature = inspect.signature(self._loop)
        bound = signature.bind(model, *args, **kwargs)
        bound.apply_defaults()
        self.keywords: dict[str, Any] = dict(bound.arguments)
        self.keywords.pop(next(iter(signature.parameters)))
        # fit, say, has none; evaluate takes those that only Keras passes.
        for key, parameter in signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                self.keywords |= self.keywords.pop(key, {})

    def __getitem__(self, name: str) -> Any:
        return self.keywords.get(name)

    def facts(self) -> dict[str, Any]:
        """What all processes must give it alike, to stay together."""
        facts = {n: self[n] for n in _COUNTS if n in self.keywords}
        if "validation_data" in self.keywords:
            facts["validation"] = self["validation_data"] is not None
        return facts

    def set(self, **keywords: object) -> None:
        """Replaces arguments, those that the loop has."""
        self.keywords |= {
            k: v for k, v in keywords.items() if k in self.keywords
        }

    def set_feed(self, feed: object) -> None:
        """Replaces the data; what the feed has taken in is left out."""
        self.set(x=feed, y=None, sample_weight=None, class_weight=None)

    def run(self) -> Any:
        """Calls Keras's own loop.

        Returns:
          What the loop returns: a `History`, logs or outputs.
        """
        with scope_hooks.routed(self._model, None):
            return self._loop(self._model, **self.keywords)
