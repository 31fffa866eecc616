"""Costs that are kept between plans, and files that are not ours."""

import dataclasses
import importlib.metadata
import json
import os
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from keras_strategies.gpu.topology_devices import TARGETS
from keras_strategies.planning.compile import compiler as compiling
from keras_strategies.planning.compile.compiler import Compiler, DoesNotFit
from keras_strategies.planning.program.costs import Costs
from keras_strategies.spmd.dispatch import without_jax_cache
from tests.planning.made import GIB
from tests.support.gpus import make_hosts
from tests.support.pipes import read_a_pipe

pytestmark = pytest.mark.quick

DEVICES = jax.devices()[:1]
MISFIT = {"misfit": "RESOURCE_EXHAUSTED: too large", "needed": 16.5e9}
KEPT = {
    "argument_bytes": 1,
    "output_bytes": 2,
    "temporary_bytes": 3.5,
    "flops": 4,
    "kernel_flops": 0,
    "compute_seconds": 0,
    "code_bytes": 5,
    "moved_bytes": 6,
    "busy_seconds": 0.25,
    "latency_seconds": 0,
    "link_seconds": {"all-reduce": 0.125},
    "waiting_seconds": {},
    "top_operations": {"gather in a layer": 0.1},
    "unknown_loops": {},
    "compile_seconds": 0.5,
    "counts": {"all-reduce": 2},
    "sent": {"all-reduce": 8.0},
    "unread": "",
}


class Lowered:
    """A lowered program that counts how often it is compiled."""

    def __init__(self, fn, error=None):
        self._lowered = jax.jit(fn).lower(jnp.ones(8))
        self._error = error
        self.num_compiled = 0

    def as_text(self):
        return self._lowered.as_text()

    def compile(self, compiler_options=None):
        self.num_compiled += 1
        if self._error is not None:
            raise jax.errors.JaxRuntimeError(self._error)
        return self._lowered.compile(compiler_options=compiler_options)


def compiled(lowered, directory):
    compiler = Compiler(num_threads=1, directory=directory)
    try:
        return compiler.submit(lowered, DEVICES, is_full=True).result()
    finally:
        compiler.close()


def double(x):
    return 2 * x


def test_the_same_program_is_compiled_once(tmp_path):
    directory = tmp_path / "not" / "there"
    lowered = Lowered(double)
    first, second = (compiled(lowered, directory) for _ in range(2))
    assert lowered.num_compiled == 1
    assert isinstance(first, Costs)
    assert first == second
    assert len(os.listdir(directory)) == 1
    other = Lowered(lambda x: 3 * x)
    compiled(other, directory)
    assert other.num_compiled == 1
    assert len(os.listdir(directory)) == 2


def test_without_a_directory_nothing_is_kept():
    lowered = Lowered(double)
    assert compiled(lowered, None).argument_bytes == 32
    compiled(lowered, None)
    assert lowered.num_compiled == 2


def test_a_compiler_s_flags_are_part_of_what_figures_are_kept_by(
    tmp_path, monkeypatch
):
    lowered = Lowered(double)
    compiled(lowered, tmp_path)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=9")
    compiled(lowered, tmp_path)
    assert lowered.num_compiled == 2


def test_flags_in_a_file_are_part_of_what_figures_are_kept_by(
    tmp_path, monkeypatch
):
    lowered, file = Lowered(double), tmp_path / "flags"
    monkeypatch.setenv("XLA_FLAGS", str(file))
    for count, value in ((1, 1), (2, 2), (2, 1)):
        file.write_text(f"--xla_a={value}")
        compiled(lowered, tmp_path / "figures")
        assert lowered.num_compiled == count


def test_a_program_that_does_not_fit_is_compiled_once(tmp_path):
    message = "RESOURCE_EXHAUSTED: for HLO temporaries (2.00G) exceeds\nmore"
    lowered = Lowered(double, message)
    for _ in range(2):
        found = compiled(lowered, tmp_path)
        assert isinstance(found, DoesNotFit)
        assert str(found) == message.splitlines()[0]
        assert found.needed == 2 * 2**30
    assert lowered.num_compiled == 1


