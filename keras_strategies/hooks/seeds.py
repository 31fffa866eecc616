"""Random streams: one for each replica, and one that all replicas share."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from keras_strategies._types import Array
from keras_strategies.keras_bridge.step_context import Group, StepContext
from keras_strategies.spmd.replica_map import replica_id

_HASH = np.uint32(0x9E3779B9)


def is_seed(variable: keras.Variable) -> bool:
    """Returns whether a variable is a `keras.random.SeedGenerator`'s state."""
    return (
        variable.name == "seed_generator_state"
        and tuple(variable.shape) == (2,)
        and "uint32" in str(variable.dtype)
    )


def fold_seeds(
    variables: Sequence[keras.Variable], values: Group, step: StepContext
) -> Group:
    """Folds the replica's id into seeds, for separate random streams.

    The id is hashed before it is combined with the seed. Without the hash,
    seed 3 on replica 1 would give the same stream as seed 2 on replica 0,
    because `3 ^ 1 == 2`.

    Returns:
      The values, in which the seeds are replaced by this replica's seeds.
    """
    step.notes.replica_seeds.update(filter(is_seed, variables))
    return [
        _fold_seed(value, step) if is_seed(variable) else value
        for variable, value in zip(variables, values, strict=True)
    ]


def _fold_seed(seed: Array, step: StepContext) -> Array:
    """Folds the replica's id into a seed.

    Folding the result again restores the original seed.
    """
    # Multiplications and shifts spread consecutive ids over all 32 bits.
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
    """Draws the next seed from a generator.

    Each replica draws a different seed, except while an optimizer is applied
    or `extended.update` writes all copies of a variable. Then all replicas
    draw the seed that a single device would draw, so that, for example, an
    optimizer adds the same noise on all replicas.

    Returns:
      The seed, an array of two uint32 numbers.
    """
    seed = original(generator, *args, **kwargs)
    is_for_all = step.flags.in_optimizer or step.flags.in_update
    if is_for_all and generator.state in step.notes.replica_seeds:
        return _fold_seed(seed, step)
    return seed
