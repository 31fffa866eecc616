"""Names whose modules are imported on first use."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    public: str,
    package: str,
    modules: Mapping[str, str],
    instead: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Creates a module's `__getattr__` and `__dir__`, which import lazily.

    See PEP 562. A module of public names imports each name when it is first
    used.

    Args:
      public: The `__name__` of the module that contains the public names.
      package: The package to which the module names in `modules` are relative.
      modules: The module that defines each name; "" for a name that is itself
        a module of `package`.
      instead: For each unsupported TensorFlow name, the replacement that the
        error message suggests.

    Example:
      ```python
      _MODULES = {"Keep": "keeping", "Checkpoint": "manager"}
      __getattr__, __dir__ = lazy_names(__name__, __name__, _MODULES)
      ```
    """

    def get(name: str) -> Any:
        if instead is not None and name in instead:
            raise AttributeError(
                f"module {public!r} has no attribute {name!r}. This TensorFlow "
                f"name is not supported. Use {instead[name]}. "
                "docs/migration.md lists all names."
            )
        if name not in modules:
            raise AttributeError(f"module {public!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{modules[name] or name}")
        value = getattr(module, name) if modules[name] else module
        # Stored in the module, so that the next access does not call this
        # function.
        setattr(sys.modules[public], name, value)
        return value

    def names() -> list[str]:
        dunder = (n for n in vars(sys.modules[public]) if n[:2] == "__")
        return sorted({*dunder, *modules})

    return get, names


_places: dict[str, tuple[str, str]] = {}


def enter(name: str, module: str, function: str) -> None:
    """Enters a function, whose module is imported when it is first called."""
    _places[name] = module, function


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the function that was entered under a name."""
    module, function = _places[name]
    return getattr(importlib.import_module(module), function)(*args, **kwargs)
