"""Which module may import what, and how large each room may be.

The rooms are those of docs/architecture.md. The files are parsed, never
imported. `find_problems` is tried on bad sources too, so that no rule can pass
by looking at nothing.
"""

import ast
import pathlib

import pytest

from benchmarks.structure import count_logic_lines, logic_lines

pytestmark = pytest.mark.quick

PACKAGE = "keras_strategies"
DIRECTORY = pathlib.Path(__file__).parents[1] / PACKAGE

# The rooms of the package, on floors from the lowest to the highest. A module
# imports its own room and those on lower floors. "" are the public modules.
FLOORS = [
    # Names for annotations, which imports nothing of the package.
    {"_types"},
    {"names"},
    {"cluster", "gpu"},
    {"cluster/exchange", "cluster/resolvers"},
    # It reads scripts, and imports neither keras nor jax.
    {"migrate"},
    {"watchdog"},
    {"job"},
    {"passes"},
    {"passes/row_kinds", "passes/slices"},
    {"spmd"},
    {"data", "tpu"},
    {"data/grain", "data/sources", "data/tfdata"},
    {"keras_bridge"},
    {"fit/inputs", "variables", "tape"},
    {"hooks"},
    {"kernels"},
    {"step/ragged", "step/state"},
    {"step"},
    {"fit/callbacks", "run"},
    {"fit"},
    {"strategy/inspect", "strategy/tf_compat"},
    {"strategy"},
    {"planning/seam"},
    # Below the rooms that it must not import: the Estimator's, for example.
    {"planning/program", "planning/report"},
    {"planning/compile"},
    {"planning/capture"},
    {"planning"},
    {"checkpoint/directory"},
    {"checkpoint"},
    {"callbacks"},
    {"reporting"},
    {"estimator/seam"},
    {"estimator/config"},
    {"estimator"},
    {"estimator/contrib"},
    # As users import it.
    {""},
    {"cli/checkpoints", "cli/launch", "testing"},
    {"cli/doctor"},
    {"cli"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# The only packages that import `planning`: others call it by a name
# (lazy_names.py).
PLANNERS = {"cli", "planning"}
# The packages that import others by one module, `seam.py`, and the number of
# names there. It may only fall.
SEAMS = {"planning": 48, "estimator": 37}
# What users see of a package: they import all its rooms.
FACADES = {"__init__.py", "experimental.py"}
MAX_MODULES = 16
# The only ones that use `keras.src`.
BRIDGE = {"fit", "hooks", "keras_bridge", "kernels", "run", "step", "variables"}
WITHOUT_KERAS = {
    "cluster",
    "job",
    "migrate",
    "names",
    "passes",
    "spmd",
    "watchdog",
}
# The only one that imports `migrate`.
MIGRATES = {"cli", "migrate"}
LAZY = {"tensorflow", "orbax", "grain", "torch", "tensorboardX"}
MAX_LINES = 400

# The logic lines of each room with its subrooms (`./run bench structure`). A
# number may only fall. A change that raises one says in its message what users
# get for it and what it deleted.
LOGIC_LINES = {
    "": 121,
    "callbacks": 543,
    "checkpoint": 1991,
    "cli": 1787,
    "cluster": 2431,
    "data": 2789,
    "estimator": 2310,
    "fit": 1773,
    "gpu": 265,
    "hooks": 1430,
    "job": 583,
    "keras_bridge": 314,
    "kernels": 2035,
    "migrate": 1482,
    "names": 251,
    "passes": 4768,
    "planning": 2508,
    "reporting": 799,
    "run": 651,
    "spmd": 1507,
    "step": 2438,
    "strategy": 1719,
    "tape": 445,
    "testing": 150,
    "tpu": 1006,
    "variables": 1568,
    "watchdog": 916,
}
# How far a room may be below its number. Then the number falls, too.
SLACK = 40


def find_problems(path, source):
    """The rules that a module breaks.

    Args:
      path: Its file, relative to the package: "spmd/mesh.py".
      source: Its text.

    Returns:
      A sentence for each problem.
    """
    path = pathlib.PurePosixPath(path)
    package = path.parts[0] if len(path.parts) > 1 else ""
    floor = _find_floor(path)
    tree = ast.parse(source)
    imports = list(_find_imports(path, tree))
    problems = []
    for line, name, is_eager in imports:
        root = name.split(".")[0]
        room = _find_room(name) if root == PACKAGE else None
        if room is not None and not (
            room == _room_of_file(path) or FLOOR.get(room, 99) < floor
        ):
            problems.append(f"{path}:{line}: imports a room above: {name}")
        is_plan = f"{name}.".startswith(f"{PACKAGE}.planning.")
        if is_plan and package not in PLANNERS:
            problems.append(f"{path}:{line}: {package!r} imports planning")
        is_outside = room is not None and room.split("/")[0] != package
        if is_outside and package in SEAMS and not _is_seam(path, room):
            problems.append(f"{path}:{line}: not by {package}/seam.py: {name}")
        is_port = f"{name}.".startswith(f"{PACKAGE}.migrate.")
        if is_port and package not in MIGRATES:
            problems.append(f"{path}:{line}: {package!r} imports migrate")
        if root == "keras" and package in WITHOUT_KERAS:
            problems.append(f"{path}:{line}: {package!r} imports keras")
        if root in LAZY and is_eager:
            problems.append(f"{path}:{line}: {root} is imported eagerly")
    names = [(line, name) for line, name, _ in imports]
    names += [(node.lineno, word) for node, word in _find_names(tree)]
    for line, name in names:
        if f"{name}.".startswith("keras.src.") and package not in BRIDGE:
            problems.append(f"{path}:{line}: keras.src outside the bridge")
        is_its_place = str(path) == "spmd/replica_map.py"
        if "shard_map" in name.split(".") and not is_its_place:
            problems.append(
                f"{path}:{line}: shard_map outside spmd/replica_map"
            )
    if (count := len(source.splitlines())) > MAX_LINES:
        problems.append(f"{path}: {count} lines, over {MAX_LINES}")
    return problems


def _room_of_file(path):
    is_types = path.as_posix() == "_types.py"
    room = "_types" if is_types else "/".join(path.parts[:-1])
    return f"{room}/seam" if path.name == "seam.py" else room


def _is_seam(path, room):
    """Whether a file of a package with a seam may import from a room."""
    return path.name in {"seam.py", *FACADES} or room == "_types"


def _find_floor(path):
    """The floor of a file; -1 for one of an unknown room."""
    room = _room_of_file(path)
    if path.name not in FACADES:
        return FLOOR.get(room, -1)
    rooms = [other for other in FLOOR if f"{other}/".startswith(f"{room}/")]
    return max((FLOOR[other] for other in rooms), default=-1) + 1


def _find_room(module):
    """The room that a dotted name of the package belongs to."""
    parts = module.split(".")[1:]
    for count in (2, 1):
        room = "/".join(parts[:count])
        if len(parts) >= count and room in FLOOR:
            return room
    if parts and parts[0] == "_types":
        return "_types"
    if parts and (DIRECTORY / parts[0]).is_dir():
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
    paths = sorted(DIRECTORY.rglob("*.py"))
    assert len(paths) > 20
    problems = [
        problem
        for path in paths
        for problem in find_problems(
            path.relative_to(DIRECTORY).as_posix(), path.read_text("utf-8")
        )
    ]
    assert not problems, "\n".join(problems)


def test_every_room_has_a_floor():
    rooms = {
        _room_of_file(path.relative_to(DIRECTORY))
        for path in DIRECTORY.rglob("*.py")
    }
    assert rooms - {"", "_types"} == set(FLOOR) - {"", "_types"}
    assert sum(map(len, FLOORS)) == len(FLOOR)


def test_no_room_is_overcrowded():
    for room in set(FLOOR) - {"", "_types"}:
        modules = [p for p in (DIRECTORY / room).glob("*.py")]
        assert len(modules) <= MAX_MODULES + 1, room


@pytest.mark.parametrize("package", SEAMS)
def test_no_seam_grows(package):
    tree = ast.parse((DIRECTORY / package / "seam.py").read_text("utf-8"))
    names = [
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert len(names) == SEAMS[package]
    # They are imported for others, and nothing else is there.
    assert all(isinstance(node, ast.ImportFrom) for node in tree.body[1:])


def find_grown(counts):
    """The rooms that are larger than their numbers, or much smaller.

    Args:
      counts: The logic lines of each room, by name.

    Returns:
      A sentence for each of these rooms.
    """
    return [
        f"{room or 'no room'}: {counts.get(room, 0)} logic lines, not {maximum}"
        for room, maximum in LOGIC_LINES.items()
        if not maximum - SLACK <= counts.get(room, 0) <= maximum
    ] + [f"{room}: no number" for room in counts.keys() - LOGIC_LINES.keys()]


def test_no_room_grows():
    assert find_grown(count_logic_lines(DIRECTORY)) == []


def test_a_room_that_grows_is_seen():
    counts = count_logic_lines(DIRECTORY)
    function = "def f():\n" + "    g()\n" * 59
    grown = counts["spmd"] + len(logic_lines(function))
    (problem,) = find_grown(counts | {"spmd": grown})
    assert problem.startswith("spmd: ")
    assert find_grown(counts | {"new": 1}) == ["new: no number"]
    assert find_grown(counts | {"spmd": counts["spmd"] - 60})


def find_circles(imports):
    """Groups of modules that import each other, directly or not.

    Args:
      imports: The modules that each module imports, by name.

    Returns:
      A sorted list for each group.
    """
    reached = {}
    for module in imports:
        seen, waiting = set(), [module]
        while waiting:
            for other in imports.get(waiting.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
        reached[module] = seen
    circles = {
        tuple(sorted(m for m in seen if module in reached.get(m, ())))
        for module, seen in reached.items()
        if module in seen
    }
    return sorted(map(list, circles))


def imports_of_all(sources):
    """For each module, which of the others it imports anywhere."""
    names = {}
    for path in sources:
        path = pathlib.PurePosixPath(path)
        parts = [PACKAGE, *path.with_suffix("").parts]
        names[path] = ".".join(parts).removesuffix(".__init__")
    known, imports = set(names.values()), {}
    for path, name in names.items():
        tree = ast.parse(sources[path.as_posix()])
        found = set()
        for _, module, _ in _find_imports(path, tree):
            whole = module if module in known else module.rpartition(".")[0]
            found |= {whole} & known - {name}
        imports[name] = found
    return imports


def read_sources():
    return {
        path.relative_to(DIRECTORY).as_posix(): path.read_text("utf-8")
        for path in DIRECTORY.rglob("*.py")
    }


def test_every_module_that_is_imported_exists():
    """Also one that only a function or a type checker imports."""
    count = 0
    for path, source in read_sources().items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and not node.level:
                parts = node.module.split(".")
                if parts[0] == PACKAGE:
                    count += 1
                    place = DIRECTORY.joinpath(*parts[1:])
                    is_there = place.is_dir() or place.with_suffix(".py")
                    assert is_there is True or is_there.is_file(), (
                        f"{path}:{node.lineno}: {node.module}"
                    )
    assert count > 500


def test_no_modules_import_each_other():
    sources = read_sources()
    imports = imports_of_all(sources)
    assert sum(map(len, imports.values())) > 500
    assert find_circles(imports) == []


@pytest.mark.parametrize(
    ("sources", "circles"),
    [
        ({"a.py": "from . import b", "b.py": ""}, 0),
        ({"a.py": "from . import b", "b.py": "from . import a"}, 1),
        (
            {
                "a.py": "from keras_strategies.b import c",
                "b.py": "def f():\n  from keras_strategies import d",
                "d.py": "if TYPE_CHECKING:\n  import keras_strategies.a",
                "e.py": "from . import a",
            },
            1,
        ),
    ],
)
def test_circles_are_found(sources, circles):
    found = find_circles(imports_of_all(sources))
    assert len(found) == circles
    assert all("keras_strategies.e" not in circle for circle in found)


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        (
            "spmd/a.py",
            "import keras_strategies.strategy.mirrored",
            "a room above",
        ),
        ("spmd/a.py", "from keras_strategies import data", "a room above"),
        ("spmd/a.py", "from ..strategy import mirrored", "a room above"),
        ("spmd/a.py", "from .. import strategy", "a room above"),
        ("cluster/a.py", "from keras_strategies.spmd import x", "a room above"),
        ("strategy/a.py", "import keras_strategies as ks", "a room above"),
        ("strategy/a.py", "from keras_strategies import merge", "a room above"),
        ("strategy/a.py", "def f():\n  from ..cli import main", "a room above"),
        ("data/a.py", "from keras_strategies.fit import x", "a room above"),
        (
            "__init__.py",
            "from keras_strategies.cli import main",
            "a room above",
        ),
        *(
            (
                f"{room}/a.py",
                f"def f():\n  from keras_strategies.{above} import x",
                "a room above",
            )
            for room in ("spmd", "data", "fit", "strategy", "tpu")
            for above in ("planning", "estimator", "cli")
        ),
        *(
            (
                f"{room}/a.py",
                "def f():\n  import keras_strategies.planning.x",
                "imports planning",
            )
            for room in ("callbacks", "checkpoint", "estimator", "testing")
        ),
        *(
            (
                "planning/capture/a.py",
                f"def f():\n  from keras_strategies.{room} import x",
                "a room above",
            )
            for room in ("checkpoint", "estimator", "reporting")
        ),
        (
            "strategy/plans.py",
            "def f():\n  from keras_strategies.planning.plan_api import x",
            "a room above",
        ),
        (
            "strategy/a.py",
            "if TYPE_CHECKING:\n  from keras_strategies.planning import x",
            "a room above",
        ),
        (
            "strategy/a.py",
            "def f():\n  from keras_strategies.migrate.port import x",
            "imports migrate",
        ),
        ("migrate/a.py", "import keras", "imports keras"),
        (
            "planning/compile/a.py",
            "from keras_strategies.planning.capture import x",
            "a room above",
        ),
        ("new/a.py", "from keras_strategies.spmd import mesh", "a room above"),
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
        ("spmd/mesh.py", "from jax import shard_map", "shard_map"),
        ("spmd/a.py", "from jax import shard_map as s", "shard_map"),
        ("spmd/a.py", "from m import s as shard_map", "shard_map"),
        ("spmd/a.py", "import jax.experimental.shard_map", "shard_map"),
        ("spmd/a.py", "shard_map(f)", "shard_map"),
        ("spmd/a.py", "import keras", "imports keras"),
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
        (
            "hooks/a.py",
            "from keras_strategies.step import x",
            "a room above",
        ),
        (
            "run/a.py",
            "def f():\n  from keras_strategies.fit.callbacks import x",
            "a room above",
        ),
        (
            "cluster/a.py",
            "from keras_strategies.job.bootstrap import x",
            "a room above",
        ),
        ("cluster/a.py", "from ..watchdog import progress", "a room above"),
        (
            "planning/compile/a.py",
            "def f():\n  from keras_strategies.spmd.mesh import ReplicaMesh",
            "not by planning/seam.py",
        ),
        (
            "estimator/a.py",
            "from keras_strategies.strategy import mirrored",
            "not by estimator/seam.py",
        ),
        (
            "reporting/a.py",
            "def f():\n  from keras_strategies.planning.compile import x",
            "imports planning",
        ),
        (
            "data/new/a.py",
            "from keras_strategies.data import x",
            "a room above",
        ),
    ],
)
def test_rule_can_fail(path, source, expected):
    assert expected in "\n".join(find_problems(path, source))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("spmd/a.py", "import jax\nfrom keras_strategies.spmd import mesh"),
        ("spmd/replica_map.py", "import jax\njax.shard_map(f)"),
        ("spmd/a.py", "'''shard_map, keras.src'''\n# shard_map"),
        ("spmd/a.py", "import keras_hub_of_another_name"),
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
        (
            "step/a.py",
            "from keras_strategies.hooks import x\n"
            "from keras_strategies.step.b import y\n"
            "from keras_strategies.keras_bridge import keras_names",
        ),
        ("data/__init__.py", "from keras_strategies.data.sources import x"),
        (
            "planning/seam.py",
            "from keras_strategies.spmd.mesh import ReplicaMesh as ReplicaMesh",
        ),
        ("planning/a.py", "from keras_strategies.planning.seam import values"),
    ],
)
def test_good_source_is_let_through(path, source):
    assert find_problems(path, source) == []
