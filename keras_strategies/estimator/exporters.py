"""Exporters, which decide after each evaluation whether to export the model."""

import abc
import inspect
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from keras_strategies.estimator import records
from keras_strategies.estimator.arguments import check_positive
from keras_strategies.estimator.config.run_checks import check_unsupported

DEFAULT_EXPORTS_TO_KEEP = 5
_logger = logging.getLogger(__name__)


class Exporter(abc.ABC):
    """The base class of exporters for `EvalSpec(exporters=...)`.

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
        """The name of this exporter's directory under `model_dir/export`."""

    @abc.abstractmethod
    def export(
        self,
        estimator: Any,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> str | None:
        """Exports the evaluated checkpoint, if this exporter decides to.

        Args:
          estimator: The `Estimator`.
          export_path: The directory to write the export to.
          checkpoint_path: The checkpoint that was evaluated.
          eval_result: The result of `Estimator.evaluate` for the checkpoint.
          is_the_final_export: Whether training has ended. Always False if
            `TrainSpec.max_steps` is None.

        Returns:
          The directory of the export, or None if nothing was exported.
        """


class _ModelExporter(Exporter):
    """The base class of exporters that export if `_is_due` returns True."""

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: None = None,
        assets_extra: None = None,
        as_text: bool = False,
        exports_to_keep: int | None = DEFAULT_EXPORTS_TO_KEEP,
        *,
        saved_model: bool | None = None,
    ) -> None:
        check_serving(serving_input_receiver_fn, assets_extra, as_text)
        check_positive("exports_to_keep", exports_to_keep)
        self._name = name
        self._saved_model = saved_model
        self._exports_to_keep = exports_to_keep

    @property
    def name(self) -> str:
        """The name of this exporter's directory under `model_dir/export`."""
        return self._name

    def export(
        self,
        estimator: Any,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> str | None:
        """Exports if an export is due; see `Exporter.export`."""
        if not self._is_due(estimator, eval_result, is_the_final_export):
            return None
        path = estimator.export_saved_model(
            export_path,
            checkpoint_path=checkpoint_path,
            saved_model=self._saved_model,
        )
        _delete_old(export_path, self._exports_to_keep)
        return path

    def _is_due(
        self, estimator: Any, eval_result: Mapping[str, Any], is_final: bool
    ) -> bool:
        return True


class FinalExporter(_ModelExporter):
    """Exports the model once, at the end of training, as in TensorFlow.

    It requires `TrainSpec(max_steps=...)`.

    Differs from tf: the exported model has the same inputs as the model that
    `model_fn` returns, so `serving_input_receiver_fn` is not supported.

    Args:
      name: Name of the directory under `model_dir/export`.
      serving_input_receiver_fn: Must be None.
      assets_extra: Must be None.
      as_text: Must be False.
      saved_model: Whether to write a SavedModel as well (see
        `Estimator.export_saved_model`).

    Raises:
      ValueError: if an argument is not supported on JAX.

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
        assets_extra: None = None,
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
            _logger.info("Exporting the final model at the end of training.")
        return is_final


class LatestExporter(_ModelExporter):
    """Exports the model after every evaluation, as in TensorFlow.

    It keeps the newest exports and deletes older ones.

    Args:
      name: Name of the directory under `model_dir/export`.
      serving_input_receiver_fn: Must be None; see `FinalExporter`.
      assets_extra: Must be None.
      as_text: Must be False.
      exports_to_keep: Number of newest exports to keep; None to keep all.
      saved_model: See `FinalExporter`.

    Raises:
      ValueError: if an argument is not supported on JAX, or `exports_to_keep`
        is 0 or less.
      TypeError: if `exports_to_keep` is neither an integer nor None.

    Example:
      ```python
      exporter = ks.estimator.LatestExporter("latest", exports_to_keep=3)
      spec = ks.estimator.EvalSpec(eval_input_fn, exporters=exporter)
      ```
    """


def has_smaller_loss(
    best_eval_result: Mapping[str, Any], current_eval_result: Mapping[str, Any]
) -> bool:
    """Returns whether the current loss is smaller than the best one."""
    return best_eval_result["loss"] > current_eval_result["loss"]


class BestExporter(_ModelExporter):
    """Exports the model whenever it is the best so far, as in TensorFlow.

        exporter = ks.estimator.BestExporter(
            compare_fn=lambda best_eval_result, current_eval_result: (
                current_eval_result["accuracy"] > best_eval_result["accuracy"]
            )
        )

    Args:
      name: Name of the directory under `model_dir/export`.
      serving_input_receiver_fn: Must be None; see `FinalExporter`.
      event_file_pattern: A path relative to `model_dir`, for example
        "eval_test/*" for an evaluation named "test". The results of earlier
        runs in the path's directory are compared, too. None to compare only
        results of this process.
      compare_fn: Function that receives `best_eval_result` and
        `current_eval_result`, and returns whether the current one is better.
        By default, the result with the smaller loss is better.
      assets_extra: Must be None.
      as_text: Must be False.
      exports_to_keep: Number of newest exports to keep; None to keep all.
      saved_model: See `FinalExporter`.

    Raises:
      ValueError: if an argument is not supported on JAX, or `exports_to_keep`
        is 0 or less.
      TypeError: if `exports_to_keep` is neither an integer nor None, or
        `compare_fn` has the wrong arguments.
    """

    def __init__(
        self,
        name: str = "best_exporter",
        serving_input_receiver_fn: None = None,
        event_file_pattern: str | None = "eval/*.tfevents.*",
        compare_fn: Callable[..., bool] = has_smaller_loss,
        assets_extra: None = None,
        as_text: bool = False,
        exports_to_keep: int | None = DEFAULT_EXPORTS_TO_KEEP,
        *,
        saved_model: bool | None = None,
    ) -> None:
        arguments = name, serving_input_receiver_fn, assets_extra, as_text
        super().__init__(*arguments, exports_to_keep, saved_model=saved_model)
        # Raises TypeError unless the function has these two arguments.
        signature = inspect.signature(compare_fn)
        signature.bind(best_eval_result=None, current_eval_result=None)
        self._pattern = event_file_pattern
        self._compare_fn = compare_fn
        self._model_dir: str | None = None
        self._best: Mapping[str, Any] | None = None

    def _is_due(
        self, estimator: Any, eval_result: Mapping[str, Any], is_final: bool
    ) -> bool:
        if self._pattern and self._model_dir != estimator.model_dir:
            self._model_dir = estimator.model_dir
            step = eval_result.get(records.GLOBAL_STEP)
            self._best = self._find_best(estimator.model_dir, step)
        if not self._is_better(self._best, eval_result):
            return False
        _logger.info("Exporting the best model so far.")
        self._best = eval_result
        return True

    def _find_best(self, model_dir: str, step: Any) -> Mapping[str, Any] | None:
        """Returns the best result on disk of other steps, or None."""
        directory = os.path.join(
            model_dir, os.path.dirname(self._pattern or "")
        )
        best = None
        for other_step, metrics in records.read(directory).items():
            result = metrics | {records.GLOBAL_STEP: other_step}
            if other_step != step and self._is_better(best, result):
                best = result
        return best

    def _is_better(self, best: Any, result: Mapping[str, Any]) -> bool:
        return best is None or self._compare_fn(
            best_eval_result=best, current_eval_result=result
        )


def check_serving(
    serving_input_receiver_fn: object, assets_extra: object, as_text: object
) -> None:
    """Raises ValueError if unsupported arguments of exports are given."""
    check_unsupported("serving_input_receiver_fn", serving_input_receiver_fn)
    check_unsupported("assets_extra", assets_extra)
    check_unsupported("as_text", as_text, default=False)


def _delete_old(export_path: str, exports_to_keep: int | None) -> None:
    """Deletes all exports except the newest ones, and no other directories."""
    if exports_to_keep is None:
        return
    for version in sorted(list_exports(export_path))[:-exports_to_keep]:
        path = os.path.join(export_path, str(version))
        try:
            shutil.rmtree(path)
        except OSError as error:
            _logger.warning(
                "The old export %s could not be deleted: %s", path, error
            )


def list_exports(export_path: str) -> list[int]:
    """Returns the times of a directory's exports, in seconds since 1970."""
    try:
        names = os.listdir(export_path)
    except FileNotFoundError:
        return []
    return [int(name) for name in names if re.fullmatch("[0-9]{10}", name)]
