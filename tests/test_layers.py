"""The layers of the package, read from its sources.

A module imports its own layer or a lower one. Keras stays out of the lowest
layers, `keras.src` in the bridge, `shard_map` in one module, and optional
packages out of all module-level imports.
"""

import ast
import pathlib

import pytest

import keras_strategies

PACKAGE = "keras_strategies"
ROOT = pathlib.Path(keras_strategies.__file__).parent
RANKS = {
    "_core": 0,
    "cluster": 0,
    "data": 1,
    "keras_bridge": 1,
    "tpu": 1,
    "strategy": 2,
    "checkpoint": 3,
    "estimator": 3,
    "cli": 4,
    "testing": 4,
}
WITHOUT_KERAS = ("_core", "cluster")
OPTIONAL = ("tensorflow", "orbax", "grain", "torch")
MAX_LINES = 400


def violations(path, source):
    """What breaks the rules in one module; `path` is within the package."""
    tree = ast.parse(source)
    found = []
    layer = path.split("/")[0]
    if len(source.splitlines()) > MAX_LINES:
        found.append(f"{path}: over {MAX_LINES} lines")
    for name, is_eager in _imports(tree):
        parts = name.split(".")
        if parts[0] == PACKAGE and len(parts) > 1 and layer in RANKS:
            other = parts[1]
            if RANKS.get(other, 0) > RANKS[layer] or (
                other != layer and RANKS.get(other) == RANKS[layer]
            ):
                found.append(f"{path}: {layer} imports {name}")
        if name.startswith("keras.src") and layer != "keras_bridge":
            found.append(f"{path}: {name} outside keras_bridge")
        if parts[0] == "keras" and layer in WITHOUT_KERAS:
            found.append(f"{path}: {layer} imports keras")
        if parts[0] in OPTIONAL and is_eager:
            found.append(f"{path}: imports {name} eagerly")
    if path != "_core/replica_map.py":
        found += [
            f"{path}: uses shard_map"
            for node in ast.walk(tree)
            if "shard_map"
            in (
                getattr(node, "attr", None),
                getattr(node, "id", None),
                getattr(node, "name", None),
            )
        ]
    return found


def _imports(tree):
    """Imported names, with whether that happens when the module is read."""
    lazy = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    typing_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If)
        and getattr(branch.test, "id", None) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        is_eager = id(node) not in lazy | typing_only
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, is_eager
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield f"{node.module}.{alias.name}", is_eager


@pytest.mark.parametrize(
    "path", sorted(str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py"))
)
def test_module_keeps_the_rules(path):
    assert violations(path, (ROOT / path).read_text()) == []


@pytest.mark.parametrize(
    ("path", "source", "text"),
    [
        (
            "_core/a.py",
            "from keras_strategies.strategy import current",
            "_core imports",
        ),
        (
            "keras_bridge/a.py",
            "def f():\n    import keras_strategies.strategy.tpu",
            "keras_bridge imports",
        ),
        (
            "keras_bridge/a.py",
            "from keras_strategies.tpu import topology",
            "keras_bridge imports",
        ),
        ("strategy/a.py", "from keras.src import tree", "outside"),
        ("strategy/a.py", "import keras.src.losses", "outside"),
        ("_core/a.py", "import keras", "imports keras"),
        ("cluster/a.py", "from keras import ops", "imports keras"),
        ("strategy/a.py", "import jax\njax.shard_map(f)", "shard_map"),
        ("_core/a.py", "from jax import shard_map", "shard_map"),
        ("strategy/a.py", "import tensorflow as tf", "eagerly"),
        ("strategy/a.py", "if True:\n    import orbax.checkpoint", "eagerly"),
        ("strategy/a.py", "\n" * 401, "over 400 lines"),
    ],
)
def test_a_broken_rule_is_found(path, source, text):
    assert text in violations(path, source)[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("_core/replica_map.py", "import jax\njax.shard_map(f)"),
        ("keras_bridge/a.py", "from keras.src import tree"),
        ("strategy/a.py", "def f():\n    import tensorflow"),
        ("strategy/a.py", "from keras_strategies._core.mesh import X"),
        ("cli/a.py", "from keras_strategies.strategy.tpu import X"),
    ],
)
def test_what_the_rules_allow_is_not_found(path, source):
    assert violations(path, source) == []
