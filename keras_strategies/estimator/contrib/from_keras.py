"""Implements `model_to_estimator`: creates an Estimator from a Keras model."""

import os
import pathlib
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_strategies.estimator.config.run_checks import check_unsupported
from keras_strategies.estimator.config.run_config import RunConfig
from keras_strategies.estimator.estimator import Estimator
from keras_strategies.estimator.estimator_spec import EstimatorSpec, ModeKeys
from keras_strategies.estimator.model_fns import find_output_names
from keras_strategies.estimator.seam import (
    check_type,
    shorten,
)


def model_to_estimator(
    keras_model: keras.Model | None = None,
    keras_model_path: str | os.PathLike[str] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    model_dir: str | os.PathLike[str] | None = None,
    config: RunConfig | None = None,
    checkpoint_format: str = "saver",
    metric_names_map: None = None,
    export_outputs: None = None,
) -> Estimator:
    """Creates an Estimator from a compiled Keras model, as in TensorFlow.

    The model is copied and never modified. The Estimator starts with the
    model's weights and the state of its optimizer, unless `model_dir` contains
    a checkpoint. Predictions are dicts whose keys are the names of the model's
    outputs.

    Args:
      keras_model: The compiled model.
      keras_model_path: Path of a `.keras` file that contains a compiled model,
        to pass instead of `keras_model`.
      custom_objects: The user-defined classes and functions in the model, by
        name, if they are not registered with Keras.
      model_dir: See `Estimator`.
      config: See `Estimator`.
      checkpoint_format: Has no effect.
      metric_names_map: Must be None.
      export_outputs: Must be None.

    Returns:
      The Estimator.

    Raises:
      ValueError: if both or neither of `keras_model` and `keras_model_path` are
        given, the model is not compiled, or an argument is not supported on
        JAX.
      TypeError: if an argument has the wrong type.

    Example:
      ```python
      estimator = ks.estimator.model_to_estimator(model, model_dir="run")
      spec = ks.estimator.TrainSpec(train_input_fn, max_steps=1000)
      ```
    """
    if (keras_model is None) == (keras_model_path is None):
        raise ValueError(
            "Either `keras_model` or `keras_model_path` needs to be provided, "
            f"but not both. Received: {shorten(keras_model)} and "
            f"{shorten(keras_model_path)}. Pass one of the two."
        )
    check_unsupported("export_outputs", export_outputs)
    check_unsupported("metric_names_map", metric_names_map)
    directory = tempfile.mkdtemp(prefix="keras-strategies-model-")
    path = os.path.join(directory, "model.keras")
    try:
        if keras_model is not None:
            _save(keras_model, path)
        else:
            _copy(keras_model_path, path)
        model_fn = _make_model_fn(
            path, custom_objects, is_trusted=keras_model is not None
        )
        estimator = Estimator(model_fn, model_dir=model_dir, config=config)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    weakref.finalize(estimator, shutil.rmtree, directory, ignore_errors=True)
    return estimator


def _save(model: keras.Model, path: str) -> None:
    fix = "Pass a `keras.Model`."
    check_type("`keras_model`", model, keras.Model, "a Keras model", fix)
    _check_compiled(model)
    if not model.built:
        raise ValueError(
            "`keras_model` must be built, because its weights are copied. "
            f"Received: {model.name!r}, which has no weights yet. Start the "
            "model with `keras.Input(shape)`, or call it on data."
        )
    optimizer = model.optimizer
    if not optimizer.built:
        # Keras warns when it saves an optimizer whose state is not built.
        optimizer.build(model.trainable_variables)
    model.save(path)


def _check_compiled(model: keras.Model) -> None:
    if not model.compiled:
        raise ValueError(
            "The given Keras model must be compiled. Received: "
            f"{model.name!r}, which is not compiled. Call `model.compile()` "
            "before `model_to_estimator()`."
        )


def _copy(source: Any, path: str) -> None:
    fix = "Pass a `.keras` file."
    check_type("`keras_model_path`", source, (str, os.PathLike), "a path", fix)
    if pathlib.Path(source).suffix != ".keras":
        raise ValueError(
            "`keras_model_path` must be a `.keras` file: other formats may run "
            f"code when they are loaded. Received: {os.fspath(source)!r}. Save "
            "the model again with `model.save('model.keras')`."
        )
    shutil.copyfile(source, path)


def _make_model_fn(
    path: str, custom_objects: Mapping[str, Any] | None, *, is_trusted: bool
) -> Callable[[str], keras.Model | EstimatorSpec]:
    """Returns a `model_fn` that loads the model each time it is called.

    Args:
      path: Path of the model's file.
      custom_objects: See `model_to_estimator`.
      is_trusted: Whether code in the file may be run, because this process
        saved the model itself.
    """

    def model_fn(mode: str) -> keras.Model | EstimatorSpec:
        model: Any = keras.saving.load_model(
            path,
            custom_objects=dict(custom_objects or {}),
            safe_mode=not is_trusted,
        )
        _check_compiled(model)
        names = find_output_names(model)
        if mode != ModeKeys.PREDICT or not names:
            return model
        return EstimatorSpec(mode, model=model, predictions=names)

    return model_fn
