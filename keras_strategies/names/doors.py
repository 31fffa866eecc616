"""Functions of higher rooms, which lower rooms call by a name."""

import importlib
from typing import Any

_places: dict[str, tuple[str, str]] = {}


def enter(name: str, module: str, function: str) -> None:
    """Enters a function, whose module is imported when it is first called."""
    _places[name] = module, function


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the function that was entered under a name."""
    module, function = _places[name]
    return getattr(importlib.import_module(module), function)(*args, **kwargs)
