"""torch's tensors as arrays; torch is not imported here."""

import sys
from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

Tree = Any


def arrays_of(batch: Any) -> Tree:
    """A nest of numpy arrays; a list at its top is a tuple, as fit wants it."""
    batch = jax.tree.map(_array, batch)
    return tuple(batch) if type(batch) is list else batch


def _array(leaf: Any) -> Any:
    """A tensor as an array, of the same memory where it is the host's."""
    torch = sys.modules["torch"]
    if isinstance(leaf, Mapping):
        return arrays_of(dict(leaf))
    if not isinstance(leaf, torch.Tensor):
        return leaf if isinstance(leaf, str) else np.asarray(leaf)
    if leaf.layout is not torch.strided or leaf.is_nested:
        raise ValueError(
            "Batches must hold dense tensors. Received: one with layout "
            f"{leaf.layout}{' that is nested' * leaf.is_nested}. Call "
            "`.to_dense()`, or pad it, in the dataset or in `collate_fn`."
        )
    leaf = leaf.detach().cpu()
    name = str(leaf.dtype).removeprefix("torch.")
    # numpy's own dtypes need no view: bfloat16 and float8 are ml_dtypes'.
    if not leaf.is_floating_point() or not hasattr(ml_dtypes, name):
        return leaf.numpy()
    same_size = {1: torch.uint8, 2: torch.int16}[leaf.element_size()]
    return leaf.view(same_size).numpy().view(getattr(ml_dtypes, name))
