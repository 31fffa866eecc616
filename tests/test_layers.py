"""Which module may import what: the layers of docs/architecture.md.

The files are parsed, never imported. `find_faults` is tried on bad sources
too, so that no rule can pass by looking at nothing.
"""

import ast
import pathlib

import pytest

pytestmark = pytest.mark.quick

PACKAGE = "keras_strategies"
FOLDER = pathlib.Path(__file__).parents[1] / PACKAGE

# A package imports itself and those of a lower rank.
RANKS = {
    "cluster": -1,
    "_core": 0,
    "data": 1,
    "tpu": 1,
    "keras_bridge": 2,
    "strategy": 3,
    "checkpoint": 4,
    "estimator": 5,
    # The public names: keras_strategies/__init__.py, as users import it.
    "": 6,
    "cli": 7,
    "testing": 7,
}
WITHOUT_KERAS = {"_core", "cluster"}
LAZY = {"tensorflow", "orbax", "grain", "torch", "tensorboardX"}
MAX_LINES = 400


def find_faults(path, source):
    """The rules that a module breaks.

    Args:
      path: Its file, relative to the package: "_core/mesh.py".
      source: Its text.

    Returns:
      A sentence for each fault.
    """
    path = pathlib.PurePosixPath(path)
    layer = path.parts[0] if len(path.parts) > 1 else ""
    tree = ast.parse(source)
    imports = list(_find_imports(path, tree))
    faults = []
    for line, name, is_eager in imports:
        root = name.split(".")[0]
        if root == PACKAGE and not _is_allowed(layer, _layer_of(name)):
            faults.append(f"{path}:{line}: {layer!r} imports upwards: {name}")
        if root == "keras" and layer in WITHOUT_KERAS:
            faults.append(f"{path}:{line}: {layer!r} imports keras")
        if root in LAZY and is_eager:
            faults.append(f"{path}:{line}: {root} is imported eagerly")
    names = [(line, name) for line, name, _ in imports]
    names += [(node.lineno, word) for node, word in _find_names(tree)]
    for line, name in names:
        if f"{name}.".startswith("keras.src.") and layer != "keras_bridge":
            faults.append(f"{path}:{line}: keras.src outside keras_bridge")
        is_its_place = str(path) == "_core/replica_map.py"
        if "shard_map" in name.split(".") and not is_its_place:
            faults.append(f"{path}:{line}: shard_map outside _core/replica_map")
    if (count := len(source.splitlines())) > MAX_LINES:
        faults.append(f"{path}: {count} lines, over {MAX_LINES}")
    return faults


def _is_allowed(layer, target):
    if layer not in RANKS or target not in RANKS:
        return False
    return layer == target or RANKS[target] < RANKS[layer]


def _layer_of(module):
    """The layer that a dotted name of the package belongs to."""
    parts = module.split(".")[1:]
    if parts and (parts[0] in RANKS or (FOLDER / parts[0]).is_dir()):
        return parts[0]
    # A name defined in the package's __init__.
    return ""


def _find_imports(path, tree):
    """Yields (line, dotted name, whether it happens at import).

    `from a import b` counts as `a.b`: b may be a module.
    """
    eager = set(_find_eager(tree.body))
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(path, node)
            names = [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and _is_import_call(node):
            names = [node.args[0].value]
        for name in names:
            yield node.lineno, name, node in eager


def _find_eager(body):
    """Yields the nodes that run at import, as those of functions do not."""
    for node in body:
        is_function = isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        )
        if is_function:
            continue
        if _is_for_type_checking(node):
            yield from _find_eager(node.orelse)
            continue
        yield node
        yield from _find_eager(ast.iter_child_nodes(node))


def _is_for_type_checking(node):
    return (
        isinstance(node, ast.If)
        and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING"
    )


def _is_import_call(node):
    name = ast.unparse(node.func).split(".")[-1]
    return (
        name in ("import_module", "__import__")
        and bool(node.args)
        and isinstance(node.args[0], ast.Constant)
    )


def _absolute(path, node):
    """The module an import reads from, with relative dots resolved."""
    if not node.level:
        return node.module
    package = [PACKAGE, *path.parts[:-1]]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *filter(None, [node.module])])


