"""A call of one of a model's loops, as Keras's own loop is to see it."""

import inspect
from typing import Any

import keras

from keras_strategies.keras_bridge.model_hooks import loops_owner

_COUNTS = ("epochs", "initial_epoch", "validation_freq")
# What a class that passes keywords on is given, also where it was not before.
_KEPT = ("callbacks", "initial_epoch", "verbose")


class Call:
    """A call of one of a model's loops, its arguments by name."""

    def __init__(
        self,
        model: keras.Model,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.name = name
        self._model = model
        self._loop = getattr(type(model), name)
        signature = inspect.signature(self._loop)
        of_keras = inspect.signature(vars(loops_owner(name))[name])
        if "x" not in signature.parameters:
            # A class that passes all on: def fit(self, *args, **kwargs).
            signature = of_keras
        self._defaults = {
            key: parameter.default
            for key, parameter in of_keras.parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }
        self._passes_on = False
        bound = signature.bind(model, *args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        arguments.pop(next(iter(arguments)))
        self.keywords: dict[str, Any] = {}
        for key, parameter in signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                # def fit(self, x, y, **kwargs): they are Keras's.
                self._passes_on = True
                self.keywords |= arguments.pop(key, {})
        self.keywords |= arguments

    def __getitem__(self, name: str) -> Any:
        return self.keywords.get(name, self._defaults.get(name))

    def facts(self) -> dict[str, Any]:
        """What all processes must give it alike, to stay together."""
        facts = {n: self[n] for n in _COUNTS if n in self.keywords}
        if "validation_data" in self.keywords:
            facts["validation"] = self["validation_data"] is not None
        return facts

    def set(self, **keywords: Any) -> None:
        """Replaces arguments, those that the loop has."""
        self.keywords |= {
            k: v
            for k, v in keywords.items()
            if k in self.keywords or (self._passes_on and k in _KEPT)
        }

    def set_feed(self, feed: Any) -> None:
        """Replaces the data; what the feed has taken in is left out."""
        self.set(x=feed, y=None, sample_weight=None, class_weight=None)

    def hush(self) -> None:
        """Leaves the progress to another process."""
        self.set(verbose=0)

    def run(self) -> Any:
        """Calls the class's own loop."""
        return self._loop(self._model, **self.keywords)
