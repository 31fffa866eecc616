"""Primitives of JAX by what they make of degrees; see `row_degrees`."""


def _table(*groups: str) -> frozenset[str]:
    return frozenset(name for group in groups for name in group.split())


FORGETS = _table(
    "eq ne lt le gt ge and or not xor sign argmax argmin iota is_finite",
    "random_seed random_wrap random_unwrap random_bits random_split",
    "random_fold_in threefry2x32 axis_index",
)
"""Of no degree, whatever they are given."""

KEEPS = _table(
    "neg abs real copy copy_p convert_element_type reshape broadcast_in_dim",
    "squeeze transpose rev slice dynamic_slice gather expand_dims split",
    "reduce_max reduce_min reduce_precision reduce_window_max round floor",
    "ceil psum psum2 psum_invariant pmax pmin pbroadcast pvary ppermute",
    "sharding_constraint optimization_barrier stop_gradient device_put",
    "top_k name mesh_cast reduce_scatter psum_scatter",
)
"""Of the degree of their first input."""

LOOPS = _table("scan while cond sort cumsum cumprod scatter-add")
"""Of what is not known, also of plain inputs."""

BENT = _table(
    "exp exp2 log log1p expm1 tanh logistic sin cos tan erf erfc erf_inv",
    "lgamma digamma cosh sinh asinh acosh atanh",
)
"""Linear in nothing: of plain inputs alone."""
