"""Public names that are imported on first use."""

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
    """Makes `__getattr__` and `__dir__` of a module of public names (PEP 562).

    Args:
      public: The `__name__` of the module that has the names.
      package: The package that the modules' names are relative to.
      modules: The module that defines each name; "" for a name that is itself
        a module of `package`.
      instead: Replacements to suggest for unsupported TensorFlow names.

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
                f"name is not supported. Use {instead[name]}."
            )
        if name not in modules:
            raise AttributeError(f"module {public!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{modules[name] or name}")
        value = getattr(module, name) if modules[name] else module
        # The next access finds it without this function.
        setattr(sys.modules[public], name, value)
        return value

    def names() -> list[str]:
        dunder = (n for n in vars(sys.modules[public]) if n[:2] == "__")
        return sorted({*dunder, *modules})

    return get, names
