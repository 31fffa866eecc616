"""Exporters: what is exported after an evaluation."""

import abc
import glob
import logging
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from keras_strategies.cluster.addresses import shown
from keras_strategies.estimator import records
from keras_strategies.estimator.arguments import (
    check_positive,
    find_argument_names,
)

DEFAULT_EXPORTS_TO_KEEP = 5
_LOSS = "loss"
_NUM_DIGITS = 10
_logger = logging.getLogger(__name__)


class Exporter(abc.ABC):
    """What `EvalSpec(exporters=...)` takes; derive an own one from it.

    Example:
      ```python
      class Losses(ks.estimator.Exporter):
          name = "losses"

          def export(self, estimator, export_path, checkpoint_path,
                     eval_result, is_the_final_export):
              print(checkpoint_path, eval_result["loss"])

      spec = ks.estimator.EvalSpec(eval_input_fn, exporters=Losses())
      ```
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The folder under `model_dir/export` for its exports."""

    @abc.abstractmethod
    def export(
        self,
        estimator: Any,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> str | None:
        """Exports, or decides not to.

        Args:
          estimator: The `Estimator`.
          export_path: The folder to write to.
          checkpoint_path: The checkpoint that was evaluated.
          eval_result: What `Estimator.evaluate` returned for it.
          is_the_final_export: Whether it is the end of training; never so
            where `TrainSpec.max_steps` is None.

        Returns:
          The folder of the export, or None.
        """


class _ModelExporter(Exporter):
    """Exports the model where `_is_due`, and deletes old exports."""

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: None = None,
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        exports_to_keep: int | None = DEFAULT_EXPORTS_TO_KEEP,
        *,
        saved_model: bool | None = None,
    ) -> None:
        check_serving(serving_input_receiver_fn, as_text)
        check_positive("exports_to_keep", exports_to_keep)
        self._name = name
        self._assets_extra = assets_extra
        self._saved_model = saved_model
        self._exports_to_keep = exports_to_keep
        self._has_exported = False

    @property
    def name(self) -> str:
        """See `Exporter.name`."""
        return self._name

    def export(
        self,
        estimator: Any,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> str | None:
        """See `Exporter.export`."""
        if not self._is_due(estimator, eval_result, is_the_final_export):
            return None
        path = estimator.export_saved_model(
            export_path,
            checkpoint_path=checkpoint_path,
            assets_extra=self._assets_extra,
            saved_model=self._saved_model,
        )
        _delete_old(export_path, self._exports_to_keep)
        self._has_exported = True
        return path

    def _is_due(
        self, estimator: Any, eval_result: Mapping[str, Any], is_final: bool
    ) -> bool:
        return True


class FinalExporter(_ModelExporter):
    """Exports once, at the end of the training; as tf's.

    Needs `TrainSpec(max_steps=...)`.

    Differs from tf: the exported model takes features as the model of the
    `model_fn` does, so there is no `serving_input_receiver_fn`.

    Args:
      name: The folder under `model_dir/export`.
      serving_input_receiver_fn: None; anything else is refused.
      assets_extra: Files to copy into the export's folder `assets.extra`:
        their paths there to where they are.
      as_text: False; True is refused.
      saved_model: Whether a SavedModel is written as well
        (`Estimator.export_saved_model`).

    Raises:
      ValueError: what has no meaning here.

    Example:
      ```python
      spec = ks.estimator.EvalSpec(
          eval_input_fn, exporters=ks.estimator.FinalExporter("final")
      )
      ```
    """

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: None = None,
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        *,
        saved_model: bool | None = None,
    ) -> None:
        arguments = name, serving_input_receiver_fn, assets_extra, as_text
        super().__init__(*arguments, None, saved_model=saved_model)

    def _is_due(
        self, estimator: Any, eval_result: Mapping[str, Any], is_final: bool
    ) -> bool:
        if is_final:
            _logger.info("The final export, at the end of training.")
        return is_final


class LatestExporter(_ModelExporter):
    """Exports after every evaluation, and deletes old exports; as tf's.

    Args:
      name: The folder under `model_dir/export`.
      serving_input_receiver_fn: None; see `FinalExporter`.
      assets_extra: See `FinalExporter`.
      as_text: False.
      exports_to_keep: How many of the last exports are kept; None for all.
      saved_model: See `FinalExporter`.

    Raises:
      ValueError: what has no meaning here, or `exports_to_keep` is 0 or less.
      TypeError: `exports_to_keep` is no integer.

    Example:
      ```python
      exporter = ks.estimator.LatestExporter("latest", exports_to_keep=3)
      spec = ks.estimator.EvalSpec(eval_input_fn, exporters=exporter)
      ```
    """


def has_smaller_loss(
    best_eval_result: Mapping[str, Any], current_eval_result: Mapping[str, Any]
) -> bool:
    """Whether the second result has the smaller loss.

    Raises:
      ValueError: one of them has no loss.
    """
    for name, result in (
        ("best_eval_result", best_eval_result),
        ("current_eval_result", current_eval_result),
    ):
        if not result or _LOSS not in result:
            raise ValueError(
                f"{name} cannot be empty or without a loss. Received: "
                f"{shown(result)}. Give `BestExporter` a `compare_fn` that "
                "compares what your evaluations return."
            )
    return best_eval_result[_LOSS] > current_eval_result[_LOSS]


