"""Hooks for models that are created, compiled or run in a scope.

Keras has no public hook for a model's creation or compilation, so the methods
are wrapped as long as a scope is open in any thread. Keras's `fit`, `evaluate`,
`predict` and `*_on_batch` are wrapped during that time, too, and also while a
method that overrides one of them runs, because it may call Keras's method.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import keras

from keras_strategies.fit.callbacks.chief_callbacks import CONTROLLERS
from keras_strategies.hooks import batch_norm
from keras_strategies.keras_bridge.keras_names import TRAINER
from keras_strategies.keras_bridge.patches import Patch, Patches, replacement
from keras_strategies.keras_bridge.ported_code import warn_of_tensorflow_scope
from keras_strategies.names.phases import EVALUATE, Phase
from keras_strategies.passes.traces import check_untransformed
from keras_strategies.spmd.identity import temporary_attribute

LOOPS = (
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
)
"""The methods of a model that receive data and train, evaluate or predict."""

ON_USE = ("compile", "predict", "predict_on_batch")
"""Methods by which a model may first be used; `bind_on_use` replaces them."""

BINDING = "_ks_binding"
"""The name of a model's attribute that stores its `Binding`."""

STRATEGY = "distribute_strategy"
"""The name of a model's attribute that stores its strategy, as in tf.keras."""

Route = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
"""A function that runs one of `LOOPS` in place of Keras's method. Its arguments
are the method's name, positional arguments and keyword arguments."""

_Method = Callable[..., Any]
_InLoop = Callable[[keras.Model, str], contextlib.AbstractContextManager[None]]


def _find_scope_patches(
    entered: Callable[[], Any], before_compile: Callable[[keras.Model], None]
) -> Iterator[Patch]:
    norm = keras.layers.BatchNormalization

    @replacement
    def create(
        init: _Method, model: keras.Model, /, *args: Any, **kwargs: Any
    ) -> None:
        init(model, *args, **kwargs)
        if (strategy := entered()) is not None:
            bind_on_use(model, strategy)

    @replacement
    def compile_model(
        method: _Method, model: keras.Model, /, *args: Any, **kwargs: Any
    ) -> None:
        before_compile(model)
        method(model, *args, **kwargs)
        if (strategy := entered()) is not None:
            strategy.attach(model)

    yield TRAINER, "__init__", create
    yield TRAINER, "compile", compile_model
    yield norm, "__init__", lambda f: batch_norm.accept_synchronized(f, entered)


def _find_loop_patches() -> Iterator[Patch]:
    for name in LOOPS:
        call = replacement(functools.partial(_call_loop, name))
        yield find_loop_owner(name), name, call


_scope_patches = Patches(_find_scope_patches)
_loop_patches = Patches(_find_loop_patches)
# The `in_loop` arguments of `keras_hooks`, one for each open scope; the first
# is for loops outside of all scopes.
_in_loop: list[_InLoop] = [lambda model, name: contextlib.nullcontext()]


class _Routes(threading.local):
    """This thread's replacements for `fit`, `evaluate` etc., by model id."""

    models: Mapping[int, Route | None] = {}


_routes = _Routes()


@contextlib.contextmanager
def keras_hooks(
    entered: Callable[[], Any],
    before_compile: Callable[[keras.Model], None],
    in_loop: _InLoop,
) -> Iterator[None]:
    """Patches how models are created, compiled and run while the block runs.

    The constructor of BatchNormalization is wrapped, too. The hooks are called
    in all threads, so each hook checks which scope the calling thread is in.

    Args:
      entered: A function that returns the strategy whose scope the calling
        thread is in, or None. Every model that is created or compiled in that
        scope is bound to the strategy.
      before_compile: Called before a model is compiled; may raise.
      in_loop: Makes the context manager in which a method such as `fit` runs;
        may raise.
    """
    with _scope_patches.hold(entered, before_compile), _loop_patches.hold():
        _in_loop.append(in_loop)
        try:
            yield
        finally:
            _in_loop.remove(in_loop)


@contextlib.contextmanager
def route_loops(model: keras.Model, route: Route | None) -> Iterator[None]:
    """Redirects `fit`, `evaluate` etc. of a model while the block runs.

    Calls in other threads are not redirected.

    Args:
      model: The model.
      route: Called in place of each of Keras's methods in `LOOPS`. If None,
        Keras's methods run.
    """
    models = {**_routes.models, id(model): route}
    with (
        _loop_patches.hold() if route else contextlib.nullcontext(),
        temporary_attribute(_routes, "models", models),
    ):
        yield


def find_loop_owner(name: str) -> type:
    """Returns the class in which Keras defines a method such as `fit`.

    The class is a base of `keras.Model`, so patches that other libraries make
    to `keras.Model` itself are not affected.
    """
    bases = keras.Model.__mro__[1:]
    return next(base for base in bases if name in vars(base))


def get_keras_loop(name: str) -> Callable[..., Any]:
    """Returns Keras's definition of a method such as `fit`."""
    loop: Callable[..., Any] = vars(find_loop_owner(name))[name]
    return loop


