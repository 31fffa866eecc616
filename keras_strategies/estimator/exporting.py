"""Exports of an Estimator: a folder for each, named by the time."""

import functools
import importlib.util
import logging
import os
import pathlib
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Mapping

import keras
import numpy as np

from keras_strategies._types import Array, Tree
from keras_strategies.checkpoint import reading
from keras_strategies.cluster.addresses import shown
from keras_strategies.cluster.checks import check_type
from keras_strategies.cluster.untrusted import open_regular
from keras_strategies.data import batch_spec
from keras_strategies.estimator.estimator_spec import MODES
from keras_strategies.estimator.exporters import check_serving, exports_in
from keras_strategies.estimator.model_fns import Made
from keras_strategies.keras_bridge.loops.scope_hooks import is_built

MODEL_FILE = "model.keras"
"""The file of an export that Keras reads."""

FEATURES = "features.json"
"""The file in `model_dir` that says what features are made of."""

_EXTRA = "assets.extra"
_MAX_BYTES = 1 << 20
_logger = logging.getLogger(__name__)


def export(
    make: Callable[[str, Tree], Made],
    model_dir: str,
    base: str,
    checkpoint_path: str | None,
    *,
    serving_input_receiver_fn: object,
    assets_extra: Mapping[str, str] | None,
    as_text: object,
    mode: str,
    saved_model: bool | None,
) -> str:
    """Exports a checkpoint; the rest as of `Estimator.export_saved_model`.

    Args:
      make: Calls the `model_fn` for a mode and features, outside of a scope.
      model_dir: The Estimator's.
      base: `export_dir_base`.
      checkpoint_path: The checkpoint; None for the newest good one.
      serving_input_receiver_fn: None.
      assets_extra: Files to copy.
      as_text: False.
      mode: One of `ModeKeys`.
      saved_model: Whether to write a SavedModel.
    """
    check_serving(serving_input_receiver_fn, as_text)
    if mode not in MODES:
        raise ValueError(
            f"`experimental_mode` is one of {MODES}. Received: {shown(mode)}. "
            "Leave it out for what is served."
        )
    writes_saved_model = _writes_saved_model(saved_model)
    files = _checked_files(assets_extra)
    path = checkpoint_path or reading.newest_good(model_dir)
    if path is None:
        raise ValueError(
            f"Couldn't find trained model at {model_dir}. Received: "
            "a folder without a good checkpoint. Train first."
        )
    reading.check(path)
    model = _restored(make, mode, path, noted_features(model_dir))
    made = _make_folder(base)
    try:
        if writes_saved_model:
            _write_saved_model(model, made)
        model.save(os.path.join(made, MODEL_FILE))
        _copy_files(files, made)
        return _put_in_place(made, base)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def note_features(model_dir: str, features: Tree) -> None:
    """Writes down what features are made of, for exports of other processes.

    Args:
      model_dir: The folder.
      features: Symbolic features.
    """
    rows = [f for f in keras.tree.flatten(features) if f is not None]
    if any(None in row.shape[1:] for row in rows):
        return
    example = keras.tree.map_structure(functools.partial(_zeros, 0), features)
    text = batch_spec.spec_of(example)
    try:
        batch_spec.empty(text, has_classes=False)
    except ValueError:
        # A file names no classes, and a process without them cannot read it.
        return
    os.makedirs(model_dir, mode=0o700, exist_ok=True)
    path = pathlib.Path(model_dir, FEATURES)
    if _bytes_of(path) == text.encode():
        return
    temporary = path.with_name(f".{FEATURES}-{os.getpid()}")
    temporary.write_text(text, "utf-8")
    os.replace(temporary, path)


def noted_features(model_dir: str) -> Tree:
    """Arrays without rows, as features; None if nothing was written down.

    A file that was changed or damaged is left out, with a line in the log.
    """
    path = pathlib.Path(model_dir, FEATURES)
    text = _bytes_of(path)
    if text is None:
        return None
    try:
        return batch_spec.empty(text.decode("utf-8"), has_classes=False)
    except ValueError as error:
        _logger.warning("%s is left out: %s", path, error)
        return None


