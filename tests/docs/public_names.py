"""The public names of the package, with their objects."""

import ast
import importlib
import inspect
import types

import keras_strategies as ks

# Not an attribute of `ks`: programs that train have no use for it.
APART = ("keras_strategies.testing",)


def list_names(module):
    """The names that a public module offers, in order."""
    if hasattr(module, "_MODULES"):
        return sorted(module._MODULES)
    body = ast.parse(inspect.getsource(module)).body
    return sorted(
        alias.asname
        for node in body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname and alias.asname == alias.name
    )


def public_modules():
    """The public modules, by their dotted names."""
    found = {}
    waiting = [ks, *map(importlib.import_module, APART)]
    while waiting:
        module = waiting.pop(0)
        found[module.__name__] = module
        values = (getattr(module, name) for name in list_names(module))
        waiting += [v for v in values if isinstance(v, types.ModuleType)]
    return found


def public_names():
    """The objects of all public names, by their dotted names."""
    return {
        f"{path}.{name}": getattr(module, name)
        for path, module in public_modules().items()
        for name in list_names(module)
        if not isinstance(getattr(module, name), types.ModuleType)
    }


def public_code():
    """The public classes and functions, by their dotted names."""
    return {
        path: value
        for path, value in public_names().items()
        if inspect.isclass(value) or inspect.isroutine(value)
    }


def public_docstrings():
    """The docstrings of modules, names and members, by dotted names.

    An object with several names has the first one, and a member that is
    inherited is its base's.
    """
    found = {path: m.__doc__ for path, m in public_modules().items()}
    names = public_code()
    seen = set()
    for path in sorted(names, key=lambda path: _depth(names[path])):
        for place, value in ((path, names[path]), *_members(path, names[path])):
            if id(value) not in seen and value.__doc__:
                seen.add(id(value))
                found[place] = value.__doc__
    return found


def _depth(value):
    return len(value.__mro__) if inspect.isclass(value) else 0


def _members(path, value):
    """Yields the public methods and properties that are defined here."""
    if not inspect.isclass(value):
        return
    for base in value.__mro__:
        if base.__module__.partition(".")[0] == "keras_strategies":
            for name, member in vars(base).items():
                member = getattr(member, "__func__", member)
                is_code = inspect.isroutine(member)
                if not name.startswith("_") and (
                    is_code or isinstance(member, property)
                ):
                    yield f"{path}.{name}", member
