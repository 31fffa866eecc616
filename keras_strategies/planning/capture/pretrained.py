"""Pretrained models in a planned script: their weights are not loaded."""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_strategies.keras_bridge.weight_files import skip_weights
from keras_strategies.planning.capture.errors import PlanError
from keras_strategies.spmd.attributes import temporary_attribute

_HUB = "keras_hub"
_MAX_NAMES = 3
_MAX_LETTERS = 80
# The classes of keras-hub that define `from_preset`, and whether it has the
# argument `load_weights`.
_PRESETS = {
    "models.Backbone": True,
    "models.Task": True,
    "models.Preprocessor": False,
    "tokenizers.Tokenizer": False,
    "layers.AudioConverter": False,
    "layers.ImageConverter": False,
    "layers.VideoConverter": False,
}


class Pretrained:
    """Makes code that loads pretrained weights create models without them.

    Nothing is downloaded, because a plan needs no values. But configs are read,
    if they are on this machine.
    """

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

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
        """Replaces the functions that load weights while the block runs."""
        with contextlib.ExitStack() as stack:
            replaced = skip_weights(self._add)
            load_model = _wrap_load_model(keras.saving.load_model)
            replaced += [
                (module, "load_model", load_model)
                for module in (keras.saving, keras.models)
            ]
            for owner, name, value in replaced:
                stack.enter_context(temporary_attribute(owner, name, value))
            stack.enter_context(_after_import(_HUB, self._patch_hub(stack)))
            yield

    def _add(self, name: str) -> None:
        self._names[name] = None

    def _patch_hub(
        self, stack: contextlib.ExitStack
    ) -> Callable[[types.ModuleType], None]:
        def patch(hub: types.ModuleType) -> None:
            for path, has_weights in _PRESETS.items():
                owner: Any = functools.reduce(
                    lambda part, name: getattr(part, name, None),
                    path.split("."),
                    hub,
                )
                if owner is None:
                    continue
                before = vars(owner)["from_preset"]
                load = self._wrap_from_preset(before.__func__, has_weights)
                owner.from_preset = classmethod(load)
                stack.callback(setattr, owner, "from_preset", before)

        return patch

    def _wrap_from_preset(
        self, original: Callable[..., Any], has_weights: bool
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def from_preset(
            cls: type, preset: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if has_weights:
                # The first of `args` is `load_weights`.
                is_loaded = kwargs.pop("load_weights", (*args, True)[0])
                args = (False, *args[1:])
                if is_loaded:
                    self._add(str(preset))
            missing: dict[str, None] = {}
            with _offline(missing):
                try:
                    return original(cls, preset, *args, **kwargs)
                except (FileNotFoundError, ValueError) as error:
                    if not missing:
                        raise
                    raise PlanError(
                        "A plan needs the files of a preset, such as its "
                        "config, but not its weights, and downloads nothing. "
                        f"Received: from_preset({preset!r}); not on this "
                        f"machine: {', '.join(missing)}. Pass a local preset "
                        "directory, load the preset once without a plan, or "
                        f"create {cls.__name__} from its config."
                    ) from error

        return from_preset


def _wrap_load_model(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_model(filepath: Any, *args: Any, **kwargs: Any) -> Any:
        path = str(filepath)
        if "://" not in path and not os.path.exists(path):
            raise PlanError(
                "`load_model` must read a model's config from its file, also "
                f"in a plan. Received: {path!r}, which does not exist. Copy "
                "the file to this machine, or create the model by its code."
            )
        return original(filepath, *args, **kwargs)

    return load_model


@contextlib.contextmanager
def _offline(missing: dict[str, None]) -> Iterator[None]:
    """Makes presets come from this machine's caches while the block runs.

    Args:
      missing: Receives the names of files that are in no cache.
    """

    def find(look_up: Callable[..., str]) -> Callable[..., str]:
        def find_file(model: str, path: str) -> str:
            try:
                return look_up(model, path)
            except FileNotFoundError:
                missing[path] = None
                raise

        return find_file

    hugging: Any = sys.modules.get("huggingface_hub")
    kaggle: Any = sys.modules.get("kagglehub")
    with contextlib.ExitStack() as stack:
        if kaggle is not None:
            download = find(_find_in_cache)
            stack.enter_context(
                temporary_attribute(kaggle, "model_download", download)
            )
        if hugging is not None:
            original = hugging.hf_hub_download
            download = find(functools.partial(original, local_files_only=True))
            stack.enter_context(
                temporary_attribute(
                    hugging,
                    "hf_hub_download",
                    lambda repo_id, filename: download(repo_id, filename),
                )
            )
        yield


def _find_in_cache(handle: str, path: str) -> str:
    """Returns the path of a file in Kaggle's cache; does not download it.

    Args:
      handle: A model, as "owner/model/framework/variation[/version]".
      path: The file.

    Raises:
      FileNotFoundError: if the file is not in the cache.
    """
    default = os.path.join("~", ".cache", "kagglehub")
    cache = os.environ.get("KAGGLEHUB_CACHE", default)
    folder = pathlib.Path(cache).expanduser() / "models" / handle
    versions = [folder, *folder.glob("[0-9]*")]
    found = [v / path for v in versions if (v / path).is_file()]
    if not found:
        raise FileNotFoundError(f"{path!r} of {handle!r} is not in {cache!r}")
    return str(max(found, key=lambda file: _version_of(file, path)))


def _version_of(file: pathlib.Path, path: str) -> int:
    name = file.parents[len(pathlib.Path(path).parts) - 1].name
    return int(name) if name.isdecimal() else 0


class _Finder(importlib.abc.MetaPathFinder):
    """Calls a function with a module after its import."""

    def __init__(
        self, name: str, then: Callable[[types.ModuleType], None]
    ) -> None:
        self._name, self._then = name, then

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds the module by the other finders, and wraps its loader."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                self._then(module)

            loader.exec_module = exec_module
        return spec


@contextlib.contextmanager
def _after_import(
    name: str, then: Callable[[types.ModuleType], None]
) -> Iterator[None]:
    """Calls `then` with a module, now or when the block imports it."""
    if name in sys.modules:
        then(sys.modules[name])
        yield
        return
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
