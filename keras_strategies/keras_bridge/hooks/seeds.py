"""Streams of random numbers: each replica's own, and those of all."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from keras_strategies._core.replica_map import replica_id
from keras_strategies._types import Array
from keras_strategies.keras_bridge.step_context import StepContext

Arrays = list[Any]
_HASH = np.uint32(0x9E3779B9)


def is_seed(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a `keras.random.SeedGenerator`."""
    return (
        variable.name == "seed_generator_state"
        and tuple(variable.shape) == (2,)
        and "uint32" in str(variable.dtype)
    )


def fold_seeds(
    variables: Sequence[keras.Variable], values: Arrays, step: StepContext
) -> Arrays:
    """Gives every replica random streams of its own.

    A hash of the replica's id is mixed into the seed. Adding the id instead
    would make seed 3 on replica 1 the stream of seed 4 on replica 0.
    """
    step.notes.own_seeds.update(filter(is_seed, variables))
    return [
        _folded(value, step) if is_seed(variable) else value
        for variable, value in zip(variables, values, strict=True)
    ]


def _folded(seed: Array, step: StepContext) -> Array:
    """The seed of a replica's own stream; and back, if it is one."""
    mixed = jnp.asarray(replica_id(step.axis)).astype("uint32") * _HASH
    mixed = (mixed ^ (mixed >> 15)) * np.uint32(0x85EBCA6B)
    return seed.at[0].set(seed[0] ^ mixed ^ (mixed >> 13))


def next_seed(
    step: StepContext,
    original: Callable[..., Any],
    generator: keras.random.SeedGenerator,
    *args: Any,
    **kwargs: Any,
) -> Array:
    """`SeedGenerator.next`: what is written to all copies draws alike.

    An optimizer that adds noise is given that of one device.

    Returns:
      The seed, two numbers of type uint32.
    """
    seed = original(generator, *args, **kwargs)
    is_for_all = step.flags.in_optimizer or step.flags.in_update
    if is_for_all and generator.state in step.notes.own_seeds:
        return _folded(seed, step)
    return seed
