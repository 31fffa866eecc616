"""Comparing what several things hold, one by one."""

import jax
import numpy as np


def assert_all_close(found, expected, rtol=1e-5, atol=1e-6, name=""):
    """Asserts that as many arrays are close, in their order."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            one, other, rtol=rtol, atol=atol, err_msg=name
        )


def assert_leaves_close(found, expected, **close):
    """Asserts it of the leaves of two nests."""
    assert_all_close(jax.tree.leaves(found), jax.tree.leaves(expected), **close)
