"""Hearing of models that are made and compiled while a scope is open.

No public hook of Keras sees a model then, so the methods are wrapped, for as
long as a scope is open in any thread.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.trainers.trainer import Trainer

from keras_strategies.keras_bridge import batch_norm

COMPILE = "compile"
"""The attribute that `bind_on_compile` sets on a model."""

_patch_lock = threading.RLock()
_num_open = 0
_originals: tuple[Any, Any, Any] | None = None


@contextlib.contextmanager
def keras_hooks(
    on_init: Callable[[keras.Model], None],
    before_compile: Callable[[keras.Model], None],
    on_compile: Callable[[keras.Model], None],
    is_active: Callable[[], bool],
) -> Iterator[None]:
    """Wraps making and compiling models, and BatchNormalization's constructor.

    Process-wide, so all ask about the calling thread: `on_init` is told of
    every model that is made, `before_compile` may refuse a model,
    `on_compile` is told of every model that was compiled, `is_active` says
    whether the thread is in a scope.
    """
    global _num_open, _originals
    norm = keras.layers.BatchNormalization
    with _patch_lock:
        if _num_open == 0:
            _originals = (Trainer.__init__, Trainer.compile, norm.__init__)
            Trainer.__init__ = _telling(Trainer.__init__, None, on_init)
            Trainer.compile = _telling(
                Trainer.compile, before_compile, on_compile
            )
            norm.__init__ = batch_norm.accepting_init(norm.__init__, is_active)
        _num_open += 1
    try:
        yield
    finally:
        with _patch_lock:
            _num_open -= 1
            if _num_open == 0 and _originals is not None:
                Trainer.__init__, Trainer.compile, norm.__init__ = _originals
                _originals = None


def bind_on_compile(
    model: keras.Model,
    attach: Callable[[keras.Model], Any],
    is_bound: Callable[[keras.Model], bool],
) -> None:
    """Makes a model that was made in a scope bound wherever it is compiled.

    Args:
      model: The model, whose `compile` is set to one of its own.
      attach: Binds the model.
      is_bound: Whether it is bound already, as by a scope's `compile`.
    """

    def compile_and_attach(*args: Any, **kwargs: Any) -> Any:
        result = type(model).compile(model, *args, **kwargs)
        if not is_bound(model):
            attach(model)
        return result

    functools.update_wrapper(compile_and_attach, type(model).compile)
    object.__setattr__(model, COMPILE, compile_and_attach)


def _telling(
    method: Callable[..., Any],
    before: Callable[[keras.Model], None] | None,
    after: Callable[[keras.Model], None],
) -> Callable[..., Any]:
    @functools.wraps(method)
    def call_and_tell(model: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(model)
        result = method(model, *args, **kwargs)
        after(model)
        return result

    return call_and_tell


def is_built(model: keras.Model) -> bool:
    """Whether all layers of a model have their variables."""
    return all(layer.built for layer in model._flatten_layers())
