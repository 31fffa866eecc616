"""Exports an Estimator's model to a directory that is named after the time."""

import functools
import importlib.util
import logging
import os
import pathlib
import secrets
import shutil
import time
import warnings
from collections.abc import Callable

import keras
import numpy as np

from keras_strategies._types import Array, Tree
from keras_strategies.estimator.estimator_spec import check_mode
from keras_strategies.estimator.exporters import list_exports
from keras_strategies.estimator.model_fns import ModelBundle
from keras_strategies.estimator.seam import (
    batch_spec,
    dry_run,
    is_built,
    open_regular,
    reading,
)

MODEL_FILE = "model.keras"
"""The name of the Keras file in an export."""

FEATURES = "features.json"
"""The file in `model_dir` that describes the structure of the features."""

_MAX_BYTES = 1 << 20
_logger = logging.getLogger(__name__)


def export(
    make: Callable[[str, Tree], ModelBundle],
    model_dir: str,
    base: str,
    checkpoint_path: str | None,
    *,
    mode: str,
    saved_model: bool | None,
) -> str:
    """Exports a checkpoint's model; see `Estimator.export_saved_model`.

    Args:
      make: Function of a mode and features that calls the `model_fn` outside of
        any strategy scope and returns the result.
      model_dir: The Estimator's `model_dir`.
      base: The directory for exports.
      checkpoint_path: The checkpoint; None for the newest valid one.
      mode: One of `ModeKeys`.
      saved_model: Whether to write a SavedModel; None to write one if
        TensorFlow is installed.
    """
    check_mode("experimental_mode", mode)
    if saved_model is None:
        saved_model = importlib.util.find_spec("tensorflow") is not None
    path = checkpoint_path or reading.find_newest(model_dir)
    if path is None:
        raise ValueError(
            f"Could not find a trained model in {model_dir}. The directory "
            "contains no valid checkpoint. Call `train` first."
        )
    reading.check(path)
    model = _restore_model(make, mode, path, read_features(model_dir))
    os.makedirs(base, exist_ok=True)
    directory = os.path.join(base, f"temp-{secrets.token_hex(8)}")
    # As for ordinary directories, the mode is 755 minus the umask. A directory
    # that `tempfile` creates would have the mode 700.
    os.mkdir(directory, 0o755)
    try:
        if saved_model:
            _write_saved_model(model, directory)
        model.save(os.path.join(directory, MODEL_FILE))
        return _put_in_place(directory, base)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def write_features(model_dir: str, features: Tree) -> None:
    """Writes a file with the structure, shapes and dtypes of the features.

    Other processes need the file to build the model for an export. It is not
    written if the size of a dimension other than the first one is unknown, or
    if the structure contains named tuples.

    Args:
      model_dir: The directory to write to.
      features: Symbolic features.
    """
    rows = [f for f in keras.tree.flatten(features) if f is not None]
    if dry_run.get() is not None or any(None in row.shape[1:] for row in rows):
        return
    example = keras.tree.map_structure(
        functools.partial(_make_zeros, 0), features
    )
    try:
        text = batch_spec.make_spec(example)
    except TypeError:
        # Structures with named tuples are not written: a process in which their
        # classes are not defined could not read the file.
        return
    os.makedirs(model_dir, mode=0o700, exist_ok=True)
    path = pathlib.Path(model_dir, FEATURES)
    if _read_bytes(path) == text.encode():
        return
    temporary = path.with_name(f".{FEATURES}-{os.getpid()}")
    temporary.write_text(text, "utf-8")
    os.replace(temporary, path)


def read_features(model_dir: str) -> Tree:
    """Reads the file that `write_features` wrote.

    Returns:
      The features as arrays with 0 rows. None if the file is missing or
      damaged; damage is logged as a warning.
    """
    path = pathlib.Path(model_dir, FEATURES)
    text = _read_bytes(path)
    if text is None:
        return None
    try:
        return batch_spec.make_empty(text.decode("utf-8"))
    except ValueError as error:
        _logger.warning(
            "The file %s is ignored, because it is not valid: %s", path, error
        )
        return None


def _read_bytes(path: pathlib.Path) -> bytes | None:
    """Returns a file's content up to a size limit; None if unreadable."""
    try:
        with open_regular(path) as file:
            return file.read(_MAX_BYTES + 1)
    except OSError:
        return None


def _restore_model(
    make: Callable[[str, Tree], ModelBundle],
    mode: str,
    path: str,
    features: Tree,
) -> keras.Model:
    """Returns a checkpoint's model on one device, without a strategy."""
    bundle = make(mode, features)
    model = bundle.model
    if not is_built(model):
        if features is None:
            raise ValueError(
                f"The input shapes of the exported model {model.name!r} must "
                "be known, but it was never called. Create it with "
                "`keras.Input` in `model_fn`, or train it first."
            )
        model(
            keras.tree.map_structure(
                functools.partial(_make_zeros, 1), features
            )
        )
    reading.restore(model, path)
    # Serving needs no optimizer, and the server might not be able to load a
    # user-defined loss.
    model.compiled, model.optimizer = False, None
    return bundle.outputs


def _write_saved_model(model: keras.Model, directory: str) -> None:
    with warnings.catch_warnings():
        # Keras 3.15 calls deprecated functions in jax2tf.
        warnings.simplefilter("ignore", DeprecationWarning)
        model.export(directory, format="tf_saved_model", verbose=False)


def _make_zeros(num_rows: int, feature: Array) -> np.ndarray:
    """Returns `num_rows` rows of zeros, in the shape and dtype of a feature."""
    return np.zeros((num_rows, *feature.shape[1:]), feature.dtype)


def _put_in_place(directory: str, base: str) -> str:
    """Renames a finished export to an unused time; returns the new path."""
    version = max([int(time.time()), *(v + 1 for v in list_exports(base))])
    while True:
        path = os.path.join(base, str(version))
        if not os.path.lexists(path):
            try:
                os.rename(directory, path)
                return path
            except OSError:
                # If another process has just used this name, the next one is
                # tried. Any other error is raised.
                if not os.path.lexists(path):
                    raise
        version += 1