def test_another_error_is_raised_and_not_kept(tmp_path):
    lowered = Lowered(double, "INTERNAL: a problem")
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="a problem"):
            compiled(lowered, tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 5000,
        b"null",
        json.dumps(KEPT | {"more": 1}).encode(),
        json.dumps(KEPT).encode() + b" " * 10_000,
        json.dumps(KEPT | {"flops": float("nan")}).encode(),
        json.dumps(KEPT | {"flops": 10**400}).encode(),
        json.dumps(KEPT).replace("3.5", "9" * 9000).encode(),
    ],
    ids=[
        *("empty", "half", "no text", "deep", "null", "more", "huge"),
        *("nan", "a large number", "a number of many digits"),
    ],
)
def test_a_damaged_file_is_written_anew(text, tmp_path):
    lowered = Lowered(double)
    first = compiled(lowered, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(text)
    assert compiled(lowered, tmp_path).flops == first.flops
    assert lowered.num_compiled == 2
    compiled(lowered, tmp_path)
    assert lowered.num_compiled == 2


def test_a_directory_in_the_file_s_place_costs_time_alone(tmp_path):
    lowered = Lowered(double)
    compiled(lowered, tmp_path)
    (file,) = tmp_path.iterdir()
    file.unlink()
    file.mkdir()
    assert isinstance(compiled(lowered, tmp_path), Costs)
    assert list(tmp_path.iterdir()) == [file], "what was written half is there"


def test_a_pipe_in_the_file_s_place_is_not_waited_for(tmp_path):
    lowered = Lowered(double)
    compiled(lowered, tmp_path)
    (file,) = tmp_path.iterdir()
    file.unlink()
    found = read_a_pipe(file, lambda: compiled(lowered, tmp_path))
    assert isinstance(found, Costs)
    assert file.is_file()
    assert lowered.num_compiled == 2


def test_what_is_no_file_is_not_read(tmp_path):
    (tmp_path / "unknown_loops").symlink_to("/dev/zero")
    assert compiling._read(tmp_path / "unknown_loops") is None


@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
def test_directories_are_their_owner_s_alone(tmp_path, mask):
    top = tmp_path / "cache"
    before = os.umask(mask)
    try:
        compiled(Lowered(double), top / "keras_strategies" / "plans")
    finally:
        os.umask(before)
    modes = [p.stat().st_mode & 0o777 for p in (top, *top.rglob("*"))]
    assert sorted(modes) == [0o600, 0o700, 0o700, 0o700]


def test_a_directory_that_cannot_be_written_costs_time_alone(tmp_path):
    # Root may write into read-only directories.
    (tmp_path / "file").write_text("")
    lowered = Lowered(double)
    for _ in range(2):
        found = compiled(lowered, tmp_path / "file" / "plans")
        assert isinstance(found, Costs)
    assert lowered.num_compiled == 2


def test_what_is_ours_is_read():
    assert compiling._parse(KEPT) == Costs(**KEPT)
    found = compiling._parse(MISFIT)
    assert isinstance(found, DoesNotFit)
    assert (str(found), found.needed) == tuple(MISFIT.values())
    found = compiling._parse(MISFIT | {"needed": None})
    assert isinstance(found, DoesNotFit)
    assert found.needed is None


@pytest.mark.parametrize(
    "kept",
    [
        *(None, 7, "flops", [], {}, [KEPT]),
        MISFIT | {"misfit": None},
        MISFIT | {"needed": "16"},
        MISFIT | {"needed": -1},
        MISFIT | {"needed": float("inf")},
        {"misfit": "x"},
        KEPT | {"flops": None},
        KEPT | {"flops": True},
        KEPT | {"flops": "4"},
        KEPT | {"flops": -4.0},
        KEPT | {"flops": float("nan")},
        KEPT | {"flops": 10**400},
        KEPT | {"counts": []},
        KEPT | {"counts": {"all-reduce": "2"}},
        KEPT | {"counts": {"<script>": 2}},
        KEPT | {"sent": {"all-reduce": float("inf")}},
        {k: v for k, v in KEPT.items() if k != "sent"},
        KEPT | {"more": 1},
        KEPT | {"unread": None},
    ],
)
def test_what_is_not_ours_is_none(kept):
    assert compiling._parse(kept) is None


def test_the_directory_is_the_user_s(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = tmp_path / "keras_strategies" / "plans"
    assert compiling.find_cache_directory() == expected
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = tmp_path / ".cache" / "keras_strategies" / "plans"
    assert compiling.find_cache_directory() == expected


def test_jax_s_own_cache_is_as_before_afterwards():
    def read():
        return jax.config.jax_persistent_cache_min_compile_time_secs

    before = read()
    with without_jax_cache(), ThreadPoolExecutor() as pool:
        assert read() == 1e9
        assert pool.submit(read).result() == before
    assert read() == before


REAL = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required "
    "for HLO temporaries (16.01G) exceeds available HBM (15.75G)."
)


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        (REAL, 16.01 * GIB),
        (f"{REAL}\n\nmore (1.00G)\n", 16.01 * GIB),
        (REAL.replace("16.01G", "2.5T"), 2.5 * 2**40),
        (REAL.replace("16.01G", "512.00M"), 512 * 2**20),
        (REAL.replace("16.01G", "100"), 100.0),
        ("RESOURCE_EXHAUSTED: Out of memory.", None),
        ("RESOURCE_EXHAUSTED", None),
    ],
)
def test_an_error_of_too_little_memory_is_a_misfit(message, needed):
    found = compiling.parse_misfit(jax.errors.JaxRuntimeError(message))
    assert isinstance(found, DoesNotFit)
    assert found.needed == needed
    assert str(found) == message.splitlines()[0]