def find_overridden_loop(
    model: keras.Model, name: str
) -> Callable[..., Any] | None:
    """Returns a class's override of a method such as `fit`, or None.

    The class that defines the method is compared, not only the method, because
    another thread may be wrapping Keras's method at the same time.
    """
    kind = type(model)
    owner = next(base for base in kind.__mro__ if name in vars(base))
    loop = vars(owner)[name]
    if owner is find_loop_owner(name) or loop is get_keras_loop(name):
        return None
    # `__get__` also binds static and class methods.
    bound: Callable[..., Any] = loop.__get__(model, kind)
    return bound


def bind_on_use(model: keras.Model, strategy: Any) -> None:
    """Arranges that a model is bound to a strategy at its first use.

    The first use may be `compile`, or `predict` and `predict_on_batch`, which
    work without `compile`. These methods are replaced by attributes of the
    model.

    Args:
      model: The model, which was created in the strategy's scope.
      strategy: The strategy.
    """

    def attach_and_call(name: str, /, *args: Any, **kwargs: Any) -> Any:
        result = None
        if name == "compile":
            result = type(model).compile(model, *args, **kwargs)
        # If a scope is open, the wrapped `compile` has already bound the model.
        if BINDING not in vars(model):
            strategy.attach(model)
        if name == "compile":
            return result
        # The binding has replaced the attribute by now.
        return getattr(model, name)(*args, **kwargs)

    replace_methods(model, ON_USE, attach_and_call)
    object.__setattr__(model, STRATEGY, strategy)


def replace_methods(
    model: keras.Model, names: Iterable[str], call: Callable[..., Any]
) -> None:
    """Sets attributes of a model that replace methods of its class.

    Args:
      model: The model.
      names: The names of the methods.
      call: A function of a method's name and of the arguments of its calls.
    """
    for name in names:
        method = getattr(type(model), name)
        # A subclass may use the name for something that is not a method.
        if callable(method):
            replaced = functools.partial(call, name)
            functools.update_wrapper(replaced, method)
            object.__setattr__(model, name, replaced)


def is_bound_on_use(model: keras.Model) -> bool:
    """Returns whether a model will be bound when it is first used."""
    return "compile" in vars(model)


def _call_loop(
    name: str, method: _Method, model: keras.Model, /, *args: Any, **kwargs: Any
) -> Any:
    """Calls a method of `LOOPS`, or its replacement in this thread."""
    route = _routes.models.get(id(model))
    if route is not None:
        return route(name, args, kwargs)
    with _in_loop[-1](model, name):
        return method(model, *args, **kwargs)


def is_built(model: keras.Model) -> bool:
    """Returns whether all layers of a model have been built."""
    return all(layer.built for layer in model._flatten_layers())


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
        self._loop = functools.partial(get_keras_loop(name), model)
        bound = inspect.signature(self._loop).bind(*args, **kwargs)
        bound.apply_defaults()
        self.keywords: dict[str, Any] = dict(bound.arguments)
        # `evaluate` has **kwargs, for arguments that Keras uses internally.
        self.keywords |= self.keywords.pop("kwargs", {})

    def __getitem__(self, name: str) -> Any:
        return self.keywords.get(name)

    def facts(self) -> dict[str, Any]:
        """Returns the arguments that must be equal in all processes."""
        facts = {n: self[n] for n in _COUNTS if n in self.keywords}
        if "validation_data" in self.keywords:
            facts["validation"] = self["validation_data"] is not None
        facts["run_eagerly"] = self._model.run_eagerly
        flat = keras.tree.flatten(self["callbacks"] or ())
        found = [c for c in flat if isinstance(c, CONTROLLERS)]
        facts["callbacks"] = [type(callback).__name__ for callback in found]
        return facts

    def set(self, **keywords: object) -> None:
        """Replaces arguments; ignores names that the method does not accept."""
        known = keywords.keys() & self.keywords.keys()
        self.keywords |= {name: keywords[name] for name in known}

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
            route_loops(self._model, None),
        ):
            try:
                return self._loop(**self.keywords)
            except BaseException as error:
                add_memory_note(error)
                # Keras's `fit` does so, but its other methods do not.
                self._model.jax_state_sync()
                raise


def add_memory_note(error: BaseException) -> None:
    """Adds a note to an error, if it says that a GPU's memory is exhausted."""
    text = str(error) if isinstance(error, jax.errors.JaxRuntimeError) else ""
    if "RESOURCE_EXHAUSTED" in text and jax.default_backend() == "gpu":
        error.add_note(
            "If another process uses this GPU, it may hold most of its memory: "
            "JAX takes 75 percent when it starts. `nvidia-smi` lists the "
            "processes. Use different GPUs (`CUDA_VISIBLE_DEVICES`), or set "
            "XLA_PYTHON_CLIENT_MEM_FRACTION in both processes. Otherwise use "
            "fewer rows; `strategy.plan` shows how much memory a step needs."
        )