class BestExporter(_ModelExporter):
    """Exports whenever a model is better than all before; as tf's.

        exporter = ks.estimator.BestExporter(
            compare_fn=lambda best_eval_result, current_eval_result: (
                current_eval_result["accuracy"] > best_eval_result["accuracy"]
            )
        )

    Args:
      name: The folder under `model_dir/export`.
      serving_input_receiver_fn: None; see `FinalExporter`.
      event_file_pattern: Where the results of earlier runs lie, in
        `model_dir`: the files' folder counts ("eval_test/*" for an
        evaluation named "test"). None: what was best is known until the
        process ends.
      compare_fn: Called with `best_eval_result` and `current_eval_result`;
        whether the second is better. The smaller loss is, by default.
      assets_extra: See `FinalExporter`.
      as_text: False.
      exports_to_keep: How many of the last exports are kept; None for all.
      saved_model: See `FinalExporter`.

    Raises:
      ValueError: what has no meaning here, `exports_to_keep` is 0 or less, or
        `compare_fn` takes other arguments.
      TypeError: `exports_to_keep` is no integer.
    """

    def __init__(
        self,
        name: str = "best_exporter",
        serving_input_receiver_fn: None = None,
        event_file_pattern: str | None = "eval/*.tfevents.*",
        compare_fn: Callable[..., bool] = has_smaller_loss,
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        exports_to_keep: int | None = DEFAULT_EXPORTS_TO_KEEP,
        *,
        saved_model: bool | None = None,
    ) -> None:
        arguments = name, serving_input_receiver_fn, assets_extra, as_text
        super().__init__(*arguments, exports_to_keep, saved_model=saved_model)
        _check_compare_fn(compare_fn)
        self._pattern = event_file_pattern
        self._compare_fn = compare_fn
        self._model_dir: str | None = None
        self._best: Mapping[str, Any] | None = None

    def _is_due(
        self, estimator: Any, eval_result: Mapping[str, Any], is_final: bool
    ) -> bool:
        if self._pattern and self._model_dir != estimator.model_dir:
            self._model_dir = estimator.model_dir
            self._best = self._find_best(estimator.model_dir)
        # What was evaluated is on disk by now, and may be the best itself.
        is_first = not self._has_exported and _is_equal(self._best, eval_result)
        if not (
            self._best is None
            or is_first
            or self._compare_fn(
                best_eval_result=self._best, current_eval_result=eval_result
            )
        ):
            return False
        _logger.info("The best model so far is exported.")
        self._best = eval_result
        return True

    def _find_best(self, model_dir: str) -> Mapping[str, Any] | None:
        """The best result of the evaluations that are on disk."""
        folder = os.path.join(
            glob.escape(model_dir), os.path.dirname(self._pattern or "")
        )
        best = None
        for found in sorted(glob.glob(folder)):
            for step, metrics in records.read(found).items():
                result = metrics | {"global_step": step}
                if best is None or self._compare_fn(
                    best_eval_result=best, current_eval_result=result
                ):
                    best = result
        return best


def check_serving(serving_input_receiver_fn: object, as_text: object) -> None:
    """Raises ValueError for arguments of SavedModels of graphs."""
    if serving_input_receiver_fn is not None:
        raise ValueError(
            "`serving_input_receiver_fn` has no meaning here. Received: "
            f"{shown(serving_input_receiver_fn)}. Leave it out: the exported "
            "model takes features as the model of the `model_fn` does; what "
            "is to be done before belongs into its layers."
        )
    if as_text:
        raise ValueError(
            "There is no text form of an export. Received: "
            f"as_text={as_text}. Leave it out: a `.keras` file is a zip "
            "archive with the model's configuration as JSON."
        )


def _check_compare_fn(compare_fn: object) -> None:
    if compare_fn is None or not callable(compare_fn):
        raise ValueError(
            "`compare_fn` must be a function. Received: "
            f"{shown(compare_fn)}. Leave it out to compare losses."
        )
    wanted = {"best_eval_result", "current_eval_result"}
    names = set(find_argument_names(compare_fn))
    for name in sorted(wanted - names):
        raise ValueError(
            f"compare_fn must include {name} argument. Received: the "
            f"arguments {sorted(names)}. Write "
            "`def compare_fn(best_eval_result, current_eval_result)`."
        )
    if names - wanted:
        raise ValueError(
            "compare_fn has arguments that are not expected. Received: "
            f"{sorted(names - wanted)}. Take best_eval_result and "
            "current_eval_result only."
        )


def _is_equal(
    best: Mapping[str, Any] | None, result: Mapping[str, Any]
) -> bool:
    """Whether a result read from disk is this one."""
    if best is None:
        return False
    shared = [name for name in best if name in result]
    return bool(shared) and all(
        float(best[name]) == float(result[name]) for name in shared
    )


def _delete_old(export_path: str, exports_to_keep: int | None) -> None:
    """Deletes exports but the last ones; other folders are left alone."""
    if exports_to_keep is None:
        return
    found = sorted(list_exports(export_path))
    for version in found[: max(len(found) - exports_to_keep, 0)]:
        path = os.path.join(export_path, str(version))
        try:
            shutil.rmtree(path)
        except OSError as error:
            _logger.warning("Can not delete %s: %s", path, error)


def list_exports(export_path: str) -> list[int]:
    """The versions of the exports in a folder: seconds since 1970."""
    try:
        names = [path.name for path in pathlib.Path(export_path).iterdir()]
    except FileNotFoundError:
        return []
    return [
        int(name)
        for name in names
        if len(name) == _NUM_DIGITS and name.isascii() and name.isdigit()
    ]