@pytest.mark.parametrize(
    "message",
    [
        "",
        "INTERNAL: Mosaic failed to compile",
        "INVALID_ARGUMENT: HLO temporaries (16.01G) RESOURCE_EXHAUSTED",
        "UNIMPLEMENTED: no such thing",
    ],
)
def test_another_error_is_none(message):
    assert compiling.parse_misfit(jax.errors.JaxRuntimeError(message)) is None


def test_figures_of_a_program():
    x = jnp.ones((64, 64))
    program = jax.jit(lambda x: x @ x).lower(x).compile()
    found = Costs.measure(program, 1.5)
    assert found.argument_bytes == found.output_bytes == 4 * 64 * 64
    code = program.memory_analysis().generated_code_size_in_bytes
    assert found.code_bytes == code
    standing = found.argument_bytes + found.output_bytes
    assert found.bytes_in_all == standing + found.temporary_bytes + code
    # The speed of a CPU is unknown.
    assert found.flops == found.busy_seconds == 0
    assert found.counts == found.sent == {}
    assert found.compile_seconds == 1.5


def test_the_compilers_are_named_with_their_versions(monkeypatch):
    assert f"jax {jax.__version__}" in compiling.list_compilers()
    for name in ("libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt"):
        with monkeypatch.context() as patch:
            patch.setattr(
                importlib.metadata,
                "version",
                lambda of, name=name: "7" if of == name else _raise(of),
            )
            found = compiling.list_compilers.__wrapped__()
        assert found == (f"{name} 7",)


def _raise(name):
    raise importlib.metadata.PackageNotFoundError(name)


def test_costs_are_those_of_a_target_and_its_hosts(monkeypatch):
    lowered = Lowered(double)

    def key(devices):
        return compiling._make_key(lowered, devices, None, ())

    first = key(make_hosts(1, 8))
    assert key(make_hosts(1, 8)) == first
    assert key(make_hosts(2, 4)) != first
    assert key(make_hosts(1, 8, "h200")) != first
    faster = dataclasses.replace(TARGETS["h100"], clock_ghz=9.0)
    monkeypatch.setitem(TARGETS, "h100", faster)
    assert key(make_hosts(1, 8)) != first
