"""Patches of Keras, keras-hub and JAX while a script is planned.

Pretrained models are created without their weights. Nothing is downloaded for
them, because a plan needs no values. But configs are read, if they are on this
machine.
"""

import contextlib
import functools
import glob
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import keras

from keras_strategies.planning.capture.errors import PlanError
from keras_strategies.planning.seam import (
    skip_weights,
)

_HUB = "keras_hub"
_MAX_NAMES = 3
_MAX_LETTERS = 80


class LibraryPatches(importlib.abc.MetaPathFinder):
    """Patches libraries, and records which weights were not loaded."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._stack = contextlib.ExitStack()

    @property
    def note(self) -> str:
        """A sentence about weights that were not loaded, or ""."""
        names = [name[:_MAX_LETTERS] for name in self._names]
        if not names:
            return ""
        shown = ", ".join(map(repr, names[:_MAX_NAMES]))
        more = len(names) - _MAX_NAMES
        return (
            f"The weights of {shown}{f' and {more} more' if more > 0 else ''} "
            "were not loaded, because a plan needs no values."
        )

    @contextlib.contextmanager
    def install(self) -> Iterator[None]:
        """Patches the libraries while the block runs."""
        with self._stack:
            for owner, name, value in (
                (keras.Model, "make_train_function", _refuse_plain),
                (jax.distributed, "initialize", lambda *args, **kwargs: None),
                *skip_weights(self._add),
            ):
                self._set(owner, name, value)
            if _HUB in sys.modules:
                self._patch_hub(sys.modules[_HUB])
            else:
                # keras-hub is not imported here, since that takes seconds.
                sys.meta_path.insert(0, self)
                self._stack.callback(self._stop_waiting)
            yield

    def _stop_waiting(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds keras-hub by other finders, and patches it after its import."""
        if fullname != _HUB:
            return None
        self._stop_waiting()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                self._patch_hub(module)

            loader.exec_module = exec_module
        return spec

    def _add(self, name: str) -> None:
        self._names[name] = None

    def _set(self, owner: Any, name: str, value: object) -> None:
        """Sets an attribute until `install` ends."""
        before = vars(owner).get(name, getattr(owner, name))
        self._stack.callback(setattr, owner, name, before)
        setattr(owner, name, value)

    def _patch_hub(self, hub: Any) -> None:
        for owner in (hub.models.Backbone, hub.models.Task):
            create = vars(owner)["from_preset"].__func__
            self._set(owner, "from_preset", self._without_weights(create))
        downloads = sys.modules[f"{_HUB}.src.utils.preset_utils"]
        kaggle = types.SimpleNamespace(model_download=_find_kaggle_file)
        hugging_face = types.SimpleNamespace(hf_hub_download=_find_hf_file)
        self._set(downloads, "kagglehub", kaggle)
        self._set(downloads, "huggingface_hub", hugging_face)

    def _without_weights(self, create: Callable[..., Any]) -> Any:
        @functools.wraps(create)
        def from_preset(
            cls: type, preset: Any, load_weights: bool = True, **kwargs: Any
        ) -> Any:
            if load_weights:
                self._add(str(preset))
            return create(cls, preset, load_weights=False, **kwargs)

        return classmethod(from_preset)


def _refuse_plain(model: keras.Model, *args: object, **kwargs: object) -> None:
    raise PlanError(
        "A planned script must first train a strategy's model. Received: a "
        f"script that first trains {model.name!r}, which was not created or "
        "compiled in a strategy's scope. Create and compile it in the scope."
    )


def _find_kaggle_file(handle: str, path: str) -> str:
    """Returns the path of a file in Kaggle's cache; does not download it.

    Args:
      handle: A model, as "owner/model/framework/variation[/version]". Without
        a version, the newest one in the cache is used.
      path: The file.

    Raises:
      PlanError: if no file of the model is in the cache.
      FileNotFoundError: if other files of the model are in the cache.
    """
    default = os.path.join("~", ".cache", "kagglehub")
    cache = os.path.expanduser(os.environ.get("KAGGLEHUB_CACHE", default))
    directory = os.path.join(cache, "models", *handle.split("/"))
    is_version = handle.count("/") == 4
    versions = [directory] if is_version else glob.glob(f"{directory}/[0-9]*")
    if not any(map(os.path.isdir, versions)):
        _refuse_preset(f"kaggle://{handle}", path)
    files = [os.path.join(version, path) for version in versions]
    found = [file for file in files if os.path.isfile(file)]
    if not found:
        raise FileNotFoundError(f"{path!r} of {handle!r} is not in {cache!r}")
    return max(found, key=lambda file: (len(file), file))


def _find_hf_file(repo_id: str, filename: str) -> str:
    """Returns the path of a file in Hugging Face's cache; see above."""
    import huggingface_hub as hub  # pyright: ignore[reportMissingImports]

    if not isinstance(hub.try_to_load_from_cache(repo_id, "config.json"), str):
        _refuse_preset(f"hf://{repo_id}", filename)
    return hub.hf_hub_download(repo_id, filename, local_files_only=True)


def _refuse_preset(preset: str, path: str) -> NoReturn:
    raise PlanError(
        "A plan needs the files of a preset, such as its config, but not its "
        f"weights, and downloads nothing. Received: from_preset of {preset!r}; "
        f"not on this machine: {path}. Pass a local preset directory, load the "
        "preset once without a plan, or create the model from its config."
    )
