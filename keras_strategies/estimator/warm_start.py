"""Loads initial weights from the checkpoint of another training run."""

import dataclasses
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_strategies.estimator.config.run_checks import check_unsupported
from keras_strategies.estimator.seam import (
    check_type,
    reading,
)

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class WarmStartSettings:
    """Selects the weights to initialize from a checkpoint, as in TensorFlow.

    Differs from tf: weights have their Keras names, such as "dense/kernel", and
    vocabularies are not supported.

    Attributes:
      ckpt_to_initialize_from: Path of a checkpoint, or of a `model_dir` whose
        newest checkpoint is to be used.
      vars_to_warm_start: A regular expression, or a list of them. A weight is
        selected if one of them matches a part of its name. None selects the
        trainable weights.
      var_name_to_vocab_info: Must be None.
      var_name_to_prev_var_name: A dict from the name of a weight in the model
        to its name in the checkpoint, for weights whose names differ.

    Raises:
      ValueError: if the path is empty, a regular expression is invalid, or an
        argument is not supported on JAX.
      TypeError: if an argument has the wrong type.

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
        fix = "Pass a checkpoint's directory."
        kind = (str, os.PathLike)
        check_type("`ckpt_to_initialize_from`", path, kind, "a path", fix)
        if not os.fspath(path):
            raise ValueError(
                "`ckpt_to_initialize_from` MUST be set in WarmStartSettings. "
                f"Received: {path!r}. {fix}"
            )
        vocabularies = self.var_name_to_vocab_info or None
        check_unsupported("var_name_to_vocab_info", vocabularies)
        for pattern in _list_patterns(self.vars_to_warm_start):
            name, what = "`vars_to_warm_start`", "regular expressions"
            fix = "Pass a string or a list of strings."
            check_type(name, pattern, str, what, fix)
            re.compile(pattern)  # Raises re.error if it is not valid.
        names = self.var_name_to_prev_var_name
        name = "`var_name_to_prev_var_name`"
        what = "a dict from names in the model to names in the checkpoint"
        fix = "Pass a dict such as {'dense/kernel': 'old/kernel'}."
        check_type(name, names, Mapping | None, what, fix)


def apply(settings: WarmStartSettings | None, model: keras.Model) -> None:
    """Assigns the selected weights to a built model, if settings are given.

    Raises:
      ValueError: if no checkpoint exists, no weight is selected, or a
        selected weight is missing from the checkpoint or has a different shape
        there.
    """
    if settings is None:
        return
    path = _find_checkpoint(os.fspath(settings.ckpt_to_initialize_from))
    names = settings.var_name_to_prev_var_name or {}
    saved = reading.list_variables(path)
    entries: dict[str, dict[str, Any]] = {}
    pairs: list[tuple[keras.Variable, str, str]] = []
    weights = _choose_weights(model, settings.vars_to_warm_start)
    _check_used(names, [str(v.path) for v in weights])
    for variable in weights:
        name = names.get(str(variable.path), str(variable.path))
        name = name.replace(".", "/")
        if name not in saved:
            raise ValueError(
                "Warm-started weights must be in the checkpoint. Received: "
                f"{name!r}, which is not in {path}. Exclude it with "
                "`vars_to_warm_start`, or map it with "
                "`var_name_to_prev_var_name`."
            )
        group, entry, kind = saved[name]
        entries.setdefault(group, {})[entry] = kind
        pairs.append((variable, group, entry))
    arrays = reading.read_arrays(path, entries)
    for variable, group, entry in pairs:
        variable.assign(arrays[group][entry])
    _logger.info("Warm-started %d weights from %s.", len(pairs), path)


def make_settings(source: Any) -> WarmStartSettings | None:
    """Converts an argument `warm_start_from` to settings; None stays None.

    Raises:
      TypeError: if `source` is not a path, settings or None.
    """
    if source is None or isinstance(source, WarmStartSettings):
        return source
    kind, what = (str, os.PathLike), "a path or `WarmStartSettings`"
    fix = "Pass a checkpoint's directory."
    check_type("`warm_start_from`", source, kind, what, fix)
    return WarmStartSettings(source)


def _find_checkpoint(path: str) -> str:
    """Returns a directory's newest checkpoint, or the path of a checkpoint.

    Raises:
      ValueError: if no checkpoint exists.
    """
    # A name that is a number does not prove that the directory is a checkpoint:
    # a directory that contains checkpoints may have such a name, too.
    latest = reading.find_newest(path) if os.path.isdir(path) else None
    if latest is not None:
        return latest
    try:
        reading.check(path)
    except ValueError as error:
        raise ValueError(
            f"`warm_start_from` needs a checkpoint. Received: {path!r}, which "
            "is not a checkpoint and contains no checkpoints. Pass the "
            f"directory of a checkpoint, or a `model_dir`. ({error})"
        ) from error
    return path


def _check_used(names: Mapping[str, str], paths: list[str]) -> None:
    unused = sorted(set(names) - set(paths))
    if unused:
        raise ValueError(
            "Keys of `var_name_to_prev_var_name` must be names of warm-started "
            f"weights. Received: {unused}, which are not among the weights, "
            f"such as {paths[:8]}. Correct the names, or omit them."
        )


def _list_patterns(patterns: str | Sequence[str] | None) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns or ())


def _choose_weights(
    model: keras.Model, patterns: str | Sequence[str] | None
) -> list[keras.Variable]:
    """Returns the weights whose names match a pattern.

    Raises:
      ValueError: if no name matches.
    """
    if patterns is None:
        return list(model.trainable_variables)
    every = _list_patterns(patterns)
    metrics = {id(v) for v in model.metrics_variables}
    weights = [v for v in model.weights if id(v) not in metrics]
    matches = [v for v in weights if any(re.search(p, v.path) for p in every)]
    if not matches:
        raise ValueError(
            "`vars_to_warm_start` must match the name of a weight. Received: "
            f"{patterns!r}, which matches none of the weights, such as "
            f"{[v.path for v in weights][:8]}. Correct the expression."
        )
    return matches
