"""Hooks that see models made, compiled and run in a scope.

No public hook of Keras sees a model that is made or compiled, so the methods
are wrapped, for as long as a scope is open in any thread. Keras's own loops
are wrapped then too, and while a loop that a class of models has of its own
runs: what it calls is Keras's.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_strategies.keras_bridge.hooks import batch_norm
from keras_strategies.keras_bridge.keras_names import TRAINER
from keras_strategies.keras_bridge.patches import Patch, Patches

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

BINDING = "_ks_binding"
"""The attribute of a model that is its `Binding`."""

STRATEGY = "distribute_strategy"
"""The attribute of a model that is its strategy, as tf.keras has it."""

Route = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
"""What runs one of `LOOPS`, by its name, instead of Keras's own."""

_InLoop = Callable[[keras.Model, str], contextlib.AbstractContextManager[None]]


def _in_scope(
    entered: Callable[[], Any], before_compile: Callable[[keras.Model], None]
) -> Iterator[Patch]:
    norm = keras.layers.BatchNormalization

    def attach(model: keras.Model, strategy: Any) -> None:
        strategy.attach(model)

    yield TRAINER, "__init__", lambda f: _binding(f, entered, bind_on_use)
    yield (
        TRAINER,
        "compile",
        lambda f: _binding(f, entered, attach, before_compile),
    )
    yield norm, "__init__", lambda f: batch_norm.accepting_init(f, entered)


def _loops() -> Iterator[Patch]:
    for name in LOOPS:
        yield loops_owner(name), name, functools.partial(_routing, name)


_scope_patches = Patches(_in_scope)
_loop_patches = Patches(_loops)
# Of the scopes that are open.
_in_loop: list[_InLoop] = []


class _Routes(threading.local):
    """What runs Keras's own loops of models, in this thread."""

    def __init__(self) -> None:
        self.of_models: dict[int, Route | None] = {}


_routes = _Routes()


@contextlib.contextmanager
def keras_hooks(
    entered: Callable[[], Any],
    before_compile: Callable[[keras.Model], None],
    in_loop: _InLoop,
) -> Iterator[None]:
    """Wraps what makes, compiles and runs models, and BatchNormalization.

    Process-wide, so all ask about the calling thread.

    Args:
      entered: Returns the strategy whose scope the thread is in, or None. It
        is bound to every model that is made or compiled there.
      before_compile: May refuse a model that is to be compiled.
      in_loop: May refuse one of `LOOPS`, and is in place while it runs.
    """
    with _scope_patches.held(entered, before_compile), _loop_patches.held():
        _in_loop.append(in_loop)
        try:
            yield
        finally:
            _in_loop.remove(in_loop)


@contextlib.contextmanager
def routed(model: keras.Model, route: Route | None) -> Iterator[None]:
    """In which Keras's own loops of a model, in this thread, go by a route.

    Args:
      model: The model.
      route: Is called for each of them. None: they are Keras's.
    """
    routes, key = _routes.of_models, id(model)
    outer = routes.get(key)
    with _loop_patches.held() if route else contextlib.nullcontext():
        routes[key] = route
        try:
            yield
        finally:
            if outer is None:
                routes.pop(key, None)
            else:
                routes[key] = outer


def loops_owner(name: str) -> type:
    """The class that has Keras's own method of one of `LOOPS`.

    It is a base of `keras.Model`, where others' patches are left alone.
    """
    bases = keras.Model.__mro__[1:]
    return next(base for base in bases if name in vars(base))


def keras_loop(name: str) -> Callable[..., Any]:
    """Keras's own method of one of `LOOPS`."""
    loop: Callable[..., Any] = vars(loops_owner(name))[name]
    return loop


def own_loop(model: keras.Model, name: str) -> Callable[..., Any] | None:
    """A model's loop where its class has one of its own; None: Keras's.

    Told by the class that has it: another thread may wrap Keras's meanwhile.
    """
    kind = type(model)
    owner = next(base for base in kind.__mro__ if name in vars(base))
    loop = vars(owner)[name]
    if owner is loops_owner(name) or loop is keras_loop(name):
        return None
    # Also of a static or class method.
    bound: Callable[..., Any] = loop.__get__(model, kind)
    return bound


def bind_on_use(model: keras.Model, strategy: Any) -> None:
    """Makes a model that was made in a scope bound wherever it is used first.

    Args:
      model: The model, whose `compile`, `predict` and `predict_on_batch`,
        which needs no compiling, are set to some of its own.
      strategy: Whose scope it is.
    """

    def compile_and_attach(*args: Any, **kwargs: Any) -> Any:
        result = type(model).compile(model, *args, **kwargs)
        # Bound already by a scope's `compile`?
        if BINDING not in vars(model):
            strategy.attach(model)
        return result

    def attaching(name: str) -> Callable[..., Any]:
        def attach_and_call(*args: Any, **kwargs: Any) -> Any:
            strategy.attach(model)
            # Now it is the binding's.
            return getattr(model, name)(*args, **kwargs)

        return attach_and_call

    for name in ON_USE:
        if name == "compile":
            used = compile_and_attach
        elif callable(getattr(type(model), name)):
            used = attaching(name)
        else:
            continue
        functools.update_wrapper(used, getattr(type(model), name))
        object.__setattr__(model, name, used)
    object.__setattr__(model, STRATEGY, strategy)


def is_bound_on_use(model: keras.Model) -> bool:
    """Whether `bind_on_use` has seen it."""
    return "compile" in vars(model)


def _routing(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        route = _routes.of_models.get(id(model))
        if route is not None:
            return route(name, args, kwargs)
        with contextlib.ExitStack() as stack:
            if _in_loop:
                stack.enter_context(_in_loop[-1](model, name))
            return method(model, *args, **kwargs)

    return call


def _binding(
    method: Callable[..., Any],
    entered: Callable[[], Any],
    bind: Callable[[keras.Model, Any], None],
    before: Callable[[keras.Model], None] = lambda model: None,
) -> Callable[..., Any]:
    """Wraps a method so that it binds its model to the scope's strategy."""

    @functools.wraps(method)
    def call_and_bind(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        before(model)
        result = method(model, *args, **kwargs)
        if (strategy := entered()) is not None:
            bind(model, strategy)
        return result

    return call_and_bind


def is_built(model: keras.Model) -> bool:
    """Whether all layers of a model have their variables."""
    return all(layer.built for layer in model._flatten_layers())
