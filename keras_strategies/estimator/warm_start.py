"""Initial weights from another training."""

import dataclasses
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_strategies.checkpoint import contents, reading
from keras_strategies.cluster.addresses import shown
from keras_strategies.cluster.checks import check_type

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class WarmStartSettings:
    """Which weights to take from a checkpoint; as tf's.

    Differs from tf: names are Keras's ("dense/kernel"), and there are no
    vocabularies.

    Attributes:
      ckpt_to_initialize_from: A checkpoint, or a `model_dir` with some, of
        which the newest is taken.
      vars_to_warm_start: A regular expression that is searched for in names
        of weights, or a list of them; None for those alone that are trained.
      var_name_to_vocab_info: None.
      var_name_to_prev_var_name: Names in the checkpoint of those that are
        named otherwise there.

    Raises:
      ValueError: an empty path, or what has no meaning here.
      TypeError: an argument of another type.

    Example:
      ```python
      settings = ks.estimator.WarmStartSettings(
          "pretrained", vars_to_warm_start=".*kernel"
      )
      estimator = ks.estimator.Estimator(
          model_fn, model_dir="finetuned", warm_start_from=settings
      )
      ```
    """

    ckpt_to_initialize_from: str | os.PathLike[str]
    vars_to_warm_start: str | Sequence[str] | None = ".*"
    var_name_to_vocab_info: None = None
    var_name_to_prev_var_name: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        path = self.ckpt_to_initialize_from
        cure = "Give a checkpoint's folder."
        kind = (str, os.PathLike)
        check_type("`ckpt_to_initialize_from`", path, kind, "a path", cure)
        if not os.fspath(path):
            raise ValueError(
                "`ckpt_to_initialize_from` MUST be set in WarmStartSettings. "
                f"Received: {path!r}. {cure}"
            )
        if self.var_name_to_vocab_info:
            raise ValueError(
                "`var_name_to_vocab_info` has no meaning here. Received: "
                f"{shown(self.var_name_to_vocab_info)}. Leave it out, and move "
                "the rows of an embedding before training."
            )
        for pattern in _listed(self.vars_to_warm_start):
            name, what = "`vars_to_warm_start`", "regular expressions"
            cure = "Give a str, or a list of them."
            check_type(name, pattern, str, what, cure)
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    "`vars_to_warm_start` are regular expressions. Received: "
                    f"{pattern!r}: {error}. Correct it; any name is '.*'."
                ) from None
        names = self.var_name_to_prev_var_name
        name = "`var_name_to_prev_var_name`"
        what = "a dict from names to those in the checkpoint"
        cure = "Write {'dense/kernel': 'old/kernel'}."
        check_type(name, names, Mapping | None, what, cure)


def apply(settings: WarmStartSettings | None, model: keras.Model) -> None:
    """Gives a built model initial weights, if any are asked for.

    Raises:
      ValueError: there is no checkpoint; a weight is not in it, or has
        another shape there; or no weight is asked for.
    """
    if settings is None:
        return
    path = _checkpoint_of(os.fspath(settings.ckpt_to_initialize_from))
    names = settings.var_name_to_prev_var_name or {}
    saved = reading.variables_in(path)
    shapes = contents.document_of(path)["variables"]
    wanted: dict[str, dict[str, Any]] = {}
    pairs: list[tuple[keras.Variable, str, str]] = []
    chosen = _chosen(model, settings.vars_to_warm_start)
    _check_used(names, [str(v.path) for v in chosen])
    for variable in chosen:
        name = names.get(str(variable.path), str(variable.path))
        name = name.replace(".", "/")
        _check_saved(name, saved, path)
        group, entry = saved[name]
        shape, dtype = shapes[group][entry]
        _check_shape(variable, shape, path)
        wanted.setdefault(group, {})[entry] = (shape, dtype)
        pairs.append((variable, group, entry))
    arrays = reading.read_arrays(path, wanted)
    for variable, group, entry in pairs:
        variable.assign(arrays[group][entry])
    _logger.info("Warm-started %d weights from %s.", len(pairs), path)


def settings_of(given: Any) -> WarmStartSettings | None:
    """Returns what `warm_start_from` asks for, or None for nothing.

    Raises:
      TypeError: it is no path and no settings.
    """
    if given is None or isinstance(given, WarmStartSettings):
        return given
    kind, what = (str, os.PathLike), "a path or `WarmStartSettings`"
    cure = "Give a checkpoint's folder."
    check_type("`warm_start_from`", given, kind, what, cure)
    return WarmStartSettings(given)


def _checkpoint_of(path: str) -> str:
    """A checkpoint, or the newest one in a folder."""
    # A checkpoint is named by its step, and so may a folder of some be.
    latest = reading.newest_good(path) if os.path.isdir(path) else None
    if latest is not None:
        return latest
    try:
        reading.check(path)
    except ValueError as error:
        raise ValueError(
            f"`warm_start_from` needs a checkpoint. Received: {path!r}, which "
            f"is none. Give a checkpoint's folder or a `model_dir`. ({error})"
        ) from error
    return path


def _check_saved(name: str, saved: Mapping[str, Any], path: str) -> None:
    if name not in saved:
        raise ValueError(
            "A weight that is warm-started is in the checkpoint. "
            f"Received: {name!r}, which {path} has not. Leave it out "
            "by `vars_to_warm_start`, or name what it is called there "
            "by `var_name_to_prev_var_name`."
        )


def _check_shape(variable: keras.Variable, shape: list[int], path: str) -> None:
    if list(variable.shape) != shape:
        raise ValueError(
            "A weight that is warm-started has its shape in the checkpoint. "
            f"Received: {variable.path!r} of shape {tuple(variable.shape)}, "
            f"{tuple(shape)} in {path}. Leave it out by `vars_to_warm_start`."
        )


def _check_used(names: Mapping[str, str], paths: list[str]) -> None:
    unused = sorted(set(names) - set(paths))
    if unused:
        raise ValueError(
            "Keys of `var_name_to_prev_var_name` are weights that are "
            f"warm-started. Received: {unused}; these are {paths[:8]}. "
            "Correct the names, or leave them out."
        )


def _listed(patterns: str | Sequence[str] | None) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns or ())


def _chosen(
    model: keras.Model, patterns: str | Sequence[str] | None
) -> list[keras.Variable]:
    """The weights that patterns are found in."""
    if patterns is None:
        return list(model.trainable_variables)
    every = _listed(patterns)
    metrics = {id(v) for v in model.metrics_variables}
    weights = [v for v in model.weights if id(v) not in metrics]
    chosen = [v for v in weights if any(re.search(p, v.path) for p in every)]
    if not chosen:
        raise ValueError(
            "`vars_to_warm_start` is found in names of weights. Received: "
            f"{patterns!r}, found in none of "
            f"{[v.path for v in weights][:8]}. Correct it."
        )
    return chosen
