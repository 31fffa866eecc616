"""Eight virtual CPU devices for all tests, set before jax starts."""

import atexit
import gc
import os
import re
import shutil
import tempfile

import pytest

from tests import compiling

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    # Compiling is most of the suite's time.
    + compiling.FLAGS
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["KERAS_BACKEND"] = "jax"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
# libtpu compiles here, in several processes, and finds no TPU to ask about.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

# Many tests compile the same program: all workers share what was compiled.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.mkdtemp(prefix="keras-strategies-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """A worker would hold gigabytes of programs at the end, and each look of
    the garbage collector at all of it takes seconds."""
    yield
    import jax

    jax.clear_caches()
    gc.collect()
    gc.freeze()


def pytest_xdist_make_scheduler(config, log):
    """One worker runs all tests of a file, which share what was traced and
    built; of the longest file, all of a case, which share the one-device
    results. (pytest 9.2 hides the mark `xdist_group` from xdist 3.8.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            case = re.search(r"parity/test_fit\.py::\w+\[(\w+)", nodeid)
            return case[1] if case else nodeid.partition("::")[0]

    return ByFile(config, log)
