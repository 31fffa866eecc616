"""Hearing of models that are made and compiled while a scope is open.

No public hook of Keras sees a model then, so the methods are wrapped, for as
long as a scope is open in any thread.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.trainers.trainer import Trainer

from keras_strategies.keras_bridge import batch_norm

LOOPS = (
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
)
"""The methods of a model that take data."""

ON_USE = ("compile", "predict", "predict_on_batch")
"""The attributes that `bind_on_use` sets on a model: what can come first."""

STRATEGY = "distribute_strategy"
"""The attribute of a model that is its strategy, as tf.keras has it."""

_patch_lock = threading.RLock()
_num_open = 0
# Where, its name, what it is while a scope is open, and what it was.
_patches: list[tuple[Any, str, Any, Any]] = []


@contextlib.contextmanager
def keras_hooks(
    on_init: Callable[[keras.Model], None],
    before_compile: Callable[[keras.Model], None],
    on_compile: Callable[[keras.Model], None],
    in_loop: Callable[
        [keras.Model, str], contextlib.AbstractContextManager[None]
    ],
    is_active: Callable[[], bool],
) -> Iterator[None]:
    """Wraps what makes, compiles and runs models, and BatchNormalization.

    Process-wide, so all ask about the calling thread: `on_init` is told of
    every model that is made, `before_compile` may refuse a model,
    `on_compile` is told of every model that was compiled, `in_loop` may
    refuse one of `LOOPS`, and is in place while it runs, `is_active` says
    whether the thread is in a scope.
    """
    global _num_open
    norm = keras.layers.BatchNormalization
    with _patch_lock:
        if _num_open == 0:
            _patch(Trainer, "__init__", lambda f: _telling(f, None, on_init))
            _patch(
                Trainer,
                "compile",
                lambda f: _telling(f, before_compile, on_compile),
            )
            _patch(
                norm,
                "__init__",
                lambda f: batch_norm.accepting_init(f, is_active),
            )
            for name in LOOPS:
                _patch(
                    loops_owner(name),
                    name,
                    functools.partial(_within, name, in_loop),
                )
        _num_open += 1
    try:
        yield
    finally:
        with _patch_lock:
            _num_open -= 1
            if _num_open == 0:
                _unpatch()


def _patch(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    original = vars(owner)[name]
    wrapper = wrap(original)
    setattr(owner, name, wrapper)
    _patches.append((owner, name, wrapper, original))


def _unpatch() -> None:
    for owner, name, wrapper, original in _patches:
        # What somebody else has put there since is theirs.
        if vars(owner).get(name) is wrapper:
            setattr(owner, name, original)
    _patches.clear()


def loops_owner(name: str) -> type:
    """The class that has Keras's own method of one of `LOOPS`.

    It is a base of `keras.Model`, where others' patches are left alone.
    """
    bases = keras.Model.__mro__[1:]
    return next(base for base in bases if name in vars(base))


def bind_on_use(
    model: keras.Model,
    strategy: Any,
    attach: Callable[[keras.Model], Any],
    is_bound: Callable[[keras.Model], bool],
) -> None:
    """Makes a model that was made in a scope bound wherever it is used first.

    Args:
      model: The model, whose `compile`, `predict` and `predict_on_batch`,
        which needs no compiling, are set to some of its own.
      strategy: Whose scope it is.
      attach: Binds the model.
      is_bound: Whether it is bound already, as by a scope's `compile`.
    """

    def compile_and_attach(*args: Any, **kwargs: Any) -> Any:
        result = type(model).compile(model, *args, **kwargs)
        if not is_bound(model):
            attach(model)
        return result

    def attaching(name: str) -> Callable[..., Any]:
        def attach_and_call(*args: Any, **kwargs: Any) -> Any:
            attach(model)
            # Now it is the binding's.
            return getattr(model, name)(*args, **kwargs)

        return attach_and_call

    for name in ON_USE:
        if name == "compile":
            used = compile_and_attach
        elif _is_keras_own(type(model), name):
            used = attaching(name)
        else:
            # It takes what its author wants it to.
            continue
        functools.update_wrapper(used, getattr(type(model), name))
        object.__setattr__(model, name, used)
    object.__setattr__(model, STRATEGY, strategy)


def is_bound_on_use(model: keras.Model) -> bool:
    """Whether `bind_on_use` has seen it."""
    return "compile" in vars(model)


def _is_keras_own(kind: type, name: str) -> bool:
    """Whether a class of models has a method as Keras has it."""
    owner = next(base for base in kind.__mro__ if name in vars(base))
    return owner in keras.Model.__mro__


def takes_data(kind: type, name: str) -> bool:
    """Whether a class's method takes what Keras's of its name takes."""
    method = getattr(kind, name)
    if not callable(method):
        return False
    parameters = inspect.signature(method).parameters
    return "x" in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD
        for parameter in parameters.values()
    )


def _within(
    name: str,
    context: Callable[
        [keras.Model, str], contextlib.AbstractContextManager[None]
    ],
    method: Callable[..., Any],
) -> Callable[..., Any]:
    @functools.wraps(method)
    def call_within(model: Any, *args: Any, **kwargs: Any) -> Any:
        with context(model, name):
            return method(model, *args, **kwargs)

    return call_within


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