def _find_names(tree):
    """Yields (node, dotted name) for the names that code uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            yield node, ast.unparse(node)
        elif isinstance(node, ast.alias) and node.asname:
            yield node, node.asname


def test_every_module_keeps_the_rules():
    paths = sorted(FOLDER.rglob("*.py"))
    assert len(paths) > 20
    faults = [
        fault
        for path in paths
        for fault in find_faults(
            path.relative_to(FOLDER).as_posix(), path.read_text("utf-8")
        )
    ]
    assert not faults, "\n".join(faults)


def test_every_package_has_a_layer():
    folders = {path.parent.name for path in FOLDER.glob("*/__init__.py")}
    assert folders <= set(RANKS)


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("_core/a.py", "import keras_strategies.strategy.mirrored", "upwards"),
        ("_core/a.py", "from keras_strategies import data", "upwards"),
        ("_core/a.py", "from ..strategy import mirrored", "upwards"),
        ("_core/a.py", "from .. import strategy", "upwards"),
        ("cluster/a.py", "from keras_strategies._core import x", "upwards"),
        ("strategy/a.py", "import keras_strategies as ks", "upwards"),
        ("strategy/a.py", "from keras_strategies import merge", "upwards"),
        ("strategy/a.py", "def f():\n  from ..cli import main", "upwards"),
        ("data/a.py", "from keras_strategies.keras_bridge import x", "upwards"),
        ("__init__.py", "from keras_strategies.cli import main", "upwards"),
        ("new/a.py", "from keras_strategies._core import mesh", "upwards"),
        ("strategy/a.py", "import keras.src.models", "keras.src"),
        ("strategy/a.py", "from keras.src import backend", "keras.src"),
        ("strategy/a.py", "from keras import src", "keras.src"),
        ("strategy/a.py", "import keras\nkeras.src.backend", "keras.src"),
        (
            "strategy/a.py",
            "import importlib\nimportlib.import_module('keras.src')",
            "keras.src",
        ),
        ("strategy/a.py", "import jax\njax.shard_map(f)", "shard_map"),
        ("_core/mesh.py", "from jax import shard_map", "shard_map"),
        ("_core/a.py", "from jax import shard_map as s", "shard_map"),
        ("_core/a.py", "from m import s as shard_map", "shard_map"),
        ("_core/a.py", "import jax.experimental.shard_map", "shard_map"),
        ("_core/a.py", "shard_map(f)", "shard_map"),
        ("_core/a.py", "import keras", "imports keras"),
        ("cluster/a.py", "def f():\n  from keras import ops", "imports keras"),
        ("data/a.py", "import tensorflow as tf", "eagerly"),
        ("data/a.py", "from orbax import checkpoint", "eagerly"),
        ("data/a.py", "try:\n  import grain\nexcept E: pass", "eagerly"),
        ("data/a.py", "class A:\n  import torch.nn", "eagerly"),
        ("data/a.py", "if True:\n  import torch", "eagerly"),
        ("data/a.py", "__import__('torch')", "eagerly"),
        (
            "data/a.py",
            "if TYPE_CHECKING:\n  x = 1\nelse:\n  import torch",
            "eagerly",
        ),
        ("data/a.py", "x = 1\n" * 401, "401 lines"),
    ],
)
def test_rule_can_fail(path, source, expected):
    assert expected in "\n".join(find_faults(path, source))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("_core/a.py", "import jax\nfrom keras_strategies._core import mesh"),
        ("_core/replica_map.py", "import jax\njax.shard_map(f)"),
        ("_core/a.py", "'''shard_map, keras.src'''\n# shard_map"),
        ("_core/a.py", "import keras_hub_of_another_name"),
        ("keras_bridge/a.py", "from keras.src import backend"),
        ("strategy/a.py", "import keras\nfrom ..data import feed"),
        ("strategy/a.py", "from . import mirrored"),
        ("data/a.py", "def f():\n  import tensorflow"),
        (
            "data/a.py",
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n  import tensorflow",
        ),
        ("cli/a.py", "import keras_strategies as ks"),
        ("__init__.py", "from .strategy.mirrored import MirroredStrategy"),
        ("data/a.py", "x = 1\n" * 400),
    ],
)
def test_good_source_is_let_through(path, source):
    assert find_faults(path, source) == []
