"""A model with values beside the same one without: all of both is the same."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras

import keras_strategies as ks
from benchmarks.program_texts import differences, normal_hlo, normal_stablehlo
from keras_strategies.step.lower_step import KINDS, lower_step
from keras_strategies.variables import model_variables, shardings
from keras_strategies.variables.abstract_variables import (
    MAX_REAL_SIZE,
    is_abstract,
)

LAYOUTS = {
    "replicated": None,
    "divided": ks.experimental.FullySharded(min_size=1),
}
DEVICES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """A model, and the strategy in whose scope it was made."""

    model: keras.Model
    strategy: ks.Strategy

    @property
    def mesh(self) -> Any:
        return self.strategy._runtime.mesh


def assert_same(
    build: Callable[[], keras.Model],
    batch: Any,
    layout: str,
    *,
    kinds: Sequence[str] = KINDS,
    is_compiled: bool = False,
) -> None:
    """Asserts that a model without values is the one with values.

    Args:
      build: Makes a compiled model.
      batch: A global batch's shapes.
      layout: A key of `LAYOUTS`.
      kinds: Of the steps whose programs are compared.
      is_compiled: Whether the programs are compared as XLA compiles them, too,
        and not just as JAX lowers them.
    """
    both, texts = [], []
    for values in (contextlib.nullcontext(), ks.abstract()):
        both.append(_made(build, layout, values))
        texts.append(
            {
                f"{kind}, {stage}": text
                for kind in kinds
                for stage, text in _texts(both[-1], batch, kind, is_compiled)
            }
        )
    _assert_same_variables(*both)
    found = "\n\n".join(differences(*texts))
    assert not found, found


def get_shapes(data: Any) -> Any:
    """What a batch's arrays are, without their values."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), data)


def _made(
    build: Callable[[], keras.Model],
    layout: str,
    values: contextlib.AbstractContextManager[None],
) -> Made:
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    strategy = ks.MirroredStrategy(
        jax.devices()[:DEVICES], variable_partitioner=LAYOUTS[layout]
    )
    with strategy.scope(), values:
        model = build()
    return Made(model=model, strategy=strategy)


def _texts(
    made: Made, batch: Any, kind: str, is_compiled: bool
) -> list[tuple[str, str]]:
    """The texts of a step, without names, and what they are."""
    binding = made.strategy._get_binding("compile_step", made.model)
    build = binding.build_for_shapes
    lowered = lower_step(made.model, made.mesh, kind, batch, build)
    found = [("lowered", normal_stablehlo(lowered.as_text()))]
    if is_compiled:
        program = made.strategy.compile_step(made.model, batch, kind=kind)
        found.append(("compiled", normal_hlo(program.as_text())))
    return found


def _assert_same_variables(real: Made, without_values: Made) -> None:
    """Asserts it of all variables of the models, their optimizers, metrics and
    losses; and that those that are large have no values."""
    num_abstract = 0
    for one, other in zip(
        model_variables.all_variables(real.model),
        model_variables.all_variables(without_values.model),
        strict=True,
    ):
        found, wanted = _facts(other, without_values), _facts(one, real)
        assert found == wanted, f"{found}, and with a value {wanted}"
        is_large = math.prod(one.shape) > MAX_REAL_SIZE
        assert is_abstract(other) == is_large, other.path
        num_abstract += is_large
        # The value of the real one lies where the other one's would.
        planned = shardings.get_sharding(other, without_values.mesh)
        value = one.value
        assert value.sharding.is_equivalent_to(planned, value.ndim), one.path
    assert num_abstract


def _facts(variable: keras.Variable, made: Made) -> dict[str, Any]:
    held = shardings.get_placement(variable)
    return {
        "path": variable.path,
        "shape": tuple(variable.shape),
        "dtype": variable.dtype,
        "is_trainable": variable.trainable,
        "aggregation": variable.aggregation,
        "sharding": shardings.get_sharding(variable, made.mesh),
        "sharding of slots": held and held.slot_sharding,
    }
