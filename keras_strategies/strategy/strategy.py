"""The behaviour that all strategies share."""

from typing import Any

import keras

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.keras_bridge import binding as binding_lib
from keras_strategies.keras_bridge.layout import check_home
from keras_strategies.strategy import old_names
from keras_strategies.strategy.custom_loops import CustomLoops
from keras_strategies.strategy.extended import StrategyExtended
from keras_strategies.strategy.runner import Runner
from keras_strategies.strategy.runtime import Runtime
from keras_strategies.strategy.scope import Scope


class Strategy(CustomLoops):
    """Distributes Keras models over devices; the base of all strategies.

    A model that is compiled in `scope()` trains, evaluates and predicts on
    every device, in the scope and after it. Losses, metrics and weights are
    those of one device given the same global batches.

    Args:
      mesh: The replicas. Users make a concrete strategy instead.
      outputs_on_chief: Whether `predict` returns rows in the chief alone.
    """

    def __init__(
        self, mesh: ReplicaMesh, *, outputs_on_chief: bool = False
    ) -> None:
        self._runtime = Runtime.over(mesh, outputs_on_chief=outputs_on_chief)
        self._runner = Runner(self, mesh)
        self._extended = StrategyExtended(self._runtime, self._runner)

    @property
    def extended(self) -> StrategyExtended:
        """Further methods, for libraries."""
        return self._extended

    @property
    def cluster_resolver(self) -> Any:
        """The cluster this strategy was made for; none on one machine."""
        return

    def scope(self) -> Scope:
        """Makes the strategy current for a `with` block of this thread.

        In the block every Keras variable is created on the strategy's
        devices, and every model that is made or compiled is bound to the
        strategy: one made here also if it is compiled later, outside.
        Scopes of one strategy may be nested, and entered again.

        Returns:
          A context manager that yields the strategy.

        Raises:
          RuntimeError: (on entering) another strategy's scope is open, or a
            replica's function is running.

        Example:
          ```python
          strategy = ks.MirroredStrategy()
          with strategy.scope():
              model = keras.Sequential([keras.layers.Dense(1)])
              model.compile("adam", "mse")
          model.fit(x, y, batch_size=256)
          ```
        """
        return Scope(self)

    def attach(self, model: keras.Model) -> keras.Model:
        """Binds a model without a scope; what `compile` in `scope` does.

        Args:
          model: A model, built or not, compiled or not yet. Its variables
            are moved to the strategy's devices.

        Returns:
          The model.

        Raises:
          ValueError: the model's variables lie on another strategy's
            devices.
        """
        _check_model("attach", model)
        self._check_free(model)
        existing = binding_lib.binding_of(model)
        binding = existing or binding_lib.Binding(
            model,
            owner=self,
            mesh=self._runtime.mesh,
            distribution=self._runtime.distribution,
            registry=self._runtime.registry,
            outputs_on_chief=self._runtime.outputs_on_chief,
            check_context=self._check_context,
        )
        binding.install()
        return model

    def detach(self, model: keras.Model) -> keras.Model:
        """Gives a plain Keras model back: one device, Keras's own loops.

        Args:
          model: A model that is bound to this strategy.

        Returns:
          The model, with its weights, optimizer and metric state.

        Raises:
          ValueError: the model is not bound to this strategy.
        """
        _check_model("detach", model)
        existing = binding_lib.binding_of(model)
        if existing is None or existing.owner is not self:
            raise ValueError(
                "Only a model that is bound to this strategy can be "
                f"detached. Received: {model.name!r}, bound to "
                f"{existing.owner if existing else None!r}. Compile it in "
                "the scope, or call `attach(model)`, first."
            )
        existing.remove()
        return model

    def describe(self, model: keras.Model | None = None) -> None:
        """Prints the mesh and a table of variables.

        Args:
          model: The model whose variables are listed; without it, those
            created in the strategy's scope that still exist.
        """
        if model is not None:
            _check_model("describe", model)
        from rich.console import Console

        from keras_strategies.strategy.describe import describe_table

        mesh = self._runtime.mesh
        if model is None:
            variables = list(self._runtime.registry)
        else:
            variables = binding_lib.all_variables(model)
        Console().print(describe_table(mesh.devices, mesh.axis, variables))

    def __copy__(self) -> "Strategy":
        raise RuntimeError(
            "Must only deepcopy DistributionStrategy: two objects of one "
            "strategy would not be the same strategy. Received: "
            f"`copy.copy({self!r})`. Use the strategy itself."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Strategy":
        """Itself: a copy of what refers to it has the same strategy."""
        return self

    def __getattr__(self, name: str) -> Any:
        raise old_names.missing(self, name)

    def __repr__(self) -> str:
        mesh = self._runtime.mesh
        names = [str(device) for device in mesh.devices[:4]]
        if mesh.num_replicas > len(names):
            names.append("...")
        return (
            f"<{type(self).__name__} of {mesh.num_replicas} replicas on "
            f"{', '.join(names)}>"
        )

    def _check_free(self, model: keras.Model) -> None:
        """Raises ValueError for a model of another strategy."""
        existing = binding_lib.binding_of(model)
        if existing is not None and existing.owner is not self:
            raise ValueError(
                f"Model {model.name!r} is bound to another strategy. "
                f"Received: {existing.owner!r}, now {self!r}. Call "
                "`detach(model)` on that strategy first."
            )
        variables = binding_lib.all_variables(model)
        check_home(variables, self._runtime.mesh)


def _check_model(name: str, model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`{name}` takes a Keras model. Received: {model!r} of type "
            f"{type(model).__name__}. Pass a `keras.Model`."
        )
