"""A convolution's gradient that XLA would shard along a spatial dimension."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_strategies.passes.constrained_operations import constrain_function


def compile_gradient(devices, *, is_constrained):
    """Compiles the gradient for four devices; returns the program's text."""
    mesh = Mesh(np.asarray(devices).reshape(2, 2), ("a", "b"))
    half = NamedSharding(mesh, PartitionSpec(None, "a"))
    kernel = jax.ShapeDtypeStruct((3, 3, 4, 8), "float32")

    def convolve(x, kernel):
        dimensions = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "VALID", dimension_numbers=dimensions
        )

    def gradient(x, result):
        return jax.linear_transpose(lambda k: convolve(x, k), kernel)(result)

    if is_constrained:
        gradient = constrain_function(gradient, ("a", "b"), mesh)
    shapes = [
        jax.ShapeDtypeStruct(shape, "float32")
        for shape in ((8, 8, 8, 4), (8, 6, 6, 8))
    ]
    whole = NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(gradient, in_shardings=(half, half), out_shardings=whole)
    return jitted.lower(*shapes).compile().as_text()


def adds_up_copies(text):
    """Returns whether a program sums over all devices, not over pairs."""
    return " all-reduce" in text and "replica_groups={{0,1,2,3}}" in text
