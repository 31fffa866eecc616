"""Public names that are imported when they are first asked for."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    public: str, package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a module of public names (PEP 562).

    Args:
      public: The module that has the names, its `__name__`.
      package: What the modules are named relative to.
      modules: The module that defines each name; "" for a name that is itself
        a module of `package`.

    Example:
      ```python
      _MODULES = {"Keep": "keeping", "Checkpoint": "manager"}
      __getattr__, __dir__ = lazy_names(__name__, __name__, _MODULES)
      ```
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {public!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{modules[name] or name}")
        value = getattr(module, name) if modules[name] else module
        # From now on it is found without this function.
        setattr(sys.modules[public], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[public]), *modules})

    return get, names
