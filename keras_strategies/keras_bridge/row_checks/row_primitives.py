"""Values and JAX's primitives, by degrees; see `row_degrees`."""

import dataclasses
from typing import Any

import numpy as np

_TINY = 1e-3
"""The largest constant that only keeps a denominator from zero."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is known of a value.

    Attributes:
      degree: Of a value. None: not known.
      is_mixed: It is made of values of different degrees.
      is_whole: It is that of all replicas' rows, the same on each.
      is_shared: It is of no rows, the same on each: constants, weights.
      values: Of a number that both traces know: in each of them.
    """

    degree: float | None = 0.0
    is_mixed: bool = False
    is_whole: bool = False
    is_shared: bool = False
    values: tuple[Any, Any] | None = None

    @property
    def is_any(self) -> bool:
        """Whether it fits to every degree: zero, infinity and NaN do."""
        if self.values is None:
            return False
        numbers = np.stack(self.values)
        return bool(np.all((numbers == 0) | ~np.isfinite(numbers)))

    @property
    def is_tiny(self) -> bool:
        """Whether it is a small constant."""
        if self.values is None:
            return False
        return bool(np.all(np.abs(self.values[0]) <= _TINY))


def _table(*groups: str) -> frozenset[str]:
    return frozenset(name for group in groups for name in group.split())


ADDS = _table("add add_any sub max min concatenate pad")
"""Of the one degree of all their inputs."""

FORGETS = _table(
    "eq ne lt le gt ge and or not xor sign argmax argmin iota is_finite",
    "random_seed random_wrap random_unwrap random_bits random_split",
    "random_fold_in threefry2x32",
)
"""Of no degree, whatever they are given."""

KEEPS = _table(
    "neg abs real copy copy_p convert_element_type reshape broadcast_in_dim",
    "squeeze transpose rev slice expand_dims split",
    "reduce_max reduce_min reduce_precision reduce_window_max round floor",
    "ceil psum psum2 psum_invariant pmax pmin pbroadcast pvary ppermute",
    "sharding_constraint optimization_barrier stop_gradient device_put",
    "top_k name mesh_cast reduce_scatter psum_scatter",
)
"""Of the degree of their first input."""

LOOPS = _table("scan while cond sort cumprod scatter-add")
"""Of what is not known, also of plain inputs."""

BENT = _table(
    "exp exp2 log log1p expm1 tanh logistic sin cos tan erf erfc erf_inv",
    "lgamma digamma cosh sinh asinh acosh atanh",
)
"""Linear in nothing: of plain inputs alone."""
