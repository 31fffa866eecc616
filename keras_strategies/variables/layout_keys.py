"""Checks that each key of a `layout_map` matches a variable."""

import difflib
import re
import warnings
from collections.abc import Iterable
from typing import Any

import keras

_MAX_NEAR = 3


class LayoutKeys:
    """The keys of a strategy's `layout_map` that have not matched a variable.

    Args:
      keys: Paths of variables, or regular expressions for full paths.

    Raises:
      ValueError: if a key is not a valid regular expression.
    """

    def __init__(self, keys: Iterable[Any]) -> None:
        self._unmatched: list[str] = []
        self._has_matched = False
        for key in keys:
            _check_key(key)
            self._unmatched.append(key)

    def check(self, variables: Iterable[keras.Variable]) -> None:
        """Warns once about each key that has matched no variable so far.

        Args:
          variables: All variables of the strategy. `check` is called before a
            step, so these variables exist.

        Raises:
          ValueError: if no key has matched a path or a part of a path.
        """
        divisible = [v for v in variables if v.shape]
        paths = [v.path for v in divisible]
        if not self._unmatched or not paths:
            return
        unmatched = [k for k in self._unmatched if not _is_key_of(k, paths)]
        self._has_matched |= len(unmatched) < len(self._unmatched)
        has_part = any(_find_partial_matches(key, paths) for key in unmatched)
        # Weights suffice as examples; slots are placed like their weights.
        weights = [v.path for v in divisible if v.trainable] or paths
        shown = _describe_keys(unmatched, list(dict.fromkeys(weights)))
        if not self._has_matched and not has_part:
            raise ValueError(
                "Each key of `layout_map` must match the full path of a "
                "variable. Received: only keys that match no variable, so that "
                f"no variable would be sharded over cores: {shown}. Change the "
                "keys, or remove `layout_map`."
            )
        self._unmatched = []
        if unmatched:
            warnings.warn(
                "Each key of `layout_map` must match the full path of a "
                "variable. Received: keys that match no variable and therefore "
                f"have no effect: {shown}. Change or remove these keys.",
                UserWarning,
                stacklevel=2,
            )


def _is_key_of(key: str, paths: list[str]) -> bool:
    return any(key == path or re.fullmatch(key, path) for path in paths)


def _find_partial_matches(key: str, paths: list[str]) -> list[str]:
    """Returns the paths that a key matches in part, as in Keras's maps."""
    return [path for path in paths if re.search(key, path)]


def _describe_keys(keys: list[str], paths: list[str]) -> str:
    """Describes keys, each with the paths that are most similar to it."""
    shown = []
    for key in keys:
        # Removes the characters of regular expressions that do not occur in
        # paths.
        words = re.sub(r"[^\w/]+", "", key)
        near = _find_partial_matches(key, paths) or difflib.get_close_matches(
            words, paths, _MAX_NEAR, 0.0
        )
        names = ", ".join(map(repr, near[:_MAX_NEAR]))
        shown.append(f"{key!r} (nearest: {names})")
    return ", ".join(shown)


def _check_key(key: str) -> None:
    try:
        re.compile(key)
    except (TypeError, re.error) as error:
        raise ValueError(
            "A key of `layout_map` must be a variable's path or a regular "
            f"expression. Received: {key!r} ({error}). Use a key such as "
            "'.*/kernel'."
        ) from error
