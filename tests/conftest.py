"""Eight virtual CPU devices for all tests, set before jax starts."""

import atexit
import gc
import os
import re
import shutil
import sys
import tempfile
import traceback

import pytest

from tests.support import commands, compiling, shards
from tests.support.optional import HAS_TENSORFLOW, HAS_TORCH

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    # Compiling is most of the suite's time.
    + compiling.FLAGS
)
# On a machine with a GPU, it is the default device of `-m on_gpu`, and of all
# tests whose strategies take JAX's devices.
if os.environ.get("KERAS_STRATEGIES_TEST_GPU") == "1":
    os.environ["JAX_PLATFORMS"] = "cuda,cpu"
    os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
else:
    os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["KERAS_BACKEND"] = "jax"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
# libtpu compiles here, in several processes, and finds no TPU to ask about.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

# Python keeps what it compiled of modules, wherever it was told not to: all
# workers, all children and the next run import the same ones.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Many tests compile the same program: all workers share what was compiled.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.mkdtemp(prefix="keras-strategies-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)


NO_TORCH = (
    "torch is not installed: its tests are left out. `./run test --torch` "
    "installs it."
)
# These runs leave out the tests that have a mark of another run, too.
LANES = ("quick", "multi_process", "tpu")
OTHER_RUNS = ("slow", "tpu", "gpu", "on_gpu", "ray", "slurm")
collect_ignore = [] if HAS_TORCH else ["data/sources/test_torch_data.py"]


def pytest_addoption(parser):
    parser.addoption(
        "--shard",
        help="run a part of the tests, such as 2/3: the second of three parts",
    )


def pytest_configure(config):
    # Traces make many objects: with Python's numbers, its garbage collector
    # takes a twentieth of the suite's time.
    gc.set_threshold(50_000, 20, 20)
    if os.environ.get("KERAS_STRATEGIES_TEST_TORCH") == "1" and not HAS_TORCH:
        pytest.exit("torch is not installed, and asked for", returncode=1)


def pytest_ignore_collect(collection_path, config):
    """Leaves out files unread: those without a test of the lane that is asked
    for; and those that import TensorFlow, if it is not installed."""
    if not collection_path.name.startswith("test_"):
        return None
    if _is_lane(config):
        mark = f"pytest.mark.{config.option.markexpr}"
        return mark not in collection_path.read_text() or None
    if not HAS_TENSORFLOW:
        return _imports_tensorflow(collection_path.read_text()) or None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skips a test that needs TensorFlow where it is not installed; what the
    project imports without being asked for it still fails."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        is_missing = (error.name or "").split(".")[0] == "tensorflow"
        frames = [f for f, _ in traceback.walk_tb(error.__traceback__)]
        names = [frame.f_globals.get("__name__", "") for frame in frames]
        importer = [n for n in names if not n.startswith("importlib")][-1]
        if not is_missing or importer.startswith("keras_strategies."):
            raise
        pytest.skip("TensorFlow is not installed")


def _imports_tensorflow(text):
    return bool(re.search(r"^(import|from) tensorflow\b", text, re.MULTILINE))


def _is_quick(config):
    return config.option.markexpr == "quick"


def _is_lane(config):
    return config.option.markexpr in LANES


def _find_other_runs(config):
    """Returns the marks of the tests that a run leaves out."""
    lane = config.option.markexpr
    if lane == "slow":
        return {"tpu"}
    return set(OTHER_RUNS) - {lane} if lane in LANES else set()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leaves out the tests of torch, by mark or by the name of their case,
    those of a lane that other runs select, and those of other parts.

    pytest has left out the tests of other marks before."""
    others = _find_other_runs(config)
    kept = [
        item
        for item in items
        if not any(map(item.get_closest_marker, others))
        and (HAS_TORCH or not _needs_torch(item))
    ]
    if config.option.shard:
        names = [item.nodeid for item in kept]
        chosen = shards.choose(names, config.option.shard, _find_scope)
        kept = [item for item in kept if item.nodeid in chosen]
    ids = set(map(id, kept))
    config.hook.pytest_deselected(items=[x for x in items if id(x) not in ids])
    items[:] = kept


def _needs_torch(item):
    case = getattr(item, "callspec", None)
    return item.get_closest_marker("torch") is not None or (
        case is not None and re.search(r"(\b|of_)torch\b", case.id) is not None
    )


def pytest_terminal_summary(terminalreporter):
    if not HAS_TORCH:
        terminalreporter.write_line(NO_TORCH)


@pytest.fixture(scope="session", autouse=True)
def _fast_children():
    commands.start_children_fast(os.environ)


@pytest.fixture(scope="module", autouse=True)
def _forget_programs(request):
    """A worker would hold gigabytes of programs at the end, and each look of
    the garbage collector at all of it takes seconds."""
    yield
    if _is_quick(request.config):
        # Importing it takes longer than most of them.
        assert "tensorflow" not in sys.modules, "a quick test imported it"
        return
    import jax

    jax.clear_caches()
    gc.collect()
    gc.freeze()


def pytest_xdist_make_scheduler(config, log):
    """One worker runs all tests of a scope. (pytest 9.2 hides the mark
    `xdist_group` from xdist 3.8.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return _find_scope(nodeid)

    return ByFile(config, log)


def _find_scope(nodeid):
    """Returns the tests that belong together: all of a file, which share what
    was traced and built; of the longest file, all of a case, which share the
    one-device results; of programs for TPUs, which share nothing, one."""
    if "tpu/test_compile.py" in nodeid:
        return nodeid
    case = re.search(r"parity/test_fit\.py::\w+\[(\w+)", nodeid)
    return case[1] if case else nodeid.partition("::")[0]
