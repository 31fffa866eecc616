"""Marks of values in a trace, by which the analysis of rows knows them.

A mark is an equation that returns its operand. It adds nothing to the compiled
program.
"""

from typing import Any

from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from keras_strategies._types import Array
from keras_strategies.passes import stages

PREFIX = "ks."
"""The beginning of the names of all marks."""
LOSS = "ks.loss"
"""Marks a scalar loss, which is averaged over the replicas."""
VALUES = "ks.values"
"""Marks per-row values just before this package reduces them."""
GLOBAL = "ks.global"
"""Marks values computed from the rows of all replicas, as on one device."""
REDUCED = "ks.reduced"
"""Marks a reduction's result, whose mean over replicas is the global value."""
AVERAGED = "ks.averaged"
"""Marks a mean of per-row values that Keras's own reduction computed."""
OWN = "ks.own"
"""Marks values that are about to be normalized with a replica's statistics."""
NORMALIZED = "ks.normalized"
"""Marks the normalized values."""
WEIGHTED = "ks.weighted"
"""Marks losses of uneven replicas, weighted by their numbers of rows."""
STATISTIC = "ks.statistic"
"""Marks statistics that are those of a replica's rows by definition."""
DERIVATIVE = "ks.derivative"
"""Marks arguments of functions whose derivatives user code computes."""

GRADIENT = "ks.gradient"
"""Marks gradients that an optimizer receives."""
SHARE = "ks.share"
"""Marks gradients of scaled losses, which are summed over the replicas."""
WEIGHT = "ks.weight"
"""Marks weights that a step computes without an optimizer."""
STATE = "ks.state"
"""Marks a replica's value of a variable."""
LOG = "ks.log"
"""Marks a replica's value of a log that is averaged over the replicas."""
COUNT = "ks.count"
"""Marks a replica's value of a log that is summed over the replicas."""
CHANGE = "ks.change"
"""Marks a replica's change of a variable, to which the others are added."""
USED = (GRADIENT, SHARE, WEIGHT, STATE, LOG, COUNT)
"""Marks of values that training uses."""


# Marks an array in the current trace with a name, a constant of this module,
# and returns the same array.
mark = checkpoint_name


def mark_both_ways(value: Array, name: str) -> Array:
    """Marks an array, and the derivatives that flow back through it.

    Args:
      value: The array.
      name: `STATISTIC`, `DERIVATIVE`, `VALUES`, `REDUCED` or `WEIGHTED`.

    Returns:
      The same array.
    """
    return mark_p.bind(value, name=name, is_cotangent=False)


def is_marked(equation: JaxprEqn, *names: str) -> bool:
    """Returns whether an equation marks a value with one of some names."""
    is_mark = equation.primitive.name in ("name", mark_p.name)
    return is_mark and equation.params["name"] in names


def has_unweighted_gradients(
    jaxpr: Jaxpr, num_variables: int, num_results: int
) -> bool:
    """Returns whether a gradient is not weighted by a replica's number of rows.

    A gradient of a loss that calls a collective need not be.

    Args:
      jaxpr: The program of a replica's step.
      num_variables: The number of variables, the first inputs of the program.
      num_results: The number of results of collectives, its last inputs.
    """
    num_rows = len(jaxpr.invars) - num_variables - num_results
    # 1: computed from rows, 2: also from values of all replicas, or weighted.
    numbers = [0] * num_variables + [1] * num_rows + [2] * num_results
    flow = stages.flow_numbers(jaxpr, numbers, _weights_gradients)
    return any(
        flow[v] == 1
        for equation in jaxpr.eqns
        if is_marked(equation, GRADIENT, SHARE)
        for v in stages.variables(equation.invars)
    )


def has_derivatives(jaxpr: ClosedJaxpr) -> bool:
    """Returns whether user code computes a derivative in a program."""
    return any(is_marked(e, DERIVATIVE) for e in stages.all_equations(jaxpr))


def _weights_gradients(equation: JaxprEqn) -> int:
    return 2 * any(
        is_marked(e, WEIGHTED) and e.params["is_cotangent"]
        for e in (equation, *stages.equations_in(equation))
    )


def _transpose(cotangent: Any, value: Any, *, name: str, **_: Any) -> list[Any]:
    return [mark_p.bind(cotangent, name=name, is_cotangent=True)]


def make_identity(name: str) -> Primitive:
    """Returns a primitive whose result is its operand, without derivatives."""
    primitive = Primitive(name)
    primitive.def_impl(lambda value, **_: value)
    primitive.def_abstract_eval(lambda value, **_: value)
    mlir.register_lowering(primitive, lambda context, value, **_: [value])
    batching.defvectorized(primitive)
    return primitive


mark_p = make_identity("ks_mark")
ad.deflinear2(mark_p, _transpose)