def _bytes_of(path: pathlib.Path) -> bytes | None:
    """What is in a file, up to a limit; None if it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(_MAX_BYTES + 1)
    except OSError:
        return None


def _restored(
    make: Callable[[str, Tree], Made], mode: str, path: str, features: Tree
) -> keras.Model:
    """Returns the model of a checkpoint, on one device, of no strategy."""
    made = make(mode, features)
    model = made.model
    if not is_built(model):
        if features is None:
            raise ValueError(
                "A model that is exported knows the shapes of its inputs. "
                f"Received: {model.name!r}, which was never called. Have "
                "`model_fn` make it with `keras.Input`, or train it first."
            )
        model(keras.tree.map_structure(functools.partial(_zeros, 1), features))
    reading.restore(model, path)
    # What is served has no optimizer, and no loss that may be one's own.
    model.compiled, model.optimizer = False, None
    return made.outputs


def _writes_saved_model(asked: bool | None) -> bool:
    has_tensorflow = importlib.util.find_spec("tensorflow") is not None
    if asked and not has_tensorflow:
        raise ImportError(
            "A SavedModel is written with TensorFlow. Received: "
            "saved_model=True, and no module `tensorflow`. Run `pip install "
            "tensorflow-cpu`, or serve `model.keras`."
        )
    return has_tensorflow if asked is None else asked


def _write_saved_model(model: keras.Model, folder: str) -> None:
    with warnings.catch_warnings():
        # Keras 3.15 calls what jax2tf deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        model.export(folder, format="tf_saved_model", verbose=False)


def _zeros(num_rows: int, feature: Array) -> np.ndarray:
    """Returns rows of zeros with the shape of a feature's."""
    return np.zeros((num_rows, *feature.shape[1:]), feature.dtype)


def _checked_files(files: Mapping[str, str] | None) -> dict[str, str]:
    """The files for `assets.extra`: their names there, and where they are."""
    if files is None:
        return {}
    what = "a dict from paths in the export to files"
    cure = "Write {'labels.txt': '/data/labels.txt'}."
    check_type("`assets_extra`", files, Mapping, what, cure)
    for name, source in files.items():
        parts = pathlib.PurePath(name).parts
        if not parts or ".." in parts or pathlib.PurePath(name).is_absolute():
            raise ValueError(
                "Keys of `assets_extra` are paths in the export. Received: "
                f"{shown(name)}. Give a relative path without '..'."
            )
        if not os.path.isfile(source):
            raise ValueError(
                "Values of `assets_extra` are files. Received: "
                f"{shown(source)}, which is none. Correct the path."
            )
    return dict(files)


def _copy_files(files: Mapping[str, str], folder: str) -> None:
    """Copies files into the folder of an export."""
    for name, source in files.items():
        target = pathlib.Path(folder, _EXTRA, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def _make_folder(base: str) -> str:
    """Makes the folder of an export that is not complete, and returns it."""
    try:
        os.makedirs(base, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise NotADirectoryError(
            "`export_dir_base` is a folder, in which each export is a folder. "
            f"Received: {base!r}, which is a file or in one. Give another "
            "path; it need not exist."
        ) from None
    made = os.path.join(base, f"temp-{secrets.token_hex(8)}")
    # As other folders are, and no more open than the umask has them.
    os.mkdir(made, 0o755)
    return made


def _put_in_place(made: str, base: str) -> str:
    """Gives a complete export its name: the time, but one of its own."""
    version = max([int(time.time()), *(v + 1 for v in exports_in(base))])
    while True:
        path = os.path.join(base, str(version))
        if not os.path.lexists(path):
            try:
                os.rename(made, path)
                return path
            except OSError:
                if not os.path.lexists(path):
                    raise
        version += 1
