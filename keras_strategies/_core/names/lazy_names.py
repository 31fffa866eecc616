"""Public names that are imported when they are first asked for."""

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
    """The `__getattr__` and `__dir__` of a module of public names (PEP 562).

    Args:
      public: The module that has the names, its `__name__`.
      package: What the modules are named relative to.
      modules: The module that defines each name; "" for a name that is itself
        a module of `package`.
      instead: What to use in the place of names of tf that are not here.

    Example:
      ```python
      _MODULES = {"Keep": "keeping", "Checkpoint": "manager"}
      __getattr__, __dir__ = lazy_names(__name__, __name__, _MODULES)
      ```
    """

    def get(name: str) -> Any:
        if instead is not None and name in instead:
            raise AttributeError(
                f"module {public!r} has no attribute {name!r}. It is a name of "
                f"TensorFlow without a counterpart here. Use {instead[name]}."
            )
        if name not in modules:
            raise AttributeError(f"module {public!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{modules[name] or name}")
        value = getattr(module, name) if modules[name] else module
        # From now on it is found without this function.
        setattr(sys.modules[public], name, value)
        return value

    def names() -> list[str]:
        own = (name for name in vars(sys.modules[public]) if name[:2] == "__")
        return sorted({*own, *modules})

    return get, names
