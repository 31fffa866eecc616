"""Patches of Keras, keras-hub and JAX while a script is planned.

Pretrained models are created without their weights, which are not downloaded,
because a plan needs no values. Configs and other files of presets are.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras

from keras_strategies.planning.capture.errors import PlanError
from keras_strategies.planning.seam import (
    skip_weights,
)


class LibraryPatches:
    """Patches of libraries, while a script is planned."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._has_hub = False

    @contextlib.contextmanager
    def install(self) -> Iterator[None]:
        """Patches the libraries while the block runs."""
        with self._stack:
            for owner, name, value in (
                (keras.Model, "make_train_function", _refuse_plain),
                (jax.distributed, "initialize", lambda *args, **kwargs: None),
                *skip_weights(),
            ):
                self._set(owner, name, value)
            self.patch_hub()
            yield

    def patch_hub(self) -> None:
        """Patches keras-hub if the script has imported it.

        It is not imported here, since that takes seconds.
        """
        hub: Any = sys.modules.get("keras_hub")
        if hub is None or self._has_hub:
            return
        self._has_hub = True
        for owner in (hub.models.Backbone, hub.models.Task):
            create = vars(owner)["from_preset"].__func__
            self._set(owner, "from_preset", _without_weights(create))

    def _set(self, owner: Any, name: str, value: object) -> None:
        """Sets an attribute until `install` ends."""
        before = vars(owner).get(name, getattr(owner, name))
        self._stack.callback(setattr, owner, name, before)
        setattr(owner, name, value)


def _without_weights(create: Callable[..., Any]) -> Any:
    @functools.wraps(create)
    def from_preset(
        cls: type, preset: Any, load_weights: bool = True, **kwargs: Any
    ) -> Any:
        del load_weights
        return create(cls, preset, load_weights=False, **kwargs)

    return classmethod(from_preset)


def _refuse_plain(model: keras.Model, *args: object, **kwargs: object) -> None:
    raise PlanError(
        "A planned script must first train a strategy's model. Received: a "
        f"script that first trains {model.name!r}, which was not created or "
        "compiled in a strategy's scope. Create and compile it in the scope."
    )
