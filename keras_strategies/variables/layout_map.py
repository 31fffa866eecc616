"""A strategy's `layout_map`, which shards variables over a replica's cores."""

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import keras

from keras_strategies.spmd.mesh import ReplicaMesh

Axes = tuple[str | None, ...]
"""For each dimension of a variable: the mesh axis that shards it, or None."""

_MAX_NEAR = 3


class LayoutMap:
    """The layouts of variables over the cores of a replica, by their paths.

    It is empty if replicas have one core.

    Args:
      mesh: The mesh of the replicas.
      layout_map: A mapping from variable paths, or regular expressions that
        match a full path, to the mesh axis for each dimension: the mesh's model
        axis or None. Either a `keras.distribution.LayoutMap`, of which only the
        axes are used, or a dict. The dict's values are tuples, or functions
        from a shape to a tuple.

    Raises:
      ValueError: if a key is not a valid regular expression, or a layout
        is no sequence or contains another axis, or the model axis twice, or
        cores share sequences.
    """

    def __init__(
        self, mesh: ReplicaMesh, layout_map: Mapping[str, Any]
    ) -> None:
        self._mesh = mesh
        self._layouts: dict[str, Any] = {}
        if mesh.context_parallel and layout_map:
            raise ValueError(
                "`layout_map` and `context_parallel` must not be passed "
                "together, because a replica's cores share either its "
                "variables or its sequences. Received: a layout map of "
                f"{len(layout_map)} entries. Omit one of the two; "
                "`variable_partitioner` shards variables over the replicas."
            )
        for key in layout_map:
            try:
                re.compile(key)
            except re.error as error:
                raise ValueError(
                    "The keys of `layout_map` must be regular expressions. "
                    f"Received: {key!r}: {error}. Escape special characters."
                ) from error
            self._layouts[key] = self._read_layout(key, layout_map[key])
        if mesh.cores_per_replica == 1:
            self._layouts = {}
        # The keys that have not matched a variable.
        self._unmatched = list(self._layouts)

    def __bool__(self) -> bool:
        return bool(self._layouts)

    def find_axes(self, variable: keras.Variable) -> Axes:
        """Returns the mesh axes that the map assigns to a variable.

        Raises:
          ValueError: if the layout does not fit the variable, or the variable
            matches two layouts.
        """
        shape, cores = variable.shape, self._mesh.cores_per_replica
        key = self._find_key(variable.path)
        if key is None:
            return (None,) * len(shape)
        axes = self._layouts[key]
        if callable(axes):
            axes = self._read_layout(key, axes(tuple(shape)))
        if not fits(axes, shape, cores):
            raise ValueError(
                "A layout must contain an axis or None for each dimension, and "
                "a dimension with an axis must be a multiple of the number of "
                f"cores per replica. Received: layout {axes} for variable "
                f"{variable.path!r} of shape {tuple(shape)}, with {cores} "
                "cores per replica. Change the layout in `layout_map`."
            )
        return axes

    def _find_key(self, path: str) -> str | None:
        """Returns the map's key for a variable's path, or None."""
        keys = [k for k in self._layouts if k == path or re.fullmatch(k, path)]
        self._unmatched = [k for k in self._unmatched if k not in keys]
        if path in keys:
            return path
        if len(keys) > 1:
            raise ValueError(
                "A variable must match only one entry of `layout_map`. "
                f"Received: variable {path!r}, which the keys {keys} match. "
                "Change one of these keys."
            )
        return keys[0] if keys else None

    def _read_layout(self, key: str, layout: Any) -> Any:
        """Returns a layout's axes, or the function that computes them."""
        model, value = self._mesh.model_axis, getattr(layout, "axes", layout)
        if callable(value):
            return value
        is_sequence = isinstance(value, list | tuple)
        axes: tuple[Any, ...] = tuple(value) if is_sequence else ()
        named = [axis for axis in axes if axis is not None]
        if not is_sequence or set(named) - {model} or len(named) > 1:
            raise ValueError(
                "A layout must shard at most one dimension of a variable over "
                f"cores. Received: layout_map[{key!r}] = {value!r}. Use a "
                f"tuple of None for each dimension, with at most one {model!r}."
            )
        return axes

    def check_keys(self, variables: Iterable[keras.Variable]) -> None:
        """Warns once about each key that has matched no variable so far.

        Args:
          variables: All variables of the strategy. `check_keys` is called
            before a step, so these variables exist.

        Raises:
          ValueError: if no key has matched a path.
        """
        divisible = [v for v in variables if v.shape]
        # Weights suffice as examples; slots are placed like their weights.
        weights = [v.path for v in divisible if v.trainable]
        paths = list(dict.fromkeys(weights or [v.path for v in divisible]))
        if not self._unmatched or not paths:
            return
        shown = ", ".join(
            f"{key!r} (nearest: {get_close_matches(key, paths, _MAX_NEAR, 0)})"
            for key in self._unmatched
        )
        if len(self._unmatched) == len(self._layouts):
            raise ValueError(
                "Each key of `layout_map` must match the full path of a "
                "variable. No key matches one, so no variable would be sharded "
                f"over cores: {shown}. Change the keys, or remove `layout_map`."
            )
        self._unmatched = []
        warnings.warn(
            "Each key of `layout_map` must match the full path of a "
            "variable. These keys match no variable and have no effect: "
            f"{shown}. Change or remove these keys.",
            UserWarning,
            stacklevel=2,
        )


def fits(axes: Axes, shape: Sequence[int], cores: int) -> bool:
    """Returns whether the cores can share the dimensions with an axis."""
    return len(axes) == len(shape) and all(
        axis is None or size % cores == 0
        for axis, size in zip(axes, shape, strict=True)
    )
